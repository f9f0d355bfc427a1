"""FEMNIST in LEAF's format: handwritten characters, with each writer as a client."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import torch

from fedgist.data.dataset import Dataset
from fedgist.data.sources.leaf_file import Sample, leaf_files, read_leaf
from fedgist.data.sources.locations import absent, data_root
from fedgist.data.sources.splits import Split, Values, dataset, last_of_each
from fedgist.errors import DataError

NAME = "femnist"
ADVICE = (
    "prepare the files by data/femnist of https://github.com/TalwalkarLab/leaf, and copy its "
    "folder data/femnist/data to ROOT/femnist"
)
CLASSES: tuple[str, ...] = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
SIDE = 28
LEVELS = 255
_HELD_OUT = 1 / 5  # share of each writer's images, if LEAF has not split them


def femnist(*, root: Path | None = None) -> Dataset:
    """Read FEMNIST in LEAF's format: digits and letters by hand. Each writer is a client.

    Notes
    -----
    LEAF's .json files list the images of each writer as 784 numbers from 0 to 1, white paper is 1,
    with the number of the character: digits, capitals, small letters. Images are kept as bytes,
    (1, 28, 28), the form that they had before LEAF. The folders ``train`` and ``test`` are used if
    they exist. Otherwise ``all_data`` is used, and the last fifth of each writer's images, in the
    order of the files, is held out (rounded; at least one training image remains). Files are read
    one by one. Pooled normalization: mean and deviation over all pixels of all training images.

    Examples
    --------
    A recipe's section::

        [data]
        name = "femnist"

        [partition]
        name = "natural"

    References
    ----------
    Caldas and others 2018, "LEAF: a benchmark for federated settings". Cohen, Afshar, Tapson, van
    Schaik 2017, "EMNIST: an extension of MNIST to handwritten letters".
    """
    base = data_root(root)
    files = leaf_files(base, NAME)
    if files is None:
        raise absent(NAME, "femnist/all_data/*.json", base, ADVICE)
    train, test = files
    rows = [_read(file) for file in (*train, *test)]
    x, labels, writers = (np.concatenate(column) for column in zip(*rows, strict=True))
    held = np.arange(len(x)) >= sum(len(of_file[0]) for of_file in rows[: len(train)])
    if not test:
        held = last_of_each(writers, _HELD_OUT)
    split = Split(torch.from_numpy(x), labels, writers)
    return dataset(NAME, split.take(~held), split.take(held), classes=CLASSES)


def _read(file: Path) -> tuple[Values, Values, Values]:
    """Return a file's images (rows, 1, 28, 28) of bytes, their classes and writers, (rows,)."""
    samples = read_leaf(file)
    x = np.empty((len(samples), 1, SIDE, SIDE), dtype=np.uint8)
    for place, sample in enumerate(samples):
        x[place, 0] = _image(sample)
    labels = np.array([_label(sample) for sample in samples], dtype=object)
    return x, labels, np.array([sample.user for sample in samples], dtype=object)


def _image(sample: Sample) -> Values:
    try:
        pixels = np.asarray(sample.x, dtype=np.float64)
    except (TypeError, ValueError):
        pixels = np.empty(0)
    if pixels.shape != (SIDE * SIDE,) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise DataError(f"{sample.location}: x must hold images of 784 numbers from 0 to 1")
    return np.rint(pixels * LEVELS).astype(np.uint8).reshape(SIDE, SIDE)


def _label(sample: Sample) -> str:
    y = sample.y
    if not isinstance(y, int) or isinstance(y, bool) or not 0 <= y < len(CLASSES):
        raise DataError(f"{sample.location}: y must be from 0 to 61, not {y!r:.80}")
    return CLASSES[y]
