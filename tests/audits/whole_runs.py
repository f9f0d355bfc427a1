"""Rounds of whole runs with noise of the system, as an attacker sees them: no seam is called here.

The clients train, send, and are added up; bodies stay as they are, which is the condition of a
promise to records. Too slow for the tests: 16,000 rounds take seven minutes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from audits.seams import CANARY, evidence
from fedgist.core.tree import Tree, map_leaves
from fedgist.engines.plans.plan import Plan
from fedgist.runs.files.releases import Releases
from fedgist.runs.round import ServerRun, start_server
from fedgist.testing.small_worlds import SIZES, federation, rows, world


def fedlog_runs(epsilon: float, delta: float, count: int, less: float) -> tuple[Tensor, Tensor]:
    """The evidence of so many runs of one round without the canary, and of as many with it.

    The noise that the run works out is multiplied by ``less``.
    """
    without, present = (_federation(epsilon, delta, canary=there) for there in (False, True))
    quiet, loud = (_total(fed, 0.0) for fed in (without, present))
    privacy = present.task.privacy
    assert privacy is not None
    deviation = less * privacy.deviation
    seen = ([_total(fed, less) for _ in range(count)] for fed in (without, present))
    first, second = (map_leaves(lambda *leaf: torch.stack(leaf), *totals) for totals in seen)
    found = [evidence(totals, quiet, loud, deviation) for totals in (first, second)]
    return found[0], found[1]


def _federation(epsilon: float, delta: float, *, canary: bool) -> ServerRun:
    *others, last = rows()
    section = {"unit": "record", "epsilon": epsilon, "delta": delta, "clip": 0.5, "noise": "system"}
    small = world(
        "fedlog",
        privacy=section,
        train={"num_rounds": 1, "local_epochs": 1, "lr": 1e-12},
        given={"clients": [*others, last if canary else last[last != CANARY]]},
    )
    return federation(small, Plan(len(SIZES)))


def _total(fed: ServerRun, less: float) -> Tree:
    """What round 1 releases with ``less`` times the noise; for 0 the grid is the deviation."""
    side, releases = fed.side, Releases(None)
    privacy = side.task.privacy
    assert privacy is not None
    quieter = replace(privacy, deviation=max(less * privacy.deviation, privacy.grid))
    fed.side = replace(side, task=replace(side.task, privacy=quieter))
    fed.server, fed.releases = start_server(side), releases
    fed._do_stages(1, lambda _: False)
    fed.side = side
    (total,) = releases.totals["train"]
    return total.message
