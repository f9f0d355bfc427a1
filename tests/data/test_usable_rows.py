"""What a private site leaves out, it leaves out row by row, and counts it for its owner."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.data.dataset import Dataset
from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError

GOOD = ["1,p,yes", "2,q,no", "3,p,yes", "4,q,no"]
BAD = {
    "5,p,maybe": "left out, of",
    "x,p,yes": "left out, of",
    ",q,no": "left out, of",
    "6,p,": "have no label",
    "inf,q,yes": "left out, of",
    "7,r,no": "cells of kind",
}
COLUMNS = {"age": "number", "kind": ["p", "q"]}


def read(folder: Path, lines: list[str], **how: Any) -> Dataset:
    path = folder / "rows.csv"
    path.write_text("age,kind,label\n" + "\n".join(lines) + "\n")
    about: dict[str, Any] = {
        "path": str(path),
        "label": "label",
        "columns": COLUMNS,
        "test_fraction": 0.0,
    }
    return load_data("table", classes=["no", "yes"], **about, **how)


@settings(max_examples=30)
@given(st.lists(st.sampled_from([*BAD]), max_size=5), st.randoms(use_true_random=False))
def test_each_row_stands_or_falls_by_itself(bad: list[str], draw: Random) -> None:
    # rejects an error, and a row that decides about another
    lines = [*GOOD, *bad]
    draw.shuffle(lines)
    with tempfile.TemporaryDirectory() as folder:
        data = read(Path(folder), lines, unlisted="none")
    kept = {(*x, y) for x, y in zip(map(tuple, data.x.tolist()), data.y.tolist(), strict=True)}
    assert kept - {(7.0, 0.0, 0.0, 0)} == {
        (1.0, 1.0, 0.0, 1),
        (2.0, 0.0, 1.0, 0),
        (3.0, 1.0, 0.0, 1),
        (4.0, 0.0, 1.0, 0),
    }
    counts = {kind: sum(BAD[line] == kind for line in bad) for kind in set(BAD.values())}
    assert len(data.y) == len(GOOD) + counts["cells of kind"]
    for kind, count in counts.items():
        told = [note for note in data.notes if kind in note]
        assert [note.rpartition(": ")[2] for note in told] == ([str(count)] if count else [])


@pytest.mark.parametrize("line", BAD)
def test_elsewhere_such_a_row_is_an_error(line: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read(tmp_path, [*GOOD, line])


def test_arrays_are_read_so_too(tmp_path: Path) -> None:
    x = np.array([[1.0], [np.nan], [3.0], [4.0]], dtype=np.float32)
    np.savez(tmp_path / "rows.npz", x=x, y=np.array([0, 1, 1, 2]))
    data = load_data(
        "npz",
        path=str(tmp_path / "rows.npz"),
        test_fraction=0.0,
        classes=["1", "0"],
        unlisted="none",
    )
    assert (data.x.tolist(), data.y.tolist()) == ([[1.0], [3.0]], [1, 0])
    assert data.notes[-1].endswith("with a number missing: 2")
