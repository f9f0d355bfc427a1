"""Without noise, one row more changes all that a site sends by the accounted sensitivity at most.

The noise is set to zero, and the rest is the code that sites run. So this finds whatever one row
decides beside its own term: draws of other rows, refusals, classes, counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from audits.site_lives import MOST, RUNS, Life, Row, begun, largest_change, rows_of
from fedgist.core import system_noise
from fedgist.data import content_draws

EQUAL = rows_of()[0]
NEW: dict[str, Row] = {
    "another row": ((2.0, 1.0, 0.0), "b"),
    "an equal row": EQUAL,
    "a rare class": ((1.0, 0.0, 1.0), "c"),
    "an unlisted class": ((1.0, 0.0, 1.0), "never seen"),
    "overflow": ((3e38, -3e38, 1.0), "a"),
    "an unlisted category": ((1.0, 0.0, 7.0), "a"),
    "no number": ((float("nan"), 0.0, 1.0), "a"),
}
REPSHARE = {"name": "repshare", "pick_rate": 0.5, "m_up": 2, "m_down": 2}
SECTIONS: dict[str, dict[str, Any]] = {
    "fedlog": {},
    "validation": {"data": {"validation": 0.3}},
    "repshare": {"method": REPSHARE},
    "fedproto": {"method": {"name": "fedproto"}},
    "analytic": {"method": {"name": "analytic", "wire": "float64"}, "privacy": {"clip": 1.0}},
}


@pytest.fixture(autouse=True)
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: float, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    monkeypatch.setattr(system_noise, "discrete_gaussian", nothing)


def two_rounds(life: Life) -> None:
    """A run, killed between its rounds, and a second run."""
    life.plan()
    life.ask(1)
    life.kill()
    life.plan()
    life.ask(1)
    life.ask(2)
    life.plan(RUNS[1])
    life.ask(1, RUNS[1])


def probing(life: Life) -> None:
    """Plans that ask how many rows, classes and categories there are, and then a run."""
    for most in (1, 20, 39, 40, 41, 42, MOST - 1):
        life.plan(clients={"max_rows": most})
    for number, classes in enumerate((["a", "b"], ["a", "c"], ["a", "b", "c", "never seen"])):
        life.plan(f"{number:016x}", data={"classes": classes})
    two_rounds(life)


def lived(
    folder: Path, source: str, rows: list[Row], sections: dict[str, Any], script: Any, **policy: Any
) -> Life:
    folder.mkdir()
    life = begun(folder, source, rows, sections, **policy)
    script(life)
    life.kill()
    return life


def change(tmp_path: Path, new: Row, place: int, source: str = "npz", **how: Any) -> float:
    rows = rows_of()
    more = [*rows[:place], new, *rows[place:]]
    settings: dict[str, Any] = {"sections": {}, "script": two_rounds} | how
    lives = (
        lived(tmp_path / name, source, some, **settings)
        for name, some in (("few", rows), ("more", more))
    )
    return largest_change(*lives)


@pytest.mark.slow
@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("place", [0, 17, 40])
def test_of_one_file_whatever_the_row_is(new: str, place: int, tmp_path: Path) -> None:
    source = "table" if "category" in new or "number" in new else "npz"
    assert change(tmp_path, NEW[new], place, source) <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_for_every_kind_of_release(name: str, tmp_path: Path) -> None:
    for new, place in ((NEW["another row"], 0), (EQUAL, 9)):
        (folder := tmp_path / str(place)).mkdir()
        assert change(folder, new, place, sections=SECTIONS[name]) <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("new", NEW)
def test_whatever_plans_ask(new: str, tmp_path: Path) -> None:
    source = "table" if "category" in new or "number" in new else "npz"
    assert change(tmp_path, NEW[new], 5, source, script=probing) <= 1.0


@pytest.mark.slow
def test_classes_that_are_never_released(tmp_path: Path) -> None:
    how: dict[str, Any] = {"never_released": ["c"]}
    assert change(tmp_path, NEW["a rare class"], 3, **how) == 0.0


@pytest.mark.slow
def test_the_audit_finds_draws_by_place_and_refused_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as it was: a claimed epsilon of 1 was 2 to 8
    with monkeypatch.context() as patch:
        patch.setattr(
            content_draws, "_contents", lambda data: (bytes([i]) for i in range(len(data.y)))
        )
        assert change(tmp_path, NEW["another row"], 0) > 1.0
