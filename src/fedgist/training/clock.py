"""When a phase of local training ends early: after given steps, or when a site's time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch

from fedgist.core.method import Phase
from fedgist.training.cohort import Cohort

Ends = Callable[[int], bool]  # whether a phase ends after so many steps


def ends_of(cohort: Cohort, phases: Sequence[Phase], seconds: float | None) -> list[Ends]:
    """Return for each phase of a stage whether it ends after a number of steps.

    The phases share the ``seconds`` of the stage, from now on, by their planned steps. What a phase
    does not use is left to those after it.
    """
    ctx, work = cohort.ctx, cohort.ctx.work
    if work is not None and work.most:
        return [partial(_has_taken, most) for most in work.most]
    if seconds is None:
        return [_never] * len(phases)
    rows = (cohort.table_on_cpu >= 0).sum(1)
    steps = [int(p.steps_of(rows, ctx.task, ctx.architecture, work).max()) for p in phases]
    begin, whole = time.monotonic(), max(1, sum(steps))
    ends = (begin + seconds * done / whole for done in accumulate(steps))
    return [partial(_is_late, end, cohort.table.device) for end in ends]


def _never(_: int) -> bool:
    return False


def _has_taken(most: int, taken: int) -> bool:
    return taken >= most


def _is_late(end: float, device: torch.device, _: int) -> bool:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the CPU that gave it the steps may be far ahead
    return time.monotonic() >= end
