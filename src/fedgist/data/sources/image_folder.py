"""Data source for a user's folder of images."""

from __future__ import annotations

import contextlib
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.data.dataset import Dataset
from fedgist.data.division import USUAL, Division
from fedgist.data.lazy_rows import Inputs, LazyRows, sample_of
from fedgist.data.sources.file_identity import identity_of
from fedgist.data.sources.file_sizes import fits, regular
from fedgist.data.sources.image_pixels import (
    image_bytes,
    is_grey,
    losses_of,
    pixels,
    plausible_size,
    shared_size,
    size_of,
    stacked_images,
    upright_size,
)
from fedgist.data.sources.locations import existing
from fedgist.data.sources.optional_packages import need
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.splits import (
    Split,
    Values,
    dataset,
)
from fedgist.errors import DataError, first_line, listed

ENDINGS = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".webp")
_TRAIN, _TESTS = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_RGB = 3
_CLASS_AND_FILE = 2  # parts of the path of an image below the classes
_IN_A_BATCH = 64  # images that must fit in memory together
_LOOKED_AT = 256  # images that are looked at first for colours
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_BROKEN = (
    OSError,
    EOFError,
    LookupError,
    SyntaxError,
    TypeError,
    ValueError,
    ArithmeticError,
    struct.error,
    zlib.error,
)


def folder(
    *,
    path: str | Path,
    image_size: int | list[int] | None = None,
    test_fraction: float | None = None,
    division: Division = USUAL,
    classes: Sequence[str] = (),
    read: Read = "auto",
    domains: bool = False,
) -> Dataset:
    """Read images from PATH/train/CLASS/ and PATH/test/CLASS/ (or val/), or from PATH/CLASS/.

    Parameters
    ----------
    path
        The folder with one folder per class, or with ``train`` and ``test`` (or ``val``) that
        contain these.
    image_size
        Size of all images: the side of a square in pixels, or ``[height, width]``. The default is
        the size of the first image, which may have at most 2048x2048 pixels.
    test_fraction
        Fraction of each class held out as test rows. Default 0.2. Not with a folder of test images.
    classes
        Names of the classes in the order of their numbers.
    read
        Whether images are decoded once or when they are used.
    domains
        Whether the folders in PATH are domains (photos and sketches, or hospitals), each with
        folders as above. Each domain is a natural client, called by its folder.

    Notes
    -----
    Images are .png, .jpg, .jpeg, .jfif, .bmp or .webp of 8 bits a channel. Other files are left out
    and counted, except hidden ones. Photos are turned as their EXIF tag says. Images have one
    channel if all of them are grey, else three; an alpha channel is left out, with a note. The
    names of the folders are the labels, numbered in sorted order. Folders may also be called
    ``Training`` and ``Testing``. Pooled normalization: mean and deviation of each channel, 0 to 1,
    over all training images, those held out for validation included.

    Examples
    --------
    A recipe's section::

        [data]
        name = "folder"
        path = "leaves"
        image_size = 32
    """
    top = existing(path, folder=True)
    trains, tests, notes = _places(top, _folders(top) if domains else [top])
    stated = replace(division, fraction=test_fraction)
    if tests:
        stated.refuse(f"there is a folder {tests[0][1].name!r}")
    train_files, test_files = (
        [(*one, owner) for owner, below in some for one in _labelled_files(below)]
        for some in (trains, tests)
    )
    files = train_files + test_files
    losses = Counter[str]()
    x = _images([file for file, *_ in files], size_of(image_size), top.name, read, losses)
    notes += notes_on_files([below for _, below in (*trains, *tests)])
    notes += [f"images that lose {loss}: {count}" for loss, count in losses.items()]
    labels, owners = (np.array([file[k] for file in files], dtype=object) for k in (1, 2))
    rows = Split(x, labels, owners if domains else None)
    is_test = np.arange(len(files)) >= len(train_files)
    parts = (rows.take(~is_test), rows.take(is_test)) if tests else (rows,)
    data = dataset(top.name, *parts, division=stated, classes=classes)
    return replace(data, notes=(*data.notes, *notes))


Named = list[tuple[str, Path]]  # a folder, by the name of its domain


def _places(top: Path, domains: Sequence[Path]) -> tuple[Named, Named, list[str]]:
    """Return the folders of training images and of test images of each domain, and notes."""
    if not domains:
        raise DataError(f"{top} has no folders of domains")
    trains: Named = []
    tests: Named = []
    notes = []
    for domain in domains:
        train, test, some = _split_folders(domain)
        trains.append((domain.name, train))
        tests += [] if test is None else [(domain.name, test)]
        notes += some
    have = [name for name, _ in tests]
    if have and (lack := [name for name, _ in trains if name not in have]):
        raise DataError(
            f"{have[0]!r} has test images of its own, and {listed(map(repr, lack))} not: give them "
            "to all domains or to none"
        )
    return trains, tests, notes


def _images(
    files: list[Path], size: tuple[int, ...] | None, name: str, read: Read, losses: Counter[str]
) -> Inputs:
    """Return all images, uint8 (images, channels, height, width): decoded now, or when used.

    ``losses`` counts what images lose, of lazy images in a sample of them.
    """
    if size is None:
        with _opened(files[0]) as image:
            size = plausible_size(upright_size(image), len(files), first=str(files[0]))
    a_few_fit = fits(image_bytes(size, 1), _IN_A_BATCH)
    large = a_few_fit and not fits(image_bytes(size, len(files)))
    if read == "once" or (read == "auto" and not large):
        return stacked_images(read_images(files, size, losses=losses), len(files))
    few = sample_of(len(files), _LOOKED_AT).tolist()
    for row in few:
        with _opened(files[row]) as image:
            losses.update(f"{loss}, of {len(few)} looked at" for loss in losses_of(image))
    return LazyRows.of(ImageRows(name, tuple(files), size, _channels(files)))


