"""Statistics over a few seeds, against counts by hand."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgist.report.tables.stats import estimate, paired_difference, smallest_p

SEEDS = {0: 0.91, 1: 0.935, 2: 0.902, 3: 0.951, 4: 0.93}


def p_by_hand(differences: list[float]) -> float:
    """Wilcoxon's signed ranks, less: all 2^n signs are equally likely; there are no ties."""
    order = sorted(range(len(differences)), key=lambda i: abs(differences[i]))
    ranks = [order.index(i) + 1 for i in range(len(differences))]
    seen = sum(r for r, d in zip(ranks, differences, strict=True) if d > 0)
    all_signs = itertools.product((0, 1), repeat=len(ranks))
    sums = [sum(r for r, s in zip(ranks, signs, strict=True) if s) for signs in all_signs]
    return sum(s <= seen for s in sums) / len(sums)


def test_mean_error_and_interval_of_five_seeds() -> None:
    values = list(SEEDS.values())
    accuracy = estimate(values, interval=True)
    assert accuracy is not None
    assert accuracy.count == 5
    assert accuracy.mean == pytest.approx(sum(values) / 5)
    # rejects the population's deviation, and the deviation in the place of the error
    assert accuracy.error == pytest.approx(statistics.stdev(values) / 5**0.5)
    draws = np.random.default_rng(7).choice(values, (20_000, 5)).mean(1)
    assert (accuracy.low, accuracy.high) == pytest.approx(
        tuple(np.quantile(draws, [0.025, 0.975])), abs=1.5e-3
    )


def test_one_seed_has_no_error_and_no_seed_no_estimate() -> None:
    single = estimate([0.5], interval=True)
    assert single is not None
    assert (single.mean, single.error, single.low, single.high) == (0.5, None, None, None)
    assert estimate([]) is None


def test_equal_values_have_an_interval_of_no_width() -> None:
    accuracy = estimate([0.5] * 4, interval=True)
    assert accuracy is not None
    assert (accuracy.error, accuracy.low, accuracy.high) == (0.0, 0.5, 0.5)


@given(st.lists(st.integers(-1000, 1000).filter(bool), min_size=2, max_size=8, unique_by=abs))
def test_p_is_the_share_of_signs_that_are_as_bad_for_the_row(differences: list[int]) -> None:
    values = {seed: 0.5 + d / 10_000 for seed, d in enumerate(differences)}
    reference = dict.fromkeys(values, 0.5)
    comparison = paired_difference(values, reference)
    assert comparison is not None
    assert comparison.p == pytest.approx(p_by_hand([float(d) for d in differences]))
    assert comparison.difference.mean == pytest.approx(sum(differences) / len(differences) / 10_000)


def test_pairs_are_made_by_seed_whatever_the_order_and_the_rest_is_left_out() -> None:
    reference = {4: 0.94, 3: 0.96, 2: 0.91, 9: 0.1}
    comparison = paired_difference(SEEDS, reference)
    assert comparison is not None
    assert comparison.difference.count == 3
    assert comparison.difference.mean == pytest.approx(
        (0.93 - 0.94 + 0.951 - 0.96 + 0.902 - 0.91) / 3
    )
    assert comparison.p == 0.125
    assert paired_difference(SEEDS, {7: 0.5}) is None


def test_of_a_loss_lower_is_better() -> None:
    worse = {seed: value + 0.1 + seed / 100 for seed, value in SEEDS.items()}
    lower, higher = (
        paired_difference(worse, SEEDS, "lower"),
        paired_difference(worse, SEEDS, "higher"),
    )
    assert lower is not None
    assert higher is not None
    assert (lower.p, higher.p) == (smallest_p(5), 1.0)


def test_one_pair_has_no_p_and_equal_pairs_have_one() -> None:
    single, same = paired_difference({0: 0.1}, {0: 0.2}), paired_difference(SEEDS, SEEDS)
    assert single is not None
    assert single.p is None
    assert same is not None
    assert same.p == 1.0


def test_the_smallest_p_of_five_pairs() -> None:
    assert smallest_p(5) == 1 / 32
