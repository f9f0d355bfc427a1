"""A data set of the user's own, as a folder of images."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.data.dataset import Dataset
from fedgist.data.sources.assembly import Examples, Values, dataset, split
from fedgist.data.sources.image_pixels import pixels, size_of, stack
from fedgist.data.sources.locations import existing, first_line, need
from fedgist.errors import DataError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
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
    *, path: str | Path, image_size: int | list[int] | None = None, test_fraction: float = 0.2
) -> Dataset:
    """Read images from PATH/train/CLASS/ and PATH/test/CLASS/ (or val/), or from PATH/CLASS/."""
    top = existing(path, folder=True)
    train = top / "train" if (top / "train").is_dir() else top
    test = next(
        (top / name for name in ("test", "val") if train != top and (top / name).is_dir()), None
    )
    listed, listed_test = _listed(train), [] if test is None else _listed(test)
    x = stack(pictures([file for file, _ in listed + listed_test], size_of(image_size)))
    labels = np.array([label for _, label in listed + listed_test], dtype=object)
    here = len(listed)
    parts = Examples(x[:here], labels[:here]), Examples(x[here:], labels[here:])
    return dataset(top.name, *(split(parts[0], test_fraction) if test is None else parts))


def _listed(place: Path) -> list[tuple[Path, str]]:
    """Return each class folder's images in sorted order: the disk's order must not matter."""
    classes = sorted(
        entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if not classes:
        msg = f"{place} has no class folders"
        raise DataError(msg)
    found = []
    for entry in classes:
        found += [(file, entry.name) for file in _images(entry, entry.iterdir())]
    return found


def images_below(place: Path) -> list[Path]:
    """Return all images in a folder and the folders in it, in sorted order."""
    return _images(place, place.rglob("*"))


def _images(place: Path, files: Iterable[Path]) -> list[Path]:
    """Return those files below ``place`` that are images, in sorted order; hidden ones are none."""
    found = [file for file in files if file.suffix.lower() in ENDINGS]
    images = sorted(
        file for file in found if not any(part[0] == "." for part in file.relative_to(place).parts)
    )
    if not images:
        msg = f"{place} holds no images ({', '.join(ENDINGS)})"
        raise DataError(msg)
    return images


def pictures(
    files: list[Path], size: tuple[int, ...] | None, channels: int | None = None
) -> Iterator[Values]:
    """Yield each image in the given size, or the first one's, with these channels or its own."""
    pillow = need("PIL.Image", "reading images needs pillow: pip install 'fedgist[images]'")
    for file in files:
        picture = _picture(pillow, file, size, channels)
        size = size or picture.shape[1:]
        yield picture


def _picture(pillow: Any, file: Path, size: tuple[int, ...] | None, channels: int | None) -> Values:
    try:
        with warnings.catch_warnings():
            # a header that asks for hundreds of megabytes is refused, not merely warned of
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            image = pillow.open(file)
        with image:
            return pixels(image, size, str(file), channels)
    except DataError:
        raise
    except (*_BROKEN, pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        msg = f"{file} is no image that can be read, it may be corrupt: {first_line(error)}"
        raise DataError(msg) from error
