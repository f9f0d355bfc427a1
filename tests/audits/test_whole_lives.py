"""What an attacker finds in all that a private site sends is below what is claimed.

A life is a run of two rounds, asked as a server asks them, of a site that begins anew. The noise is
the operating system's, so that each try is another one: the bound fails one of 10,000 tries.

Two deltas find two faults. By normal noise and 40 tries each: a row that is sent as it is in one
life of ten is found in all tries at 0.01, and in none at 0.45, which forgives it. Noise two thirds
as large as it should be is found in 39 at 0.45, which would be no promise, and in none at 0.01.
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

LIVES, TAIL = {0.01: 2_000, 0.45: 1_000}, 5e-5  # lives by delta
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


def seen(folder: Path, delta: float, count: int, draw: Draw, monkeypatch: Any) -> list[Tensor]:
    """What many lives send without the canary and with it, each (count, numbers)."""
    totals = []
    for present in (False, True):
        rows = [*OTHERS, CANARY] if present else OTHERS
        sections = {"privacy": {"epsilon": 1.0, "delta": delta}}
        (folder / str(present)).mkdir(parents=True)
        life = begun(folder / str(present), "npz", rows, sections)
        with monkeypatch.context() as patch:
            patch.setattr(system_noise, "discrete_gaussian", draw)
            totals.append(torch.stack(list(itertools.islice(lives(life), count))))
        life.kill()
    return totals


def found(
    folder: Path, delta: float, count: int, less: float, monkeypatch: pytest.MonkeyPatch
) -> float:
    """A lower bound of epsilon from so many lives of each kind, with ``less`` times the noise."""
    real = system_noise.discrete_gaussian
    nothing = seen(
        folder / "quiet",
        delta,
        1,
        lambda _, shape: torch.zeros(shape, dtype=torch.int64),
        monkeypatch,
    )
    direction = nothing[1][0] - nothing[0][0]
    drawn = seen(
        folder / "loud", delta, count, lambda noise, shape: real(less * noise, shape), monkeypatch
    )
    first, second = ((total @ direction).numpy().astype(np.float64) for total in drawn)
    return lower_bound(first, second, delta, TAIL)


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.parametrize("delta", LIVES)
def test_an_attacker_finds_less_than_is_claimed(
    delta: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(tmp_path, delta, LIVES[delta], 1.0, monkeypatch) <= 1.0


@pytest.mark.environment
@pytest.mark.slow
@pytest.mark.parametrize(("delta", "count", "less"), [(0.01, 100, 0.1), (0.45, 200, 0.25)])
def test_the_attacker_is_not_blind(
    delta: float, count: int, less: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(tmp_path, delta, count, less, monkeypatch) > 1.0
