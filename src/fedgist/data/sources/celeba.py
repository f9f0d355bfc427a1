"""CelebA in LEAF's format: face images of celebrities, with each person as a client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedgist.data.dataset import Dataset
from fedgist.data.sources.image_folder import read_images
from fedgist.data.sources.image_pixels import size_of, stacked_images
from fedgist.data.sources.leaf_file import Sample, leaf_files, read_leaf
from fedgist.data.sources.locations import absent, data_root
from fedgist.data.sources.splits import Split, dataset, last_of_each
from fedgist.errors import DataError

NAME = "celeba"
ADVICE = (
    "get img_align_celeba.zip, identity_CelebA.txt and list_attr_celeba.txt of "
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html, prepare them by data/celeba of "
    "https://github.com/TalwalkarLab/leaf, and copy its folder data/celeba/data to ROOT/celeba"
)
CLASSES = ("not smiling", "smiling")
IMAGES = "celeba/raw/img_align_celeba"
_HELD_OUT = 1 / 5  # share of each person's images, if LEAF has not split them
_COLORS = 3


def celeba(*, image_size: int | list[int] = 84, root: Path | None = None) -> Dataset:
    """Read CelebA in LEAF's format: faces of celebrities, smiling or not. Each person is a client.

    Parameters
    ----------
    image_size
        Size of all images: the side of a square in pixels, or ``[height, width]``.

    Notes
    -----
    LEAF's .json files list the images of each person, and whether the person smiles on them. The
    folders ``train`` and ``test`` are used if they exist. Otherwise ``all_data`` is used, and the
    last fifth of each person's images, in the order of the files, is held out (rounded; at least
    one training image remains). Images are in ``raw/img_align_celeba``. Each person is a client,
    named by LEAF's number. Pooled normalization: mean and deviation of each channel, 0 to 1, over
    all training images.

    CelebA is for non-commercial research only. Its page has the agreement.

    Examples
    --------
    A recipe's section::

        [data]
        name = "celeba"

        [partition]
        name = "natural"

    References
    ----------
    Liu, Luo, Wang, Tang 2015, "Deep learning face attributes in the wild". Caldas and others 2018,
    "LEAF: a benchmark for federated settings".
    """
    base = data_root(root)
    samples, count = _samples(base)
    folder = base / IMAGES
    if not folder.is_dir():
        raise absent(NAME, IMAGES, base, ADVICE)
    files = [folder / _name(sample) for sample in samples]
    x = stacked_images(read_images(files, size_of(image_size), _COLORS), len(files))
    labels = np.array([_label(sample) for sample in samples], dtype=object)
    people = np.array([sample.user for sample in samples], dtype=object)
    rows, held = Split(x, labels, people), np.arange(len(samples)) >= count
    if count == len(samples):
        held = last_of_each(people, _HELD_OUT)
    return dataset(NAME, rows.take(~held), rows.take(held), classes=CLASSES)


def _samples(base: Path) -> tuple[Sequence[Sample], int]:
    """Return all samples, training samples first, and the number of training samples."""
    files = leaf_files(base, NAME)
    if files is None:
        raise absent(NAME, "celeba/all_data/*.json", base, ADVICE)
    first, held = ([s for file in some for s in read_leaf(file)] for some in files)
    return [*first, *held], len(first)


def _name(sample: Sample) -> str:
    """Return the name of a sample's image; a path to another folder is refused."""
    name = sample.x
    if not isinstance(name, str) or Path(name).name != name:
        raise DataError(f"{sample.location}: x must hold names of image files, not {name!r:.80}")
    return name


def _label(sample: Sample) -> str:
    if isinstance(sample.y, bool) or sample.y not in (0, 1):
        raise DataError(f"{sample.location}: y must be 0 or 1, not {sample.y!r:.80}")
    return CLASSES[0 if sample.y == 0 else 1]
