"""Statistics of few numbers: means over seeds or divisions, paired tests, intervals of shares.

Two kinds of intervals answer two questions. *Of the method*: what would it reach if it were trained
again? The samples are seeds, or divisions of the rows, whose training rows overlap. *Of these
models*: what would they reach on other rows of the same sites? The samples are test rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

LEVEL = 0.95
SIGNIFICANT = 0.05
EXACT_DIGITS = 12  # of scores in 64 bits
_Z = statistics.NormalDist().inv_cdf(0.5 + LEVEL / 2)
_PRIOR_ROWS = 2  # rows that hold the mean share, by which a site's share is shrunk

Better = Literal["higher", "lower"]


class Draw(NamedTuple):
    """What was drawn for a run: its seed, and its division of the rows."""

    seed: int
    division: int = 0


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error (from two values on) and its interval."""

    count: int
    mean: float
    error: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Differences from a reference, paired by draw, and their p-value.

    ``p`` is None if so few pairs cannot be significant. ``p_holm`` is p corrected for all
    comparisons of the study.
    """

    difference: Estimate
    p: float | None
    p_holm: float | None = None


def estimate(values: Sequence[float], *, overlap: float = 0.0) -> Estimate | None:
    """Return mean, standard error and 95 % interval by Student's t; None without values.

    ``overlap`` is the number of test rows over that of training rows if the values are of divisions
    of the same rows. Their training rows overlap, so the variance of the mean is ``(1/n + overlap)
    S^2``. A single value has no error and no interval.

    References
    ----------
    Nadeau and Bengio, Inference for the generalization error, Machine Learning 52 (2003), for
    repeated random divisions; Bouckaert and Frank, Evaluating the replicability of significance
    tests for comparing learning algorithms, PAKDD 2004, section 3.2, for r times k folds.
    """
    if not values:
        return None
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return Estimate(1, mean)
    error = standard_error(values, overlap)
    away = _t_quantile(0.5 + LEVEL / 2, count - 1) * error
    return Estimate(count, mean, error, mean - away, mean + away)


def standard_error(values: Sequence[float], overlap: float = 0.0) -> float:
    """Return the standard error of the mean of two or more values, as in :func:`estimate`."""
    return math.sqrt(1 / len(values) + overlap) * statistics.stdev(values)


def _t_quantile(share: float, freedom: int) -> float:
    from scipy.special import stdtrit  # loading scipy takes a while, and many commands need none

    return float(stdtrit(freedom, share))


def by_division(values: Mapping[Draw, float]) -> list[float]:
    """Return the values that are the samples: the seeds', or the means over seeds of each division.

    Seeds of one division share its test rows, so with several divisions they are no further
    samples.
    """
    divisions: dict[int, list[float]] = {}
    for draw in sorted(values):
        divisions.setdefault(draw.division, []).append(values[draw])
    if len(divisions) == 1:
        return [values[draw] for draw in sorted(values)]
    return [statistics.fmean(divisions[number]) for number in sorted(divisions)]


def paired_difference(
    values: Mapping[Draw, float],
    reference: Mapping[Draw, float],
    better: Better = "higher",
    *,
    overlap: float = 0.0,
    two_sided: bool = True,
) -> Comparison | None:
    """Return the differences of values paired by draw and their p-value; None without pairs.

    The test of pairs of seeds is Wilcoxon's signed-rank test, that of divisions the corrected t
    test of :func:`estimate`. The one-sided alternative is that the reference is better. If no pair
    differs, p is 1.
    """
    common = values.keys() & reference.keys()
    differences = by_division({draw: values[draw] - reference[draw] for draw in common})
    divided = len({draw.division for draw in common}) > 1
    difference = estimate(differences, overlap=overlap if divided else 0.0)
    if difference is None:
        return None
    if difference.error is None or (
        not divided and smallest_p(len(differences), two_sided=two_sided) > SIGNIFICANT
    ):
        return Comparison(difference, None)
    # else differences that are equal, such as 3 / 355 twice, have ranks by their rounding
    size = max(map(abs, [*values.values(), *reference.values()]))
    differences = without_rounding(np.array(differences), size).tolist()
    if not any(differences):
        return Comparison(difference, 1.0)
    from scipy import special, stats  # as above

    if divided:
        t = difference.mean / difference.error if difference.error else math.copysign(math.inf, 1)
        t = t if better == "higher" else -t
        below = float(special.stdtr(difference.count - 1, t))
        return Comparison(difference, 2 * min(below, 1 - below) if two_sided else below)
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


def smallest_p(pairs: int, *, two_sided: bool = True) -> float:
    """Return the smallest possible p-value for ``pairs`` pairs: all differ in one direction."""
    return min(1.0, (2.0 if two_sided else 1.0) * 0.5**pairs)


FEWEST_METHODS, FEWEST_BLOCKS = 3, 2  # of a test of ranks
ScoreTable = np.ndarray[tuple[int, int], np.dtype[np.float64]]
MeanRanks = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class RankTest:
    """Friedman's statistic and p, and the critical difference of mean ranks at 5 % (Nemenyi)."""

    statistic: float
    p: float
    critical: float


def without_rounding(values: np.ndarray, size: float) -> np.ndarray:
    """Return numbers in which equal ones are equal, where they differed by rounding alone.

    ``size`` is the largest of the scores from which they come.
    """
    return np.round(values / (size or 1.0), EXACT_DIGITS) * (size or 1.0)


