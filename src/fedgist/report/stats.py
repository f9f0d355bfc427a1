"""What may be said of a few seeds: means, intervals, paired tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

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
    """Differences to a reference, paired by seed, and how likely they are by chance."""

    difference: Estimate
    p: float | None


def estimate(values: Sequence[float], *, interval: bool = False) -> Estimate | None:
    """Return mean, standard error and, if asked for, the percentile bootstrap's 95 % interval.

    None without values.
    """
    if not values:
        return None
    if len(values) == 1:
        return Estimate(1, values[0])
    error = statistics.stdev(values) / math.sqrt(len(values))
    mean = Estimate(len(values), statistics.fmean(values), error)
    if not interval:
        return mean
    from scipy import stats  # noqa: PLC0415  # half a second, which other commands should not wait

    found = stats.bootstrap(
        (np.asarray(values),),
        np.mean,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
        vectorized=True,
    ).confidence_interval
    return replace(mean, low=float(found.low), high=float(found.high))


def compare(
    mine: Mapping[int, float], reference: Mapping[int, float], better: Better = "higher"
) -> Comparison | None:
    """Pair by seed and test by Wilcoxon's signed ranks, one-tailed; None without pairs.

    Where no pair differs p is 1.
    """
    seeds = sorted(mine.keys() & reference.keys())
    differences = [mine[s] - reference[s] for s in seeds]
    difference = estimate(differences, interval=True)
    if difference is None:
        return None
    if len(differences) == 1:
        return Comparison(difference, None)
    if not any(differences):
        return Comparison(difference, 1.0)
    from scipy import stats  # noqa: PLC0415  # as above

    tail: Literal["less", "greater"] = "less" if better == "higher" else "greater"
    return Comparison(difference, float(stats.wilcoxon(differences, alternative=tail).pvalue))


def smallest_p(pairs: int) -> float:
    """Return the least p-value that so many pairs can give, one-tailed.

    All differ in one direction.
    """
    return float(0.5**pairs)
