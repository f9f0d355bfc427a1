"""How often the 95 % intervals of result tables hold the truth, where the truth is known.

Two kinds are tried. Of these models, over rows: 2,000 populations are drawn in which each site's
model is right at a known rate, and the truth is the mean of the rates. Of the method, training
included: 500 data sets are drawn, logistic regression is trained on repeated divisions or folds of
each, and the truth is its accuracy on fresh rows after training on as many fresh rows.

Beside the intervals that fedgist prints stand those that it does not: a bootstrap of rows, and
Student's t without correction for divisions that overlap.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from fedgist.data.division import Division
from fedgist.data.held_out_rows import held_out
from fedgist.report.tables.stats import Estimate, estimate, mean_of_sites, wilson

Numbers = NDArray[np.float64]
Interval = Callable[[Numbers, Numbers, np.random.Generator], tuple[float, float]]

SITES: dict[str, tuple[list[float], list[int]]] = {
    "four hospitals": ([0.978, 0.969, 0.96, 0.95], [30, 30, 30, 30]),
    "unequal rates": ([0.99, 0.95, 0.9, 0.7], [200, 100, 60, 30]),
    "the reverse": ([0.7, 0.9, 0.95, 0.99], [200, 100, 60, 30]),
    "90 % at each": ([0.9] * 4, [30] * 4),
    "99 % at each": ([0.99] * 4, [30] * 4),
    "60 % at eight": ([0.6] * 8, [30] * 8),
    "two sites": ([0.95, 0.8], [30, 40]),
    "six rows at one": ([0.978, 0.969, 0.96, 0.95], [46, 32, 29, 6]),
    "six rows, bad there": ([0.978, 0.969, 0.96, 0.8], [46, 32, 29, 6]),
}


def bounds(value: Estimate | None) -> tuple[float, float]:
    """Return an estimate's interval."""
    assert value is not None
    assert value.low is not None
    assert value.high is not None
    return value.low, value.high


def bootstrap(share: Numbers, rows: Numbers, rng: np.random.Generator) -> tuple[float, float]:
    """Return the percentile bootstrap of the mean over sites, 1,000 draws of rows in each site."""
    draws = rng.binomial(rows.astype(int), share, (1000, len(rows))) / rows
    low, high = np.quantile(draws.mean(1), [0.025, 0.975])
    return float(low), float(high)


INTERVALS: dict[str, Interval] = {
    "effective rows": lambda s, n, _: bounds(mean_of_sites(s.tolist(), n.tolist())),
    "bootstrap": bootstrap,
}


def over_rows(populations: int) -> None:
    """Print the coverage of intervals over rows."""
    print(f"of these models, over rows: {populations} populations, nominal 95 %")
    print(f"{'':22}{'rows':>22}{'  mean, ' + '  mean, '.join(INTERVALS)}   rows, Wilson")
    for name, (rates, rows) in SITES.items():
        rng = np.random.default_rng(0)
        truth, counts = float(np.mean(rates)), np.array(rows, dtype=float)
        of_rows = float(np.average(rates, weights=rows))
        held = dict.fromkeys([*INTERVALS, "wilson"], 0)
        for right in rng.binomial(rows, rates, (populations, len(rows))):
            share = right / counts
            for kind, interval in INTERVALS.items():
                low, high = interval(share, counts, rng)
                held[kind] += low <= truth <= high
            low, high = wilson(float(right.sum() / counts.sum()), float(counts.sum()))
            held["wilson"] += low <= of_rows <= high
        shares = "".join(f"{100 * held[kind] / populations:21.1f} %" for kind in held)
        print(f"{name:22}{rows!s:>22}{shares}", flush=True)


def rows_of(count: int, rng: np.random.Generator) -> tuple[Numbers, NDArray[np.int64]]:
    """Return rows of two overlapping classes."""
    y = rng.integers(0, 2, count)
    return rng.normal(0.7 * y[:, None], 1.0, (count, 5)), y


def accuracy(train: Sequence[NDArray[Any]], test: Sequence[NDArray[Any]]) -> float:
    """Return the accuracy of logistic regression."""
    return float(LogisticRegression().fit(*train).score(*test))


def of_method(data_sets: int, rows: int) -> None:
    """Print the coverage of intervals over divisions."""
    print(f"of the method, training included: {data_sets} data sets of {rows} rows, nominal 95 %")
    plans = {
        "5 folds": [Division(folds=5, number=i) for i in range(5)],
        "2 x 5 folds": [Division(folds=5, number=i, repeats=2) for i in range(10)],
        "10 divisions, 20 %": [Division(0.2, number=i, repeats=10) for i in range(10)],
    }
    rng = np.random.default_rng(1)
    fresh = rows_of(20_000, rng)
    for name, divisions in plans.items():
        share = divisions[0].share
        trained = round(rows * (1 - share))
        truth = float(np.mean([accuracy(rows_of(trained, rng), fresh) for _ in range(400)]))
        overlap, held = share / (1 - share), {"corrected": 0, "uncorrected": 0}
        for _ in range(data_sets):
            x, y = rows_of(rows, rng)
            scores = []
            for division in divisions:
                mask = held_out(division, y)
                scores.append(accuracy((x[~mask], y[~mask]), (x[mask], y[mask])))
            for kind, ratio in (("corrected", overlap), ("uncorrected", 0.0)):
                low, high = bounds(estimate(scores, overlap=ratio))
                held[kind] += low <= truth <= high
        shares = "".join(f"  {kind} {100 * n / data_sets:.1f} %" for kind, n in held.items())
        print(f"{name:22}{shares}", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--populations", type=int, default=2000)
    parser.add_argument("--data-sets", type=int, default=500)
    parser.add_argument("--rows", type=int, default=150, help="of a drawn data set")
    wanted = parser.parse_args()
    warnings.simplefilter("ignore")
    over_rows(wanted.populations)
    print()
    of_method(wanted.data_sets, wanted.rows)


if __name__ == "__main__":
    main()
