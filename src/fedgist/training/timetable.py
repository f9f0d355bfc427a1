"""The timetable of a phase: rows, keys and clients of each step, made on the CPU.

A number that is read from a GPU blocks the CPU until all steps before it are done. So the order of
batches is drawn on the CPU and copied to the device once for each phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.device_copy import copied
from fedgist.core.method import Phase
from fedgist.core.training import Life
from fedgist.data.client_rows import schedule
from fedgist.training.cohort import Cohort
from fedgist.training.private_steps import drawn_rows


@dataclass(frozen=True, eq=False)
class Turn:
    """One step of a phase, in numbers that the CPU has without reading from the device.

    The first ``count`` clients take the step, and ``seed`` is the first client's key. ``together``
    says whether their optimizers have all taken the same number of steps, or None if that is
    unknown. The optimizers of the clients in ``fresh`` (count,), a mask on the CPU, are reset
    before the step.
    """

    count: int
    seed: int = 0
    together: bool | None = None
    fresh: Tensor | None = None


def timetable(
    cohort: Cohort, phase: Phase, keys: Tensor, life: Life, *, kept: bool
) -> tuple[tuple[Turn, ...], Tensor]:
    """Return the steps of a phase, and the keys of their clients, (steps, K) on the device.

    ``keys`` are the clients' keys of the phase, (K,) on the CPU. ``life`` is how long optimizer
    state is kept, and ``kept`` says that the phase begins with the state of an earlier round.
    """
    task, rows_each = cohort.ctx.task, (cohort.table_on_cpu >= 0).sum(1)
    per_epoch = steps_per_epoch(cohort, phase)
    steps_each = phase.steps_of(rows_each, task, cohort.ctx.architecture, cohort.ctx.work)
    place = torch.arange(max(steps_each.tolist(), default=0)).unsqueeze(1)
    counts = (steps_each > place).sum(1).tolist()
    step_keys = random.fold(keys, "step", place)
    seeds = step_keys[:, :1].flatten().tolist()
    turns = tuple(
        _turn(s, per_epoch[:count], seed, life, kept=kept)
        for s, (count, seed) in enumerate(zip(counts, seeds, strict=True))
    )
    return turns, copied(step_keys, cohort.table.device)


def _turn(step: int, per_epoch: Tensor, seed: int, life: Life, *, kept: bool) -> Turn:
    """Return a step of the clients with these numbers of steps per epoch, (count,)."""
    count = len(per_epoch)
    if life != "epoch":
        return Turn(count, seed, together=True if life == "round" and not kept else None)
    taken = step % per_epoch
    return Turn(count, seed, bool((taken == taken[0]).all()), taken == 0)


def batches_of(cohort: Cohort, phase: Phase, keys: Tensor, name: str) -> Iterator[Tensor]:
    """Yield the rows of each step: (clients that have this step, batch), -1 for none.

    ``keys`` are the clients' keys of the phase, (K,) on the CPU. A client that trains unstacked has
    no absent rows, which would take as much time as others.
    """
    task, steps = cohort.ctx.task, cohort.private_steps
    if steps is None:
        length = phase.length(cohort.ctx.work or task.training.work)
        size = phase.batches * task.training.batch_size
        least = phase.least_rows(task, cohort.ctx.architecture)
        about = size, length.epochs, length.steps, least
        made = schedule(cohort.table_on_cpu, keys, *about)
        # clients are sorted by steps, so the active clients of a step come first
        counts = (made >= 0).any(2).sum(0).tolist()
        widths = None if cohort.stack else (made[0] >= 0).sum(1).tolist()
        made = copied(made, cohort.table.device)
        for s, count in enumerate(counts):
            yield made[:count, s, : None if widths is None else widths[s]]
        return
    # all clients take every step, with or without drawn rows, so that draws stay secret
    one = torch.zeros(1, dtype=torch.int64)
    for s in range(int(phase.steps_of(one, task, cohort.ctx.architecture, cohort.ctx.work))):
        draws = cohort.private_draws(cohort.table.shape[1], "rows", name, s)
        yield drawn_rows(cohort.table, draws, steps.rate)


def steps_per_epoch(cohort: Cohort, phase: Phase) -> Tensor:
    """Return each client's number of steps in one pass over its rows, (K,) on the CPU."""
    one_pass = replace(phase, epochs=1, steps=None)
    counts = (cohort.table_on_cpu >= 0).sum(1)
    return one_pass.steps_of(counts, cohort.ctx.task, cohort.ctx.architecture)
