"""CIFAR-10 and CIFAR-100 from the original Python batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources.cifar_pickle import as_text, read_pickle
from fedgist.data.sources.locations import absent, data_root
from fedgist.errors import DataError

_SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Cifar:
    """A data set of pickled batches."""

    name: str
    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def where(self) -> str:
        """What to get, and where to put it."""
        source = (
            f"get the python version, https://www.cs.toronto.edu/~kriz/{self.archive} (the page is "
        )
        return (
            source
            + f"https://www.cs.toronto.edu/~kriz/cifar.html), and unpack it to ROOT/{self.folder}"
        )


CIFAR10 = Cifar(
    "cifar10",
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    tuple(f"data_batch_{i}" for i in range(1, 6)),
    "test_batch",
    "batches.meta",
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
)
CIFAR100 = Cifar(
    "cifar100",
    "cifar-100-python",
    "cifar-100-python.tar.gz",
    ("train",),
    "test",
    "meta",
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
)


def cifar10(*, root: Path | None = None) -> Dataset:
    """Read CIFAR-10: 50,000 and 10,000 colour images of 32x32 pixels in 10 classes."""
    return _read(CIFAR10, data_root(root), "labels", "label_names", 10)


def cifar100(*, root: Path | None = None, coarse: bool = False) -> Dataset:
    """Read CIFAR-100.

    50,000 and 10,000 colour images of 32x32 pixels in 100 classes, or 20 coarse ones.
    """
    kind, count = ("coarse", 20) if coarse else ("fine", 100)
    return _read(CIFAR100, data_root(root), f"{kind}_labels", f"{kind}_label_names", count)


def _read(kind: Cifar, root: Path, labels: str, names: str, count: int) -> Dataset:
    for file in (*kind.train, kind.test, kind.meta):
        if not (root / kind.folder / file).is_file():
            raise absent(kind.name, f"{kind.folder}/{file}", root, kind.where)
    folder = root / kind.folder
    parts = [_batch(folder / file, labels, count) for file in kind.train]
    x_test, y_test = _batch(folder / kind.test, labels, count)
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    return Dataset(
        kind.name,
        x,
        y,
        x_test,
        y_test,
        count,
        scale=255.0,
        mean=kind.mean,
        std=kind.std,
        classes=_classes(folder / kind.meta, names, count),
    )


def _batch(path: Path, labels: str, count: int) -> tuple[Tensor, Tensor]:
    batch, name = read_pickle(path), f"{path.parent.name}/{path.name}"
    match batch.get("data"), batch.get(labels):
        case np.ndarray(shape=(rows, 3072)) as data, list(y) if len(y) == rows:
            wrong = next(
                (label for label in y if type(label) is not int or not 0 <= label < count), None
            )
            if wrong is None:
                return torch.from_numpy(data.reshape(-1, *_SHAPE).copy()), torch.tensor(
                    y, dtype=torch.int64
                )
            msg = f"{name}: the label {wrong!r} is outside 0..{count - 1}"
        case np.ndarray(shape=shape), list(y):
            msg = (
                f"{name}: data of shape {list(shape)} and {len(y)} {labels}; rows of 3072 bytes "
                "and a label for each "
            )
            msg += "are needed"
        case _:
            msg = (
                f"{name} needs an array 'data' and a list {labels!r}; it holds "
                f"{', '.join(batch) or 'nothing'}"
            )
    raise DataError(msg)


def _classes(path: Path, names: str, count: int) -> tuple[str, ...]:
    found = read_pickle(path).get(names)
    if (
        not isinstance(found, list)
        or len(found) != count
        or not all(isinstance(n, bytes | str) for n in found)
    ):
        msg = f"{path.parent.name}/{path.name} needs a list {names!r} of {count} names"
        raise DataError(msg)
    return tuple(as_text(name) for name in found)
