"""Statistics over a few seeds: means, intervals, paired tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

LEVEL = 0.95
RESAMPLES = 9999

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds, its standard error (from two seeds on), and its bootstrap interval."""

    count: int
    mean: float
    error: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Differences from a reference, paired by seed, and their p-value.

    ``p_holm`` is p corrected for all comparisons of the study.
    """

    difference: Estimate
    p: float | None
    p_holm: float | None = None


def estimate(values: Sequence[float], *, interval: bool = False) -> Estimate | None:
    """Return mean, standard error and, on request, the 95 % percentile bootstrap interval.

    A single value has no error and no interval. Without values the result is None.
    """
    if not values:
        return None
    if len(values) == 1:
        return Estimate(1, values[0])
    error = statistics.stdev(values) / math.sqrt(len(values))
    mean = Estimate(len(values), statistics.fmean(values), error)
    if not interval:
        return mean
    import numpy as np
    from scipy import stats

    bounds = stats.bootstrap(
        (np.asarray(values),),
        np.mean,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
        vectorized=True,
    ).confidence_interval
    return replace(mean, low=float(bounds.low), high=float(bounds.high))


def paired_difference(
    values: Mapping[int, float],
    reference: Mapping[int, float],
    better: Better = "higher",
    *,
    two_sided: bool = False,
) -> Comparison | None:
    """Return the differences of values paired by seed and their p-value; None without pairs.

    The test is Wilcoxon's signed-rank test. The one-sided alternative is that the reference is
    better. A single pair has no p-value. If no pair differs, p is 1.
    """
    seeds = sorted(values.keys() & reference.keys())
    differences = [values[seed] - reference[seed] for seed in seeds]
    difference = estimate(differences, interval=True)
    if difference is None:
        return None
    if len(differences) == 1:
        return Comparison(difference, None)
    if not any(differences):
        return Comparison(difference, 1.0)
    from scipy import stats  # as above

    tail: Literal["less", "greater"] = "less" if better == "higher" else "greater"
    test = stats.wilcoxon(differences, alternative="two-sided" if two_sided else tail)
    return Comparison(difference, float(test.pvalue))


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests by Holm's step-down method, in input order.

    The k-th smallest of m is multiplied by m - k + 1. None is below a smaller one's correction.

    References
    ----------
    Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).
    """
    corrected, highest = [0.0] * len(chances), 0.0
    for rank, place in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        highest = max(highest, min(1.0, (len(chances) - rank) * chances[place]))
        corrected[place] = highest
    return corrected


def smallest_p(pairs: int, *, two_sided: bool = False) -> float:
    """Return the smallest possible p-value for ``pairs`` pairs: all differ in one direction."""
    return min(1.0, (2.0 if two_sided else 1.0) * 0.5**pairs)
