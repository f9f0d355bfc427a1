"""MNIST and Fashion-MNIST from their original IDX files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # needed at run time: fedgist.data.sources.loading reads the annotations

from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources.idx_file import read_idx
from fedgist.data.sources.locations import absent, data_root
from fedgist.data.sources.published import check_published
from fedgist.errors import DataError


@dataclass(frozen=True)
class IdxFiles:
    """A data set of four IDX files, two of images and two of labels.

    ``folder`` is below the data root. ``advice`` names the download and its folder. ``mean`` and
    ``std`` are those of the training pixels, with black 0 and white 1. ``sha256`` is that of the
    rows, by ``published.digest_of_rows``.
    """

    name: str
    folder: str
    advice: str
    mean: float
    std: float
    sha256: str
    classes: tuple[str, ...]


MNIST = IdxFiles(
    name="mnist",
    folder="MNIST",
    advice="get the four .gz files of https://storage.googleapis.com/cvdf-datasets/mnist/ and put "
    "them into ROOT/MNIST/raw",
    mean=0.1307,
    std=0.3081,
    sha256="cad2d6300382cf98e1ab826c454eb5384f86a2500a988f1a642f504273f513c7",
    classes=tuple("0123456789"),
)
FASHION_MNIST = IdxFiles(
    name="fashion_mnist",
    folder="FashionMNIST",
    advice="get the four .gz files of https://github.com/zalandoresearch/fashion-mnist "
    "(data/fashion) and put them into ROOT/FashionMNIST/raw",
    mean=0.2860,
    std=0.3530,
    sha256="779baf60b7be98833da415da5240984c1cf9b5d1b68c5131f76988da0398db9c",
    classes=(
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
    """Read MNIST: handwritten digits of 28x28 pixels, 60,000 to train on and 10,000 to test on.

    Notes
    -----
    Pooled normalization: the known mean 0.1307 and deviation 0.3081 of all pixels of the training
    images, where white is 1.

    Examples
    --------
    A recipe's section::

        [data]
        name = "mnist"

    References
    ----------
    LeCun, Bottou, Bengio, Haffner 1998, "Gradient-based learning applied to document recognition".
    """
    return _read(MNIST, data_root(root))


def fashion_mnist(*, root: Path | None = None) -> Dataset:
    """Read Fashion-MNIST: clothes in 28x28 pixels, 60,000 to train on and 10,000 to test on.

    Notes
    -----
    Pooled normalization: the known mean 0.286 and deviation 0.353 of all pixels of the training
    images, where white is 1.

    Examples
    --------
    A recipe's section::

        [data]
        name = "fashion_mnist"

    References
    ----------
    Xiao, Rasul, Vollgraf 2017, "Fashion-MNIST: a novel image dataset for benchmarking machine
    learning algorithms".
    """
    return _read(FASHION_MNIST, data_root(root))


def _read(files: IdxFiles, root: Path) -> Dataset:
    x, y = _images_and_labels(files, root, "train")
    x_test, y_test = _images_and_labels(files, root, "t10k")
    data = Dataset(
        files.name,
        x,
        y,
        x_test,
        y_test,
        len(files.classes),
        scale=255.0,
        mean=(files.mean,),
        std=(files.std,),
        classes=files.classes,
    )
    return check_published(data, files.sha256, root / files.folder)


def _images_and_labels(files: IdxFiles, root: Path, split: str) -> tuple[Tensor, Tensor]:
    images = _find(files, root, f"{split}-images-idx3-ubyte")
    labels = _find(files, root, f"{split}-labels-idx1-ubyte")
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise DataError(f"{images} holds {len(x)} images but {labels.name} holds {len(y)} labels")
    return x.unsqueeze(1), y.long()


def _find(files: IdxFiles, root: Path, name: str) -> Path:
    for folder in (root / files.folder / "raw", root / files.folder, root):
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                return path
    raise absent(files.name, f"{files.folder}/raw/{name}.gz", root, files.advice)
