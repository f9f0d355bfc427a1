"""The timetable of a phase: the steps as the CPU knows them are those that the rows have."""

from __future__ import annotations

import pytest
import torch

from fedgist.core import random
from fedgist.core.method import Phase
from fedgist.core.training import Life
from fedgist.engines.plans.plan import Plan
from fedgist.testing.small_worlds import ALONE, SIZES, world
from fedgist.training.cohort import Cohort
from fedgist.training.timetable import Turn, batches_of, timetable
from small_cohorts import asked

PHASE = Phase(epochs=2)


def cohort_of(plan: Plan) -> Cohort:
    """Return the first cohort of round 1; the clients have 11, 9, 7, 4 and 1 rows."""
    return asked(world("fedavg"), plan)[0]


def turns_of(cohort: Cohort, life: Life, *, kept: bool = False) -> tuple[Turn, ...]:
    return timetable(cohort, PHASE, cohort.keys, life, kept=kept)[0]


def test_a_step_has_the_clients_with_rows_and_their_keys() -> None:
    cohort = cohort_of(Plan(5))
    turns, keys = timetable(cohort, PHASE, cohort.keys, "round", kept=False)
    batches = list(batches_of(cohort, PHASE, cohort.keys, "train-0"))
    assert [turn.count for turn in turns] == [len(rows) for rows in batches] == [5, 5, 3, 3, 2, 2]
    for s, turn in enumerate(turns):
        assert torch.equal(keys[s], random.fold(cohort.keys, "step", s))
        assert turn.seed == int(keys[s, 0])
        assert bool((batches[s] >= 0)[:, 0].all())  # each client of a step has a first row


def test_a_client_alone_has_no_absent_rows() -> None:
    cohort = cohort_of(ALONE)
    rows = list(batches_of(cohort, PHASE, cohort.keys, "train-0"))
    assert [batch.shape[1] for batch in rows] == [4, 4, 3] * 2
    assert all(bool((batch >= 0).all()) for batch in rows)
    assert int(torch.cat(rows, 1).numel()) == 2 * max(SIZES)


@pytest.mark.parametrize(
    ("life", "kept", "together"),
    [
        ("round", False, [True] * 6),
        ("round", True, [None] * 6),  # whatever an earlier round left
        ("run", False, [None] * 6),
        # epochs of 3, 3, 2, 1 and 1 steps
        ("epoch", False, [True, False, False, False, True, True]),
    ],
)
def test_the_trainer_knows_who_took_equally_many_steps(
    life: Life, together: list[bool | None], *, kept: bool
) -> None:
    turns = turns_of(cohort_of(Plan(5)), life, kept=kept)
    assert [turn.together for turn in turns] == together


def test_optimizers_are_reset_where_a_client_begins_an_epoch() -> None:
    fresh = [turn.fresh for turn in turns_of(cohort_of(Plan(5)), "epoch")]
    begun = [mask.nonzero().flatten().tolist() for mask in fresh if mask is not None]
    assert begun == [[0, 1, 2, 3, 4], [3, 4], [2], [0, 1], [], []]
    assert all(turn.fresh is None for turn in turns_of(cohort_of(Plan(5)), "round"))
