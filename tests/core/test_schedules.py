"""Schedules against torch.optim.lr_scheduler, round by round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as of_torch

from fedgist.core.training import SCHEDULE_OPTIONS, Schedule

LR, ROUNDS = 0.2, 12
FALLS = [("constant", 0), ("step", 0), ("linear", 1), ("cosine", 1)]


def rates(schedule: Schedule) -> list[float]:
    """The rates of torch's own schedulers, one step a round."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    w, parts = schedule.warmup_rounds, list[of_torch.LRScheduler]()
    if w:
        parts.append(of_torch.LinearLR(optimizer, start_factor=1 / (w + 1), total_iters=w))
    if schedule.name == "step":
        size, gamma = schedule.step_rounds or 0, schedule.step_factor or 0.0
        parts.append(of_torch.StepLR(optimizer, size, gamma=gamma))
    elif schedule.name == "cosine":
        least = (schedule.min_factor or 0.0) * LR
        parts.append(of_torch.CosineAnnealingLR(optimizer, ROUNDS - w, eta_min=least))
    elif schedule.name == "linear":
        least = schedule.min_factor or 0.0
        parts.append(of_torch.LinearLR(optimizer, 1.0, least, total_iters=ROUNDS - w))
    else:
        parts.append(of_torch.ConstantLR(optimizer, factor=1.0))
    whole = of_torch.SequentialLR(optimizer, parts, milestones=[w]) if w else parts[0]
    seen = []
    for _ in range(ROUNDS):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        whole.step()
    return seen


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "constant"},
        {"name": "step", "step_rounds": 3, "step_factor": 0.4},
        {"name": "step", "step_rounds": 1},
        {"name": "linear"},
        {"name": "linear", "min_factor": 0.1},
        {"name": "cosine"},
        {"name": "cosine", "min_factor": 0.1},
    ],
    ids=str,
)
def test_every_schedule_is_that_of_torch_with_a_round_in_place_of_a_step(
    schedule: dict[str, object], warmup: int
) -> None:
    # rejects: rounds counted from 0 (a first rate of 0, or a step a round too late), a warm-up that
    # reaches the whole rate within it, and a cosine over all rounds, warm-up included
    made = Schedule(**schedule, warmup_rounds=warmup)  # type: ignore[arg-type]
    ours = [LR * made.factor(number, ROUNDS) for number in range(1, ROUNDS + 1)]
    assert ours == pytest.approx(rates(made), rel=1e-9)
    assert made.factor(0, ROUNDS) == made.factor(1, ROUNDS)


@pytest.mark.parametrize(("name", "depends"), FALLS)
def test_what_falls_until_the_end_depends_on_the_number_of_rounds(name: str, depends: int) -> None:
    step = {"step_rounds": 2} if name == "step" else {}
    schedule = Schedule(name=name, warmup_rounds=2, **step)  # type: ignore[arg-type]
    short, long = ([schedule.factor(r, total) for r in range(1, 7)] for total in (6, 9))
    assert (short != long) == bool(depends)


@given(
    name=st.sampled_from(["constant", "step", "linear", "cosine"]),
    total=st.integers(1, 400),
    warmup=st.floats(0, 0.99),
    step_rounds=st.integers(1, 50),
    shares=st.tuples(st.floats(0.01, 0.99), st.floats(0, 1)),
)
def test_a_factor_is_a_share_that_rises_in_the_warmup_and_never_after(
    name: str, total: int, warmup: float, step_rounds: int, shares: tuple[float, float]
) -> None:
    w = int(warmup * total)
    options = {"step_rounds": step_rounds, "step_factor": shares[0], "min_factor": shares[1]}
    read = {key: options[key] for key in SCHEDULE_OPTIONS[name]}  # type: ignore[index]
    schedule = Schedule(name=name, warmup_rounds=w, **read)  # type: ignore[arg-type]
    factors = [schedule.factor(number, total) for number in range(1, total + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[: w + 1] == sorted(set(factors[: w + 1]))
    assert factors[w:] == sorted(factors[w:], reverse=True)
    assert factors[w] == 1