def mean_ranks(scores: ScoreTable, better: Better) -> MeanRanks:
    """Return the mean ranks (methods,) of ``scores`` (methods, blocks); the best has rank 1."""
    from scipy.stats import rankdata  # as above

    sign, scores = -1.0 if better == "higher" else 1.0, without_rounding(scores, _largest(scores))
    return np.asarray(rankdata(sign * scores, axis=0).mean(1), dtype=np.float64)


def _largest(scores: ScoreTable) -> float:
    return float(np.abs(scores).max(initial=0.0))


def friedman(scores: ScoreTable) -> RankTest | None:
    """Return Friedman's test of ``scores`` (methods, blocks), None of too few methods or blocks.

    If no method differs from another in any block, p is 1.
    """
    methods, blocks = scores.shape
    scores = without_rounding(scores, _largest(scores))
    if methods < FEWEST_METHODS or blocks < FEWEST_BLOCKS:
        return None
    from scipy.stats import friedmanchisquare, studentized_range  # as above

    quantile = float(studentized_range.ppf(1 - SIGNIFICANT, methods, math.inf)) / math.sqrt(2)
    critical = quantile * math.sqrt(methods * (methods + 1) / (6 * blocks))
    if not np.ptp(scores, axis=0).any():
        return RankTest(0.0, 1.0, critical)
    found = friedmanchisquare(*scores)
    return RankTest(float(found.statistic), float(found.pvalue), critical)


def together(means: Sequence[float], critical: float) -> tuple[tuple[int, int], ...]:
    """Return the largest sets of neighbors whose mean ranks differ by at most the critical one.

    ``means`` ascend. A set is its first and its last place; single places are none.
    """
    sets: list[tuple[int, int]] = []
    for first, mean in enumerate(means):
        last = max(i for i, other in enumerate(means) if other - mean <= critical)
        if last > first and (not sets or last > sets[-1][1]):
            sets.append((first, last))
    return tuple(sets)


def worst_tenth(values: Sequence[float], better: Better) -> float:
    """Return the mean of the worst tenth of the values, rounded up to whole ones."""
    ordered = sorted(values, reverse=better == "lower")
    return statistics.fmean(ordered[: math.ceil(len(ordered) / 10)])


def jain(values: Sequence[float]) -> float | None:
    """Return Jain's index of fairness, 1 if all values are equal; None if one is negative.

    References
    ----------
    Jain, Chiu and Hawe, A quantitative measure of fairness and discrimination, DEC-TR-301 (1984).
    """
    squares = sum(value * value for value in values)
    if min(values) < 0 or not squares:
        return None
    return math.fsum(values) ** 2 / (len(values) * squares)


def wilson(share: float, rows: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of right rows among ``rows``.

    References
    ----------
    Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    z2 = _Z**2
    middle = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    away = math.sqrt(z2 * (share * (1 - share) / rows + z2 / (4 * rows**2))) / (1 + z2 / rows)
    return max(0.0, middle - away), min(1.0, middle + away)


def mean_of_differences(sites: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over sites of differences between two models by row, with a 95 % interval.

    A row's difference is between -1 and 1: how much more often one of the two is right about it.
    The interval is that of Bonett and Price for one site. With several, the two further rows, one
    that speaks for each model, are shared among them. Without these, models that differ in few
    rows have intervals that are too narrow: ``bench/coverage.py``.

    References
    ----------
    Bonett and Price, Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data, J. Educ. Behav. Stat. 37 (2012).
    """
    count = len(sites)
    extra = 2 / count
    means = [sum(own) / (len(own) + extra) for own in sites]
    squares = [(sum(d * d for d in own) + extra) / (len(own) + extra) for own in sites]
    variance = sum(
        (square - mean**2) / (len(own) + extra)
        for own, mean, square in zip(sites, means, squares, strict=True)
    )
    middle, away = statistics.fmean(means), _Z * math.sqrt(variance) / count
    mean = statistics.fmean(statistics.fmean(own) for own in sites)
    return Estimate(count, mean, None, max(-1.0, middle - away), min(1.0, middle + away))


def with_error(difference: float, error: float) -> Estimate:
    """Return a difference with its 95 % interval by a normal error; without one if it is 0."""
    bounds = (difference - _Z * error, difference + _Z * error) if error else (None, None)
    return Estimate(1, difference, None, *bounds)


def logit_interval(share: float, error: float) -> tuple[float, float] | tuple[None, None]:
    """Return the 95 % interval of a share, symmetric on the logit scale; none at 0 or 1.

    ``error`` is the standard error of the share.
    """
    if not error or not 0 < share < 1:
        return None, None
    middle, away = math.log(share / (1 - share)), _Z * error / (share * (1 - share))
    low, high = (1 / (1 + math.exp(-value)) for value in (middle - away, middle + away))
    return low, high


def mean_of_sites(shares: Sequence[float], rows: Sequence[float]) -> Estimate:
    """Return the mean over sites of their shares of right rows, and its 95 % interval.

    The interval is Wilson's, for as many rows as would give one share the variance of this mean:
    the design effect of a stratified sample. A site's variance is computed from its share shrunk
    towards the mean, so that a site without an error does not count as one without variance.
    A bootstrap of rows covers too rarely near 100 %: ``bench/coverage.py``.
    """
    count, mean = len(shares), statistics.fmean(shares)
    shrunk = [
        (share * n + _PRIOR_ROWS * mean) / (n + _PRIOR_ROWS)
        for share, n in zip(shares, rows, strict=True)
    ]
    variance = sum(p * (1 - p) / n for p, n in zip(shrunk, rows, strict=True)) / count**2
    even = count**2 / sum(1 / n for n in rows)
    effective = mean * (1 - mean) / variance if variance else even
    return Estimate(count, mean, math.sqrt(variance), *wilson(mean, effective))
