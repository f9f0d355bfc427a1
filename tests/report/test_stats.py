"""Statistics of few numbers, against counts by hand, definitions and scipy's own."""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as oracle

from fedgist.report.tables.stats import (
    Draw,
    by_division,
    estimate,
    jain,
    mean_of_sites,
    paired_difference,
    smallest_p,
    wilson,
    worst_tenth,
)


def seeds(*values: float) -> dict[Draw, float]:
    return {Draw(seed): value for seed, value in enumerate(values)}


SIX = seeds(0.91, 0.935, 0.902, 0.951, 0.93, 0.914)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.sampled_from(["higher", "lower"]))
def test_the_worst_tenth_is_that_of_the_direction(
    values: list[float], better: Literal["higher", "lower"]
) -> None:
    count = -(-len(values) // 10)
    ordered = np.sort(values) if better == "higher" else -np.sort(-np.array(values))
    assert worst_tenth(values, better) == pytest.approx(ordered[:count].mean())


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=20), st.floats(0.1, 5))
def test_jains_index_is_1_for_equal_values_and_1_over_n_for_one_alone(
    values: list[float], scale: float
) -> None:
    found = jain(values)
    assert found is not None
    assert 1 / len(values) - 1e-9 <= found <= 1 + 1e-9
    assert jain([scale * value for value in values]) == pytest.approx(found)
    assert jain([scale] * len(values)) == pytest.approx(1.0)
    assert jain([scale, *[0.0] * (len(values) - 1)]) == pytest.approx(1 / len(values))
    assert jain([*values, -0.1]) is None
    assert jain([0.0, 0.0]) is None


def p_by_hand(differences: list[float]) -> float:
    """Wilcoxon's signed ranks, less: all 2^n signs are equally likely; there are no ties."""
    order = sorted(range(len(differences)), key=lambda i: abs(differences[i]))
    ranks = [order.index(i) + 1 for i in range(len(differences))]
    seen = sum(r for r, d in zip(ranks, differences, strict=True) if d > 0)
    all_signs = itertools.product((0, 1), repeat=len(ranks))
    sums = [sum(r for r, s in zip(ranks, signs, strict=True) if s) for signs in all_signs]
    return sum(s <= seen for s in sums) / len(sums)


def test_mean_error_and_interval_of_six_seeds() -> None:
    values = list(SIX.values())
    accuracy = estimate(values)
    assert accuracy is not None
    assert accuracy.count == 6
    assert accuracy.mean == pytest.approx(sum(values) / 6)
    # rejects the population's deviation, and the deviation in the place of the error
    assert accuracy.error == pytest.approx(statistics.stdev(values) / 6**0.5)
    interval = oracle.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (accuracy.low, accuracy.high) == pytest.approx((interval.low, interval.high))


def test_one_seed_has_no_error_and_no_seed_no_estimate() -> None:
    single = estimate([0.5])
    assert single is not None
    assert (single.mean, single.error, single.low, single.high) == (0.5, None, None, None)
    assert estimate([]) is None


def test_equal_values_have_an_interval_of_no_width() -> None:
    accuracy = estimate([0.5] * 4)
    assert accuracy is not None
    assert (accuracy.error, accuracy.low, accuracy.high) == (0.0, 0.5, 0.5)


def test_divisions_overlap_and_their_seeds_are_no_further_samples() -> None:
    """Bouckaert and Frank's form for r times k folds, by their formula."""
    r, k = 2, 5
    draws = np.random.default_rng(1).normal(0.9, 0.02, (3, r * k))
    values = {Draw(s, d): draws[s, d] for s in range(3) for d in range(r * k)}
    folds = draws.mean(0)
    assert by_division(values) == pytest.approx(folds)
    found = estimate(by_division(values), overlap=1 / (k - 1))
    assert found is not None
    error = math.sqrt((1 / (k * r) + 1 / (k - 1)) * folds.var(ddof=1))
    assert (found.mean, found.error) == pytest.approx((folds.mean(), error))
    quantile = oracle.t.ppf(0.975, k * r - 1)
    assert (found.low, found.high) == pytest.approx(
        (folds.mean() - quantile * error, folds.mean() + quantile * error)
    )


@given(st.lists(st.integers(-1000, 1000).filter(bool), min_size=5, max_size=8, unique_by=abs))
def test_p_is_the_share_of_signs_that_are_as_bad_for_the_row(differences: list[int]) -> None:
    values = seeds(*(0.5 + d / 10_000 for d in differences))
    reference = seeds(*[0.5] * len(differences))
    comparison = paired_difference(values, reference, two_sided=False)
    assert comparison is not None
    below = p_by_hand([float(d) for d in differences])
    assert comparison.p == pytest.approx(below)
    assert comparison.difference.mean == pytest.approx(sum(differences) / len(differences) / 10_000)
    both = paired_difference(values, reference)
    assert both is not None
    above = p_by_hand([-float(d) for d in differences])
    if len(differences) == 5:
        assert both.p is None
    else:
        assert both.p == pytest.approx(min(1.0, 2 * min(below, above)))


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_p_of_divisions_is_the_corrected_t_test(better: str) -> None:
    rng = np.random.default_rng(2)
    values = {Draw(0, d): x for d, x in enumerate(rng.normal(0.9, 0.02, 10))}
    other = {Draw(0, d): x for d, x in enumerate(rng.normal(0.88, 0.02, 10))}
    gaps = np.array([values[draw] - other[draw] for draw in values])
    t = gaps.mean() / math.sqrt((1 / 10 + 0.25) * gaps.var(ddof=1))
    assert better in {"higher", "lower"}
    two, one = (
        paired_difference(
            values,
            other,
            "higher" if better == "higher" else "lower",
            overlap=0.25,
            two_sided=two_sided,
        )
        for two_sided in (True, False)
    )
    assert two is not None
    assert one is not None
    assert two.p == pytest.approx(2 * oracle.t.sf(abs(t), 9))
    assert one.p == pytest.approx(oracle.t.cdf(t if better == "higher" else -t, 9))


