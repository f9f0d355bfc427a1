"""FEMNIST in LEAF's format, in miniature: writers, their characters, and files that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import world_of

WRITERS = {"f2": [0, 10, 36, 61, 1], "f0": [9, 35], "f11": [0, 1, 2]}


def image(level: int) -> list[float]:
    """A white image whose first pixel has this level, as LEAF writes it."""
    return [level / 255, *[1.0] * 783]


def leaf(writers: dict[str, list[int]], start: int = 0) -> dict[str, Any]:
    """What LEAF writes for some writers; images are told apart by their first pixel."""
    data, level = {}, start
    for user, labels in writers.items():
        data[user] = {"x": [image(level + i) for i in range(len(labels))], "y": labels}
        level += len(labels)
    return {
        "users": list(writers),
        "num_samples": [len(labels) for labels in writers.values()],
        "user_data": data,
    }


def write(root: Path, folder: str, name: str, document: object) -> None:
    path = root / "femnist" / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def levels(x: Any) -> list[int]:
    return [int(level) for level in x[:, 0, 0, 0]]


def test_of_all_data_the_last_fifth_of_each_writer_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, "all_data", "all_data_0.json", leaf(WRITERS))
    data = load_data("femnist", root=tmp_path)
    assert (data.x.shape, data.x.dtype) == ((8, 1, 28, 28), torch.uint8)
    assert levels(data.x) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert levels(data.x_test) == [4, 9]
    names = [data.names[int(label)] for label in data.y]
    assert names == ["0", "A", "a", "z", "9", "Z", "0", "1"]
    assert data.scale == 255.0


def test_files_of_leafs_own_split_are_read_in_order(tmp_path: Path) -> None:
    # rejects rows of one file under the writers of another, and a second division
    write(tmp_path, "train", "b.json", leaf({"f1": [3, 4]}, start=2))
    write(tmp_path, "train", "a.json", leaf({"f0": [1, 2]}))
    write(tmp_path, "test", "a.json", leaf({"f1": [4], "f0": [2]}, start=10))
    data = load_data("femnist", root=tmp_path)
    assert levels(data.x) == [0, 1, 2, 3]
    assert levels(data.x_test) == [10, 11]
    assert data.clients is not None
    assert data.clients_test is not None
    assert data.clients.tolist() == [0, 0, 1, 1]
    assert data.clients_test.tolist() == [1, 0]


def test_writers_are_clients(tmp_path: Path) -> None:
    write(tmp_path, "all_data", "all_data_0.json", leaf(WRITERS))
    raw = {"data": {"name": "femnist"}, "partition": {"name": "natural"}}
    made = world_of(make({**raw, "clients": {"num_clients": 3}}), Overrides(root=tmp_path))
    assert made.partition.names == ("f0", "f11", "f2")
    assert made.partition.train.counts.tolist() == [2, 2, 4]


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ([[1.0] * 783], [0], "784 numbers from 0 to 1"),
        ([[1.5] * 784], [0], "784 numbers from 0 to 1"),
        ([[float("nan")] * 784], [0], "784 numbers from 0 to 1"),
        (["a"], [0], "784 numbers from 0 to 1"),
        ([[1.0] * 784], [62], "y must be from 0 to 61, not 62"),
        ([[1.0] * 784], [True], "y must be from 0 to 61, not True"),
        ([[1.0] * 784], ["A"], "y must be from 0 to 61, not 'A'"),
    ],
)
def test_broken_samples_are_named(tmp_path: Path, x: list[Any], y: list[Any], words: str) -> None:
    document = {"users": ["f7"], "num_samples": [1], "user_data": {"f7": {"x": x, "y": y}}}
    write(tmp_path, "all_data", "all_data_0.json", document)
    with pytest.raises(DataError, match=words) as error:
        load_data("femnist", root=tmp_path)
    assert "user 'f7'" in str(error.value)


def test_bytes_come_back_exactly(tmp_path: Path) -> None:
    levels_of_row = np.arange(784) % 256
    document = {
        "users": ["f0"],
        "num_samples": [1],
        "user_data": {"f0": {"x": [(levels_of_row / 255).tolist()], "y": [5]}},
    }
    write(tmp_path, "all_data", "a.json", document)
    data = load_data("femnist", root=tmp_path)
    np.testing.assert_array_equal(np.asarray(data.x).ravel(), levels_of_row)