def _channels(files: Sequence[Path]) -> int:
    """Return 1 if all images are grey, else 3. Headers are read until one has colours."""
    few = sample_of(len(files), _LOOKED_AT).tolist()
    for row in (*few, *range(len(files))):
        with _opened(files[row]) as image:
            if not is_grey(image.mode):
                return _RGB
    return 1


@dataclass(frozen=True)
class ImageRows:
    """A reader of image files, which are decoded when they are used.

    ``size`` is height and width, and ``channels`` is 1 or 3.
    """

    name: str
    files: tuple[Path, ...] = field(repr=False)
    size: tuple[int, ...]
    channels: int
    draws: bool = False

    def __len__(self) -> int:
        return len(self.files)

    def __call__(self, row: int) -> object:
        """Return an image, uint8 (channels, height, width)."""
        file = self.files[row]
        with _opened(file) as image:
            array = pixels(image, self.size, str(file), self.channels)
        return np.array(array)

    def file_of(self, row: int) -> str:
        """Return the file of an image."""
        return str(self.files[row])

    def identity(self) -> Sequence[str]:
        """Return the name, size and time of each file."""
        return tuple(identity_of([str(file) for file in self.files]))


def _split_folders(top: Path) -> tuple[Path, Path | None, list[str]]:
    """Return the folder of training images, that of test images or None, and notes."""
    folders = _folders(top)
    train = _named(folders, _TRAIN)
    if train is None:
        return top, None, []
    test = _named(folders, _TESTS)
    unread = [folder.name for folder in folders if folder not in {train, test}]
    note = f"folders beside {train.name!r} that are not read: {listed(map(repr, unread))}"
    return train, test, [note] if unread else []


def _named(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """Return the first folder with one of the names, which come in the order of preference."""
    ranked = [(names.index(f.name.lower()), f) for f in folders if f.name.lower() in names]
    return min(ranked)[1] if ranked else None


def _folders(top: Path) -> list[Path]:
    """Return the folders in a folder in sorted order, without hidden ones."""
    return sorted(f for f in top.iterdir() if f.is_dir() and not _is_hidden(f.name))


def _is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or one that macOS writes into archives."""
    return name.startswith(".") or name == "__MACOSX"


def _labelled_files(top: Path) -> list[tuple[Path, str]]:
    """Return the images and class of each class folder, in sorted order."""
    classes = _folders(top)
    if not classes:
        raise DataError(f"{top} has no class folders")
    return [
        (file, entry.name) for entry in classes for file in _images_among(entry.iterdir(), entry)
    ]


def notes_on_files(tops: Sequence[Path], *, deep: bool = False) -> list[str]:
    """Return a note on the files below ``tops``, folders of classes, that are not read as images.

    If ``deep``, images are read from folders in any depth.
    """
    unread = Counter[str]()
    for top in tops:
        for file in top.rglob("*"):
            parts = file.relative_to(top).parts
            if not file.is_file() or any(map(_is_hidden, parts)):
                continue
            if not deep and len(parts) != _CLASS_AND_FILE and file.suffix.lower() in ENDINGS:
                unread["images that are not directly in a class folder"] += 1
            elif file.suffix.lower() not in ENDINGS:
                unread[file.suffix.lower() or "files without an ending"] += 1
    if not unread:
        return []
    kinds = listed(f"{kind} ({count})" for kind, count in sorted(unread.items()))
    return [f"files that are left out: {unread.total()}: {kinds}; {', '.join(ENDINGS)} are read"]


def images_below(top: Path) -> list[Path]:
    """Return all images in a folder and its subfolders, in sorted order."""
    return _images_among(top.rglob("*"), top)


def _images_among(files: Iterable[Path], top: Path) -> list[Path]:
    """Return the files that are images and not hidden below ``top``, in sorted order."""
    images = sorted(
        file
        for file in files
        if file.suffix.lower() in ENDINGS and not any(map(_is_hidden, file.relative_to(top).parts))
    )
    if not images:
        raise DataError(f"{top} holds no images ({', '.join(ENDINGS)})")
    return images


def read_images(
    files: list[Path],
    size: tuple[int, ...] | None,
    channels: int | None = None,
    losses: Counter[str] | None = None,
) -> Iterator[Values]:
    """Yield each image as uint8 (channels, height, width).

    ``size`` is height and width, by default those of the first image. ``channels`` is 1 or 3, by
    default the number of each image. ``losses`` counts what images lose.
    """
    size = None if size is None else shared_size(size, len(files))
    for file in files:
        with _opened(file) as image:
            size = size or shared_size(upright_size(image), len(files), first=str(file))
            if losses is not None:
                losses.update(losses_of(image))
            yield pixels(image, size, str(file), channels)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open an image; any error, now or later, becomes a DataError."""
    pillow = need("PIL.Image", "reading images needs pillow: pip install 'fedgist[images]'")
    try:
        with warnings.catch_warnings():
            # a header that declares hundreds of megabytes is an error, not only a warning
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            # only these formats: for some others, pillow starts a program
            image = pillow.open(regular(file), formats=_FORMATS)
        with image:
            yield image
    except DataError:
        raise
    except (*_BROKEN, pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise DataError(
            f"{file} cannot be read as an image; it may be corrupt: {first_line(error)}"
        ) from error
