"""Turn images into byte arrays, and arrays of one size into one tensor."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.data.sources.file_sizes import check_memory
from fedgist.data.sources.splits import Values
from fedgist.errors import DataError

Picture = Any  # an image of pillow, which may not be installed
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")
MOST_PIXELS = 2048 * 2048  # largest first image that may set the size of all others
_COLOURS = 3
_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
_EXIF_ORIENTATION, _UPRIGHT = 0x0112, 1
_ON_THEIR_SIDE = (5, 6, 7, 8)
#: PIL.Image.Transpose for each orientation, without importing it.
_TURNS: Mapping[int, int] = MappingProxyType({2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2})
_BROKEN_EXIF = (OSError, EOFError, LookupError, SyntaxError, TypeError, ValueError, struct.error)
_BILINEAR = 2  # PIL.Image.Resampling.BILINEAR, without importing it


def size_of(image_size: int | list[int] | None) -> tuple[int, int] | None:
    """Return (height, width) from the option image_size: one number for squares, or both."""
    if image_size is None:
        return None
    match [image_size, image_size] if isinstance(image_size, int) else image_size:
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
        case _:
            raise DataError(
                f"image_size is {image_size}; one positive number is needed, or [height, width]"
            )


def shared_size(size: tuple[int, ...], count: int, first: str = "") -> tuple[int, ...]:
    """Return ``size``, height and width, if there is memory for ``count`` images.

    ``first`` names the image that set the size, if no image_size was given.
    """
    height, width = plausible_size(size, count, first)
    subject = f"{first and first + ': '}{count} images of {height}x{width} pixels"
    check_memory(
        image_bytes(size, count),
        subject,
        "the option image_size makes them smaller, and "
        "data.read = 'lazy' decodes them when they are used",
    )
    return size


def image_bytes(size: tuple[int, ...], count: int) -> int:
    """Return the number of bytes of ``count`` images of ``size``, height and width."""
    return _COLOURS * count * size[0] * size[1]


def plausible_size(size: tuple[int, ...], count: int, first: str = "") -> tuple[int, ...]:
    """Return ``size``, height and width, if the first image may set the size of all.

    ``first`` names the image that set the size, if no image_size was given.
    """
    height, width = size
    if first and height * width > MOST_PIXELS:
        raise DataError(
            f"{first} has {height}x{width} pixels, and the first image sets the size of all "
            f"{count}; above {MOST_PIXELS} pixels the option image_size must say so"
        )
    return size


def losses_of(image: Picture) -> list[str]:
    """Return what the 8 bits of one or three channels do not hold of a PIL image."""
    deep = any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))
    alpha = image.mode in _ALPHA or "transparency" in image.info
    losses = {
        "the alpha channel": alpha,
        "the lower 8 of 16 bits a channel": deep,
        "the frames after the first": bool(getattr(image, "is_animated", False)),
    }
    return [loss for loss, is_lost in losses.items() if is_lost]


def upright_size(image: Picture) -> tuple[int, ...]:
    """Return the height and the width of a PIL image as it is shown."""
    size: tuple[int, ...] = image.size
    return size if _orientation(image) in _ON_THEIR_SIDE else size[::-1]


def _orientation(image: Picture) -> int:
    """Return how a camera says that it was held, from 1 (upright) to 8: EXIF's tag 274."""
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION, _UPRIGHT))
    except _BROKEN_EXIF:
        return _UPRIGHT


def _upright(image: Picture) -> Picture:
    """Return a PIL image as it is shown, turned or mirrored as its EXIF tag says."""
    method = _TURNS.get(_orientation(image))
    return image if method is None else image.transpose(method)


def is_grey(mode: str) -> bool:
    """Return whether PIL images of this mode have one channel."""
    return mode in _GREY


def pixels(
    image: Picture, size: tuple[int, ...] | None, subject: str, channels: int | None = None
) -> Values:
    """Return a PIL image as uint8 (channels, height, width).

    The image is turned as its EXIF tag says. It is resized to ``size``, height and width, if given.
    By default a grey image has one
    channel and any other image has three.
    """
    if image.mode.split(";")[0] in _DEEP:
        raise DataError(
            f"{subject} has more than 8 bits per pixel (mode {image.mode}); convert it first"
        )
    image = _upright(image)
    grey = image.mode in _GREY if channels is None else channels == 1
    if "transparency" in image.info:
        image = image.convert("RGBA")
    image = image.convert("L" if grey else "RGB")
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], _BILINEAR)
    array = np.asarray(image)
    return array[None] if grey else array.transpose(2, 0, 1)


def stacked_images(images: Iterable[Values], count: int) -> Tensor:
    """Return ``count`` images of one size as uint8 (count, channels, height, width).

    There is one channel if all images are grey; otherwise a grey image is repeated in all three.
    """
    out = np.empty((0, 1, 0, 0), dtype=np.uint8)
    for row, image in enumerate(images):
        if row == 0:
            out = np.empty((count, *image.shape), dtype=np.uint8)
        elif len(image) > out.shape[1]:  # the first colour image
            out = np.repeat(out, len(image), axis=1)
        out[row] = image
    return torch.from_numpy(out)
