"""What an attacker finds in all that a private site sends is below what is claimed.

A life is a run of two rounds, asked as a server asks them, of a site that begins anew. The noise is
the operating system's, so that each try is another one: the bound fails one of 10,000 tries.

The delta is far too large for a promise, and chosen for the attacker: of normal noise two thirds as
large as it should be, 1,000 draws show more than epsilon 1 in 97 of 100 tries at delta 0.45; at
delta 0.1, 2,000 draws do in 42, and at 0.01 in none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from audits.site_lives import Life, Row, begun
from audits.table import lower_bound
from fedgist.core import system_noise

LIVES, DELTA, TAIL = 1_000, 0.45, 5e-5
CANARY: Row = ((2.0, 2.0, 2.0), "c")
OTHERS: list[Row] = [((0.0, 1.0, 0.0), "a"), ((1.0, 0.0, 1.0), "b")] * 4
Draw = Callable[[float, tuple[int, ...]], Tensor]


def lives(life: Life) -> Iterator[Tensor]:
    """What each life sends, one after the other: its uploads as one vector."""
    life.plan()
    assert life.agent is not None
    assert life.agent.prepared is not None
    site = life.agent.prepared.site
    first = site.state()
    while True:
        site.restore(first)
        site.worked.clear()
        life.sent = []
        life.ask(1)
        life.ask(2)
        yield torch.cat([sent for sent in life.sent if isinstance(sent, Tensor)])


def seen(folder: Path, count: int, draw: Draw, monkeypatch: Any) -> list[Tensor]:
    """What many lives send without the canary and with it, each (count, numbers)."""
    totals = []
    for present in (False, True):
        rows = [*OTHERS, CANARY] if present else OTHERS
        sections = {"privacy": {"epsilon": 1.0, "delta": DELTA}}
        (folder / str(present)).mkdir(parents=True)
        life = begun(folder / str(present), "npz", rows, sections)
        with monkeypatch.context() as patch:
            patch.setattr(system_noise, "discrete_gaussian", draw)
            totals.append(torch.stack(list(itertools.islice(lives(life), count))))
        life.kill()
    return totals


def found(folder: Path, count: int, less: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """A lower bound of epsilon from so many lives of each kind, with ``less`` times the noise."""
    real = system_noise.discrete_gaussian
    nothing = seen(
        folder / "quiet", 1, lambda _, shape: torch.zeros(shape, dtype=torch.int64), monkeypatch
    )
    direction = nothing[1][0] - nothing[0][0]
    drawn = seen(
        folder / "loud", count, lambda noise, shape: real(less * noise, shape), monkeypatch
    )
    first, second = ((total @ direction).numpy().astype(np.float64) for total in drawn)
    return lower_bound(first, second, DELTA, TAIL)


@pytest.mark.slow
@pytest.mark.environment
def test_an_attacker_finds_less_than_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(tmp_path, LIVES, 1.0, monkeypatch) <= 1.0


@pytest.mark.environment
@pytest.mark.slow
def test_the_attacker_is_not_blind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path, 200, 0.25, monkeypatch) > 1.0
