"""Data sets that are known by their rows: what may differ, and what may not."""

from __future__ import annotations

import hashlib
import math
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgist.data.dataset import Dataset
from fedgist.data.sources.loading import load_data
from fedgist.data.sources.published import check_published, digest_of_rows
from fedgist.errors import DataError

DRAWS = np.random.default_rng(4)


def some_rows(train: int = 7, test: int = 3) -> Dataset:
    images = torch.from_numpy(DRAWS.integers(0, 256, (train + test, 1, 4, 5), dtype=np.uint8))
    labels = torch.from_numpy(DRAWS.integers(0, 10, train + test))
    return Dataset(
        "mnist", images[:train], labels[:train], images[train:], labels[train:], 10, scale=255.0
    )


def shuffled(data: Dataset) -> Dataset:
    train, test = torch.randperm(len(data.x)), torch.randperm(len(data.x_test))
    return replace(
        data, x=data.x[train], y=data.y[train], x_test=data.x_test[test], y_test=data.y_test[test]
    )


def test_the_digest_is_the_one_that_is_described() -> None:
    data, parts = some_rows(), []
    for x, y in ((data.x, data.y), (data.x_test, data.y_test)):
        rows = [
            image.numpy().tobytes() + bytes([int(label)]) for image, label in zip(x, y, strict=True)
        ]
        parts += [
            f"({len(x)}, 1, 4, 5)".encode(),
            *sorted(hashlib.sha256(row).digest() for row in rows),
        ]
    assert digest_of_rows(data) == hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("draw", range(5))
def test_any_order_is_known(draw: int) -> None:
    torch.manual_seed(draw)
    data = some_rows()
    assert check_published(shuffled(data), digest_of_rows(data), Path("MNIST")).name == "mnist"


def swap_two_labels(data: Dataset) -> Dataset:
    y = data.y.clone()
    other = int((y != y[0]).nonzero()[0])
    y[0], y[other] = data.y[other], data.y[0]
    return replace(data, y=y)


def change_a_pixel(data: Dataset) -> Dataset:
    x = data.x.clone()
    x[3, 0, 2, 2] += 1
    return replace(data, x=x)


def move_a_row_to_test(data: Dataset) -> Dataset:
    return replace(
        data,
        x=data.x[1:],
        y=data.y[1:],
        x_test=torch.cat([data.x[:1], data.x_test]),
        y_test=torch.cat([data.y[:1], data.y_test]),
    )


def leave_a_row_out(data: Dataset) -> Dataset:
    return replace(data, x=data.x[1:], y=data.y[1:])


def turn(data: Dataset) -> Dataset:
    return replace(data, x=data.x.reshape(-1, 1, 5, 4), x_test=data.x_test.reshape(-1, 1, 5, 4))


@pytest.mark.parametrize(
    "change", [swap_two_labels, change_a_pixel, move_a_row_to_test, leave_a_row_out, turn]
)
def test_other_rows_are_refused(change: object) -> None:
    assert callable(change)
    data = some_rows()
    with pytest.raises(DataError, match=r"in MNIST are not the published mnist: SHA-256 of .*npz"):
        check_published(change(data), digest_of_rows(data), Path("MNIST"))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_a_source_asks_for_its_own_rows(tmp_path: Path, name: str) -> None:
    for split in ("train", "t10k"):
        for file, shape in (("images-idx3", (2, 28, 28)), ("labels-idx1", (2,))):
            header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
            (tmp_path / f"{split}-{file}-ubyte").write_bytes(header + bytes(math.prod(shape)))
    with pytest.raises(DataError, match=f"are not the published {name}: .* download them again"):
        load_data(name, root=tmp_path)


@pytest.mark.parametrize(("name", "labels"), [("cifar10", "labels"), ("cifar100", "fine_labels")])
def test_batches_are_asked_for_their_own_rows(tmp_path: Path, name: str, labels: str) -> None:
    folder = tmp_path / ("cifar-10-batches-py" if name == "cifar10" else "cifar-100-python")
    folder.mkdir()
    batch = {"data": np.zeros((2, 3072), np.uint8), labels: [0, 1]}
    for file in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "train", "test"):
        (folder / file).write_bytes(pickle.dumps(batch, 2))
    for file in ("batches.meta", "meta"):
        names = {
            "label_names": list("abcdefghij"),
            "fine_label_names": [str(i) for i in range(100)],
        }
        (folder / file).write_bytes(pickle.dumps(names, 2))
    with pytest.raises(DataError, match=f"are not the published {name}: .* download them again"):
        load_data(name, root=tmp_path)


def test_published_files_are_known(data_sets: Path) -> None:
    for name in ("mnist", "fashion_mnist", "cifar10", "cifar100"):
        data = load_data(name, root=data_sets)
        assert len(data.x) + len(data.x_test) in (60_000, 70_000)
