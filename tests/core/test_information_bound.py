"""The bound on mutual information against the true value, where that is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core.losses import contrast, information_bound
from fedgist.engines.plans.plan import Plan
from fedgist.errors import InputError
from fedgist.testing.small_worlds import PAIRS, SIZES, blobs, loopback, trace, world

SKEWED = [0.9, 0.05, 0.05]


def entropy(p: list[float]) -> float:
    return -math.fsum(q * math.log(q) for q in p if q)


def expected(h: torch.Tensor, p: list[float]) -> float:
    """The bound where features say the class, and nothing else: H(Y) is the true value."""
    classes, share = len(p), torch.tensor(p, dtype=torch.float64)
    rows = information_bound(
        h.log().unsqueeze(1), torch.arange(classes), share, torch.ones(1, classes)
    )
    return float((rows * share).sum())


def best(p: list[float]) -> torch.Tensor:
    """The discriminator of the tightest bound: 1 / (1 + K p_y) for pairs of one class, else 0."""
    negatives = len(p) - 1
    own = 1.0 / (1.0 + negatives * torch.tensor(p, dtype=torch.float64))
    return torch.diag(own) + 1e-12 * (1 - torch.eye(len(p)))


SHARES = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6).map(
    lambda raw: [value / sum(raw) for value in raw]
)


@given(SHARES, st.integers(0, 1000))
def test_no_discriminator_gives_more_than_there_is(p: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    h = torch.rand(len(p), len(p), generator=generator, dtype=torch.float64).clamp(1e-9, 1 - 1e-7)
    tightest = expected(best(p), p)
    assert expected(h, p) <= tightest + 1e-9
    assert tightest <= entropy(p) + 1e-9


def test_the_tightest_bound_is_worth_having() -> None:
    for classes in (10, 1000):
        p = [1 / classes] * classes
        assert 0.3 * entropy(p) < expected(best(p), p) < entropy(p)


def test_negatives_of_other_classes_alone_say_too_much_of_skewed_ones() -> None:
    # why ours counts a row's own class among the negatives: I is H(Y) = 0.39, ln K - L is 0.69
    perfect = torch.eye(3, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    own = contrast(perfect.log(), torch.arange(3)).sum(1)
    assert math.log(2) - float(own.mean()) == pytest.approx(0.69, abs=0.01)
    assert entropy(SKEWED) == pytest.approx(0.39, abs=0.01)
    assert expected(perfect, SKEWED) < 0  # sure where it must not be
    assert expected(perfect, SKEWED) < expected(best(SKEWED), SKEWED) < entropy(SKEWED)


def test_classes_without_representations_are_left_out() -> None:
    log_h = torch.tensor([[[0.6, 0.2, 0.9]], [[0.3, 0.5, 0.9]]]).log()
    there = torch.tensor([[1.0, 1.0, 0.0]])
    rows = information_bound(log_h, torch.tensor([0, 2]), torch.tensor([0.2, 0.3, 0.5]), there)
    negatives = 0.4 * math.log(0.4) + 0.6 * math.log(0.8)
    assert float(rows[0]) == pytest.approx(math.log(2 * 0.6) + 2 * negatives, abs=1e-5)
    assert rows[1].isnan()


def test_without_frequencies_there_is_no_bound() -> None:
    log_h = torch.tensor([[[0.6, 0.2, 0.9]]]).log()
    rows = information_bound(log_h, torch.tensor([0]), torch.zeros(3), torch.ones(1, 3))
    assert rows.isnan().all()


def test_rows_that_weigh_differently_are_not_counted() -> None:
    data = replace(blobs(), annotations={"weight": torch.ones(sum(SIZES))})
    options = {"log_bound": True, "release_weight": "weight"}
    with pytest.raises(InputError, match="log_bound counts rows: it does not go with release_w"):
        world("repshare", options=options, given={"data": data})


def bounds(plan: Plan = PAIRS, **more: Any) -> list[float]:
    small_world = world("repshare", options={"log_bound": True, "lambda_kd": 1.0})
    lines = trace(small_world, plan, **more).rounds
    return [line["eval/client/information_bound_mean"] for line in lines]


@pytest.mark.slow
def test_the_bound_is_in_the_record_of_runs_that_ask_for_it() -> None:
    assert all(math.isfinite(value) and value < math.log(3) for value in bounds())
    assert bounds(Plan(5)) == pytest.approx(bounds(Plan(1, stack=False)), abs=1e-4)
    assert bounds(make_engine=loopback) == pytest.approx(bounds(), abs=1e-4)
    line = trace(world("repshare")).rounds[-1]
    assert "eval/client/information_bound_mean" not in line