def test_pairs_are_made_by_draw_whatever_the_order_and_the_rest_is_left_out() -> None:
    reference = {Draw(s): x for s, x in ((4, 0.94), (3, 0.96), (2, 0.91), (9, 0.1))}
    comparison = paired_difference(SIX, reference | {Draw(0, 1): 0.2})
    assert comparison is not None
    assert comparison.difference.count == 3
    assert comparison.difference.mean == pytest.approx(
        (0.93 - 0.94 + 0.951 - 0.96 + 0.902 - 0.91) / 3
    )
    assert comparison.p is None, "three pairs cannot be significant"
    assert paired_difference(SIX, {Draw(7): 0.5}) is None


def test_of_a_loss_lower_is_better() -> None:
    worse = {draw: value + 0.1 + draw.seed / 100 for draw, value in SIX.items()}
    lower = paired_difference(worse, SIX, "lower", two_sided=False)
    higher = paired_difference(worse, SIX, "higher", two_sided=False)
    assert lower is not None
    assert higher is not None
    assert (lower.p, higher.p) == (smallest_p(6, two_sided=False), 1.0)


@given(st.integers(3, 1000), st.lists(st.integers(-3, 3).filter(bool), min_size=6, max_size=9))
def test_equal_differences_of_shares_have_equal_ranks(rows: int, gains: list[int]) -> None:
    # seen: p 0.516 in place of 0.766, for 3 / 355 is not 278 / 355 - 275 / 355 to the last bit
    right = [(17 * place) % rows for place in range(len(gains))]
    values = seeds(*((r + gain) / rows for r, gain in zip(right, gains, strict=True)))
    found = paired_difference(values, seeds(*(r / rows for r in right)))
    assert found is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties
        assert found.p == pytest.approx(float(oracle.wilcoxon(gains).pvalue))


def test_one_pair_has_no_p_and_equal_pairs_have_one() -> None:
    single, same = paired_difference(seeds(0.1), seeds(0.2)), paired_difference(SIX, SIX)
    assert single is not None
    assert single.p is None
    assert same is not None
    assert same.p == 1.0
    divided = {Draw(0, d): 0.5 for d in range(4)}
    equal = paired_difference(divided, divided, overlap=0.3)
    assert equal is not None
    assert equal.p == 1.0


def test_the_smallest_p() -> None:
    assert smallest_p(5, two_sided=False) == 1 / 32
    assert smallest_p(5) == 1 / 16
    assert smallest_p(6) < 0.05


@given(st.integers(1, 400), st.data())
def test_wilson_is_scipys(rows: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, rows))
    interval = oracle.binomtest(right, rows).proportion_ci(method="wilson")
    assert wilson(right / rows, rows) == pytest.approx((interval.low, interval.high), abs=1e-9)


@given(st.integers(1, 200), st.integers(1, 6), st.data())
def test_the_mean_of_equal_sites_has_the_interval_of_all_their_rows(
    rows: int, sites: int, data: st.DataObject
) -> None:
    share = data.draw(st.integers(0, rows)) / rows
    mean = mean_of_sites([share] * sites, [rows] * sites)
    assert mean.mean == pytest.approx(share)
    assert (mean.low, mean.high) == pytest.approx(wilson(share, rows * sites), abs=1e-9)


def test_a_site_with_few_rows_widens_the_interval_of_the_mean() -> None:
    even = mean_of_sites([0.9, 0.9], [60, 60])
    uneven = mean_of_sites([0.9, 0.9], [115, 5])
    assert uneven.low is not None
    assert even.low is not None
    assert uneven.low < even.low


def test_the_interval_of_the_mean_covers_at_thirty_rows_each() -> None:
    """The whole of it is in bench/coverage.py; a bootstrap of rows covers 86 % of these."""
    rng, rates = np.random.default_rng(0), np.array([0.978, 0.969, 0.96, 0.95])
    covered = 0
    for right in rng.binomial(30, rates, (2000, 4)):
        mean = mean_of_sites((right / 30).tolist(), [30] * 4)
        assert mean.low is not None
        assert mean.high is not None
        covered += mean.low <= rates.mean() <= mean.high
    assert 0.94 <= covered / 2000 <= 0.975
