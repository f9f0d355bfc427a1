"""MNIST and Fashion-MNIST from their original IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path  # needed at run time: fedgist.data.sources.registry reads the annotations

import numpy as np
import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources.locations import absent, data_root, first_line
from fedgist.errors import DataError

_BYTES = 0x08
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Idx:
    """A data set of four IDX files."""

    name: str
    folder: str
    where: str
    mean: float
    std: float
    classes: tuple[str, ...]


MNIST = Idx(
    "mnist",
    "MNIST",
    "get the four .gz files of https://storage.googleapis.com/cvdf-datasets/mnist/ and put them "
    "into ROOT/MNIST/raw",
    0.1307,
    0.3081,
    tuple("0123456789"),
)
FASHION_MNIST = Idx(
    "fashion_mnist",
    "FashionMNIST",
    "get the four .gz files of https://github.com/zalandoresearch/fashion-mnist (data/fashion) "
    "and put them into "
    "ROOT/FashionMNIST/raw",
    0.2860,
    0.3530,
    (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
)


def mnist(*, root: Path | None = None) -> Dataset:
    """Read MNIST: 60,000 and 10,000 handwritten digits of 28x28 pixels."""
    return _read(MNIST, data_root(root))


def fashion_mnist(*, root: Path | None = None) -> Dataset:
    """Read Fashion-MNIST: 60,000 and 10,000 pictures of clothes of 28x28 pixels."""
    return _read(FASHION_MNIST, data_root(root))


def read_idx(path: Path, dims: int) -> Tensor:
    """Read an IDX file of bytes with ``dims`` dimensions, gzipped or plain.

    Raises
    ------
    DataError
        If the file is anything but exactly that.
    """
    content = _content(path)
    head = 4 + 4 * dims
    if len(content) < head:
        msg = f"{path} is truncated: {len(content)} bytes, its header alone has {head}"
        raise DataError(msg)
    if content[:4] != bytes([0, 0, _BYTES, dims]):
        msg = f"{path} begins with {content[:4].hex()}, not {bytes([0, 0, _BYTES, dims]).hex()}: "
        msg += f"no IDX file of bytes with {dims} dimensions"
        raise DataError(msg)
    shape = [int.from_bytes(content[at : at + 4]) for at in range(4, head, 4)]
    size = head + math.prod(shape)
    if len(content) != size:
        state = "is truncated" if len(content) < size else "has trailing bytes"
        msg = f"{path} {state}: {len(content)} bytes, its header {shape} says {size}"
        raise DataError(msg)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(shape).copy())


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP) else content
    except (OSError, EOFError, zlib.error) as error:
        msg = f"{path} cannot be read, it may be truncated or corrupt: {first_line(error)}"
        raise DataError(msg) from error


def _read(kind: Idx, root: Path) -> Dataset:
    x, y = _pair(kind, root, "train")
    x_test, y_test = _pair(kind, root, "t10k")
    return Dataset(
        kind.name,
        x,
        y,
        x_test,
        y_test,
        10,
        scale=255.0,
        mean=(kind.mean,),
        std=(kind.std,),
        classes=kind.classes,
    )


def _pair(kind: Idx, root: Path, split: str) -> tuple[Tensor, Tensor]:
    images, labels = (
        _find(kind, root, f"{split}-{what}-ubyte") for what in ("images-idx3", "labels-idx1")
    )
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        msg = f"{images} holds {len(x)} images but {labels.name} {len(y)} labels"
        raise DataError(msg)
    return x.unsqueeze(1), y.long()


def _find(kind: Idx, root: Path, file: str) -> Path:
    for folder in (root / kind.folder / "raw", root / kind.folder, root):
        for path in (folder / f"{file}.gz", folder / file):
            if path.is_file():
                return path
    raise absent(kind.name, f"{kind.folder}/raw/{file}.gz", root, kind.where)
