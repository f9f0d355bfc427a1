"""How often the 95 % intervals of result tables hold the truth, where the truth is known.

Two kinds are tried. Of these models, over rows: 2,000 populations are drawn in which each site's
model is right at a known rate, and the truth is the mean of the rates; in which one of two models
alone is right, and the truth is their difference; and 500 with normal scores of two classes, whose
AUROC is known. Of the method, training
included: 500 data sets are drawn, logistic regression is trained on repeated divisions or folds of
each, and the truth is its accuracy on fresh rows after training on as many fresh rows.

Beside the intervals that fedgist prints stand those that it does not: a bootstrap of rows, and
Student's t without correction for divisions that overlap.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from fedgist.data.division import Division
from fedgist.data.held_out_rows import held_out
from fedgist.report.tables.stats import (
    Estimate,
    estimate,
    mean_of_differences,
    mean_of_sites,
    wilson,
)
from fedgist.report.tables.tested_rows import SiteRows, resampled
from fedgist.runs.files.prediction_file import Predictions

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


#: Chances that only the one, or only the other of two models is right about a row, by site.
PAIRS: dict[str, tuple[list[tuple[float, float]], list[int]]] = {
    "5 % against 2 %": ([(0.05, 0.02)] * 4, [30] * 4),
    "equal, 5 %": ([(0.05, 0.05)] * 4, [30] * 4),
    "2 % against 1 %": ([(0.02, 0.01)] * 4, [30] * 4),
    "20 % against 10 %": ([(0.2, 0.1)] * 4, [30] * 4),
    "unequal sites": ([(0.01, 0.01), (0.05, 0.03), (0.1, 0.05), (0.1, 0.2)], [200, 100, 60, 30]),
    "eight sites": ([(0.05, 0.02)] * 8, [30] * 8),
    "one site": ([(0.05, 0.02)], [100]),
    "six rows at one": ([(0.03, 0.01)] * 3 + [(0.1, 0.03)], [46, 32, 29, 6]),
}


def of_differences(populations: int) -> None:
    """Print the coverage of intervals of differences between two models, on the same rows."""
    print(f"differences on the same rows: {populations} populations, nominal 95 %")
    print(f"{'':22}{'rows':>22}  Bonett and Price   bootstrap of rows")
    for name, (chances, rows) in PAIRS.items():
        rng, truth = np.random.default_rng(2), float(np.mean([a - b for a, b in chances]))
        held = {"adjusted": 0, "bootstrap": 0}
        for _ in range(populations):
            sites = [
                rng.choice([1.0, -1.0, 0.0], size=n, p=[a, b, 1 - a - b])
                for (a, b), n in zip(chances, rows, strict=True)
            ]
            low, high = bounds(mean_of_differences([own.tolist() for own in sites]))
            held["adjusted"] += low <= truth <= high
            draws = [own[rng.integers(0, len(own), (400, len(own)))].mean(1) for own in sites]
            low, high = np.quantile(np.mean(draws, 0), [0.025, 0.975])
            held["bootstrap"] += low <= truth <= high
        shares = "".join(f"{100 * held[kind] / populations:16.1f} %" for kind in held)
        print(f"{name:22}{rows!s:>22}{shares}", flush=True)


AREAS = {
    "10 ill, 30 well": ([(10, 30)] * 4, 1.81),
    "20 ill, 20 well": ([(20, 20)] * 4, 1.19),
    "10 ill, 30 well, better": ([(10, 30)] * 4, 2.66),
    "15 ill, 15 well, best": ([(15, 15)] * 4, 3.29),
}


def of_areas(populations: int) -> None:
    """Print the coverage of intervals of AUROC: scores of two classes are normal, some apart."""
    print(f"AUROC, over rows: {populations} populations, nominal 95 %")
    print(f"{'':26}{'AUROC':>8}   on the logit scale   percentiles")
    for name, (rows, apart) in AREAS.items():
        truth = NormalDist().cdf(apart / 2**0.5)
        rng, held = np.random.default_rng(3), {"logit": 0, "percentiles": 0}
        for _ in range(populations):
            sites = {}
            for client, (ill, well) in enumerate(rows):
                y = np.repeat([1, 0], [ill, well])
                score = rng.normal(size=len(y)) + apart * y
                p, none = np.stack([-score, score], 1), np.zeros(len(y), dtype=int)
                said = Predictions(none, none, y, none, none, p)
                places = np.arange(len(y))
                sites[client] = SiteRows(places, y, ((places, said),))
            found = resampled(sites, "auroc")
            assert found is not None
            if (low := found.estimate.low) is not None and (high := found.estimate.high):
                held["logit"] += low <= truth <= high
            low, high = np.quantile(found.draws, [0.025, 0.975])
            held["percentiles"] += low <= truth <= high
        shares = "".join(f"{100 * held[kind] / populations:16.1f} %" for kind in held)
        print(f"{name:26}{truth:8.3f}{shares}", flush=True)


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
    of_differences(wanted.populations)
    print()
    of_areas(wanted.populations // 4)
    print()
    of_method(wanted.data_sets, wanted.rows)


if __name__ == "__main__":
    main()
