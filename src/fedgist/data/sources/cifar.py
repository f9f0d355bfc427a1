"""CIFAR-10 and CIFAR-100 from their original Python batches.

Krizhevsky 2009, "Learning multiple layers of features from tiny images", chapter 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources.cifar_pickle import as_text, read_pickle
from fedgist.data.sources.locations import absent, data_root
from fedgist.data.sources.published import check_published
from fedgist.errors import DataError, listed

_SHAPE = (3, 32, 32)
_LARGEST_SHOWN = 2**63
_PAGE = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True)
class CifarFiles:
    """File names and moments of a data set of pickled batches.

    Unpacking ``archive`` creates ``folder``, which contains the files ``train``, ``test`` and
    ``meta``. ``mean`` and ``std`` of each channel refer to training pixels from 0 to 1. ``sha256``
    is that of the rows, by ``published.digest_of_rows``, for each key of labels.
    """

    name: str
    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: Mapping[str, str]

    @property
    def advice(self) -> str:
        """Instructions: the file to download, and its folder."""
        return (
            f"get the Python version, {_PAGE}/{self.archive} (described at {_PAGE}/cifar.html), "
            f"and unpack it in ROOT, which makes the folder ROOT/{self.folder}"
        )


CIFAR10 = CifarFiles(
    name="cifar10",
    folder="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    sha256=MappingProxyType(
        {"labels": "509cef1b113972476fe0916272e317879b700c44a69ae39f0a2c421bde3d06f2"}
    ),
)
CIFAR100 = CifarFiles(
    name="cifar100",
    folder="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    train=("train",),
    test="test",
    meta="meta",
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    sha256=MappingProxyType(
        {
            "fine_labels": "eccd106629251eafccc8b239c90623565fafa5777dbecc1763c941aef8b75466",
            "coarse_labels": "a16fffcece01d3a4ec633b0a6045777a328f6f3b7c205f1f773ed3fe70f41a99",
        }
    ),
)


def cifar10(*, root: Path | None = None) -> Dataset:
    """Read CIFAR-10: colour images of 32x32 pixels in 10 classes.

    50,000 are training rows and 10,000 are test rows.

    Notes
    -----
    Pooled normalization: the known means 0.4914, 0.4822, 0.4465 and deviations 0.247, 0.2435,
    0.2616 of all red, green and blue pixels of the training images, where the largest value is 1.

    Examples
    --------
    A recipe's section::

        [data]
        name = "cifar10"
        augment = ["crop", "flip"]
    """
    return _read(CIFAR10, data_root(root), "labels", "label_names", 10)


def cifar100(*, root: Path | None = None, coarse: bool = False) -> Dataset:
    """Read CIFAR-100: colour images of 32x32 pixels in 100 classes, or in 20 with ``coarse``.

    50,000 are training rows and 10,000 are test rows.

    Parameters
    ----------
    root
        The folder of downloaded data.
    coarse
        Whether to use the 20 coarse classes as labels.

    Notes
    -----
    Pooled normalization: the known means 0.5071, 0.4865, 0.4409 and deviations 0.2673, 0.2564,
    0.2762 of all red, green and blue pixels of the training images, where the largest value is 1.

    Examples
    --------
    A recipe's section::

        [data]
        name = "cifar100"
        coarse = true
    """
    base = data_root(root)
    if coarse:
        return _read(CIFAR100, base, "coarse_labels", "coarse_label_names", 20)
    data = _read(CIFAR100, base, "fine_labels", "fine_label_names", 100)
    _, above = _batch(base / CIFAR100.folder / CIFAR100.train[0], "coarse_labels", 20)
    group = torch.zeros(data.num_classes, dtype=torch.int64)
    group[data.y] = above
    return replace(data, superclasses=tuple(group.tolist()))


def _read(files: CifarFiles, root: Path, labels_key: str, names_key: str, count: int) -> Dataset:
    """Read the batches; ``labels_key`` and ``names_key`` are the keys of labels and class names."""
    folder = root / files.folder
    for file in (*files.train, files.test, files.meta):
        if not (folder / file).is_file():
            raise absent(files.name, f"{files.folder}/{file}", root, files.advice)
    batches = [_batch(folder / file, labels_key, count) for file in files.train]
    x_test, y_test = _batch(folder / files.test, labels_key, count)
    data = Dataset(
        files.name,
        torch.cat([x for x, _ in batches]),
        torch.cat([y for _, y in batches]),
        x_test,
        y_test,
        count,
        scale=255.0,
        mean=files.mean,
        std=files.std,
        classes=_class_names(folder / files.meta, names_key, count),
    )
    return check_published(data, files.sha256[labels_key], folder)


def _batch(path: Path, labels_key: str, count: int) -> tuple[Tensor, Tensor]:
    batch, name = read_pickle(path), f"{path.parent.name}/{path.name}"
    match batch.get("data"), batch.get(labels_key):
        case np.ndarray(shape=(rows, 3072)) as data, list(labels) if len(labels) == rows:
            x = torch.from_numpy(data.reshape(-1, *_SHAPE).copy())
            return x, _checked_labels(labels, name, count)
        case np.ndarray(shape=shape), list(labels):
            msg = (
                f"{name} holds data of shape {list(shape)} and {len(labels)} {labels_key}; "
                "rows of 3072 bytes, and one label per row, are needed"
            )
        case _:
            msg = (
                f"{name} needs an array 'data' and a list {labels_key!r}; it holds {listed(batch)}"
            )
    raise DataError(msg)


def _checked_labels(labels: list[object], name: str, count: int) -> Tensor:
    for label in labels:
        if type(label) is not int or not 0 <= label < count:
            raise DataError(f"{name}: the label {_shown(label)} is outside 0..{count - 1}")
    return torch.tensor(labels, dtype=torch.int64)


def _shown(label: object) -> str:
    """Return an invalid label as text; of a list only the type, because it may be endless."""
    if isinstance(label, str | bytes) or (type(label) is int and abs(label) <= _LARGEST_SHOWN):
        return f"{label!r:.80}"
    return f"of type {type(label).__name__}"


def _class_names(path: Path, key: str, count: int) -> tuple[str, ...]:
    names = read_pickle(path).get(key)
    if (
        not isinstance(names, list)
        or len(names) != count
        or not all(isinstance(name, bytes | str) for name in names)
    ):
        raise DataError(f"{path.parent.name}/{path.name} needs a list {key!r} of {count} names")
    return tuple(as_text(name) for name in names)
