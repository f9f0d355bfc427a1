"""Draws among protected rows: one row more moves no other row, wherever it stands."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedgist
from fedgist.data.content_draws import fates, shares, split_by_content
from fedgist.data.dataset import Dataset
from fedgist.data.division import Division
from fedgist.data.partition import hold_out
from fedgist.data.sources.loading import load_data
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.world.data import validation_draw
from fedgist.world.world import make_world

SECRET = 7
Row = tuple[int, int]  # an input and a class: few of each, so that rows are often equal
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=2, max_size=30)
few = settings(max_examples=60)


def data_of(rows: list[Row], clients: list[int] | None = None) -> Dataset:
    x = torch.tensor([[float(x), 1.0] for x, _ in rows])
    y = torch.tensor([y for _, y in rows])
    owner = None if clients is None else torch.tensor(clients)
    names = ("a", "b", "c") if clients is not None else ()
    about = {"clients": owner, "client_names": names}
    return Dataset("rows", x, y, x[:0], y[:0], 2, **about)  # type: ignore[arg-type]


def drawn(data: Dataset, numbers: Tensor) -> Counter[tuple[object, ...]]:
    """Each row's content with its draw: which of two equal rows comes first is the same."""
    rows = zip(data.x.tolist(), data.y.tolist(), numbers.tolist(), strict=True)
    return Counter((tuple(x), y, number) for x, y, number in rows)


@few
@given(ROWS, st.tuples(st.integers(0, 3), st.integers(0, 1)), st.data())
def test_one_row_more_adds_one_draw_wherever_it_stands(
    rows: list[Row], new: Row, data: st.DataObject
) -> None:
    # rejects draws by place, and draws by content alone, which give all equal rows one fate
    place = data.draw(st.integers(0, len(rows)))
    before, after = data_of(rows), data_of([*rows[:place], new, *rows[place:]])
    few_rows, more = (drawn(each, fates(each, SECRET, "p")) for each in (before, after))
    assert not few_rows - more
    assert (more - few_rows).total() == 1
    assert max(more.values()) == 1


@few
@given(ROWS, st.tuples(st.integers(0, 3), st.integers(0, 1)), st.data())
def test_a_row_of_one_client_moves_no_equal_row_of_another(
    rows: list[Row], new: Row, data: st.DataObject
) -> None:
    # rejects copy numbers that are counted over all clients
    place = data.draw(st.integers(0, len(rows)))
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    before, after = data_of(rows), data_of([*rows[:place], new, *rows[place:]])
    whose = [*owners[:place], 1, *owners[place:]]
    numbers = (
        fates(before, SECRET, "p", torch.tensor(owners)),
        fates(after, SECRET, "p", torch.tensor(whose)),
    )
    for client in range(3):
        ours = [i for i, owner in enumerate(owners) if owner == client]
        theirs = [i for i, owner in enumerate(whose) if owner == client]
        was = drawn(before.only(torch.tensor(ours, dtype=torch.int64)), numbers[0][ours])
        now = drawn(after.only(torch.tensor(theirs, dtype=torch.int64)), numbers[1][theirs])
        assert not was - now
        assert (now - was).total() == (client == 1)


def test_all_that_is_used_of_a_row_decides_and_nothing_else() -> None:
    rows = [(1, 0)]
    plain = int(fates(data_of(rows), SECRET, "p"))
    weighed = replace(data_of(rows), annotations={"w": torch.tensor([0.5])})
    others = {
        "input": fates(data_of([(2, 0)]), SECRET, "p"),
        "label": fates(data_of([(1, 1)]), SECRET, "p"),
        "client": fates(data_of(rows, [2]), SECRET, "p"),
        "weight": fates(weighed, SECRET, "p"),
        "secret": fates(data_of(rows), SECRET + 1, "p"),
        "purpose": fates(data_of(rows), SECRET, "q"),
    }
    assert len({plain, *map(int, others.values())}) == 1 + len(others)
    # the numbers of names depend on which other rows there are; the names do not
    renamed = replace(data_of([(1, 1)]), classes=("new", "0"))
    as_first = replace(data_of([(1, 0)]), classes=("0", "new"))
    assert torch.equal(fates(renamed, SECRET, "p"), fates(as_first, SECRET, "p"))


def test_the_share_is_the_one_that_was_asked_for_also_among_equal_rows() -> None:
    for rows in ([(i, 0) for i in range(5000)], [(1, 0)] * 5000):
        numbers = shares(fates(data_of(rows), SECRET, "p"))
        assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
        share = float((numbers < 0.2).double().mean())
        assert abs(share - 0.2) < 4 * math.sqrt(0.2 * 0.8 / 5000)


def test_validation_rows_are_drawn_by_content_in_a_private_run() -> None:
    rows = [(i % 5, i % 2) for i in range(60)]
    for place in (0, 7, 60):
        data, more = data_of(rows), data_of([*rows[:place], (9, 1), *rows[place:]])
        held = []
        for each in (data, more):
            draw = validation_draw(each, SECRET)
            _, validation = hold_out([torch.arange(len(each.y))], 0.3, torch.tensor(0), draw)
            held.append(Counter(map(tuple, each.x[validation[0]].tolist())))
        assert not held[0] - held[1]
        assert (held[1] - held[0]).total() <= 1
        assert 5 < held[0].total() < 30


def test_lazy_rows_have_the_draws_of_rows_in_memory(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    x = np.arange(40, dtype=np.float32).reshape(20, 2) // 6
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", np.arange(20) % 2)
    held = []
    for read in ("once", "lazy"):
        data = load_data("npy", path=str(folder), read=read, secret=SECRET)
        rows = data.inputs_test
        held.append(rows if isinstance(rows, Tensor) else rows.read(torch.arange(len(rows))))
    assert torch.equal(held[0], held[1])


def table(path: Path, rows: list[tuple[float, str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "label", "note"])
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("place", [0, 13, 50])
@pytest.mark.parametrize("new", [(3.0, "yes", "x"), (99.0, "no", "x")], ids=["equal", "new"])
@pytest.mark.parametrize("source", ["table", "npz"])
def test_test_rows_of_one_file_are_drawn_by_content(
    source: str, new: tuple[float, str, str], place: int, tmp_path: Path
) -> None:
    # seen: one row more moved up to 117 of 365 rows between training and test rows
    rows = [(float(i % 7), ("no", "yes")[i % 3 == 0], f"unused {i}") for i in range(50)]
    kept = []
    for name, some in (("few", rows), ("more", [*rows[:place], new, *rows[place:]])):
        if source == "table":
            path = table(tmp_path / f"{name}.csv", some)
            options: dict[str, Any] = {"label": "label", "ignore": ["note"]}
        else:
            path, options = tmp_path / f"{name}.npz", {}
            y = np.array([label for _, label, _ in some])
            np.savez(path, x=np.array([[a, 1.0] for a, _, _ in some], dtype=np.float32), y=y)
        data = load_data(source, path=str(path), secret=SECRET, **options)
        train = zip(data.x.tolist(), data.y.tolist(), strict=True)
        kept.append(Counter((tuple(x), y) for x, y in train))
        assert 0 < len(data.y_test) < 25
    assert not kept[0] - kept[1]
    assert (kept[1] - kept[0]).total() <= 1


def test_a_file_with_test_rows_of_its_own_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
    np.savez(path, x=x, y=y, x_test=x[:1], y_test=y[:1])
    data = load_data("npz", path=str(path), secret=SECRET)
    assert (len(data.y), len(data.y_test)) == (4, 1)


@pytest.mark.filterwarnings("ignore:simulated:UserWarning", "ignore:losses:UserWarning")
def test_rows_from_python_are_split_by_content_for_each_client() -> None:
    rows = np.arange(40) % 5
    recipe = {
        "data": {"test_fraction": 0.3, "normalize": "none"},
        "model": {"name": "mlp", "hidden": [3]},
        "method": {"name": "fedlog"},
        "train": {"num_rounds": 1},
        "privacy": {"unit": "record", "epsilon": 5.0, "delta": 1e-3, "clip": 1.0},
    }
    x = np.stack([rows, rows % 2], 1).astype(np.float32)
    clients = [list(range(20)), list(range(20, 40))]
    with pytest.warns(UserWarning, match="privacy"):
        world = fedgist.run(recipe, data=(x, rows % 2), clients=clients).world
    whole = Dataset(
        "", torch.tensor(x), torch.tensor(rows % 2), torch.zeros(0, 2), torch.zeros(0), 2
    )
    owner = torch.arange(40) // 20
    expected, held = split_by_content(whole, Division(0.3), 0, owner)
    assert torch.equal(world.data.x, expected.x)
    assert torch.equal(world.data.x_test, expected.x_test)
    assert [len(world.partition.test[i]) for i in range(2)] == [
        int(held[owner == i].sum()) for i in (0, 1)
    ]


def test_without_privacy_of_records_nothing_is_drawn_by_content(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.random.default_rng(0).random((50, 2), np.float32), y=np.arange(50) % 2)
    raw = {
        "data": {"name": "npz", "path": str(path), "validation": 0.2, "normalize": "none"},
        "model": {"name": "mlp", "hidden": [3]},
        "clients": {"num_clients": 2},
        "method": {"name": "fedavg"},
        "partition": {"name": "iid"},
    }
    unit = {"unit": "client", "epsilon": 5.0, "delta": 1e-3, "clip": 1.0}
    plain, private = (make_world(resolve(make(raw | more))) for more in ({}, {"privacy": unit}))
    assert torch.equal(plain.data.x, private.data.x)
    assert torch.equal(plain.partition.validation.rows, private.partition.validation.rows)
