"""From pictures to bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.data.sources.assembly import Values
from fedgist.errors import DataError

_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")
_BILINEAR = 2  # PIL.Image.Resampling.BILINEAR, without importing it


def size_of(image_size: int | list[int] | None) -> tuple[int, int] | None:
    """Read the option image_size: one number for squares, or height and width."""
    if image_size is None:
        return None
    match [image_size, image_size] if isinstance(image_size, int) else image_size:
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
        case _:
            msg = f"image_size is {image_size}; one positive number is needed, or [height, width]"
            raise DataError(msg)


def pixels(
    image: Any, size: tuple[int, ...] | None, what: str, channels: int | None = None
) -> Values:
    """Return an image as bytes (channels, height, width).

    By default one channel if it is grey, three if not.
    """
    if image.mode.split(";")[0] in _DEEP:
        msg = f"{what} has more than 8 bits a pixel (mode {image.mode}); convert it first"
        raise DataError(msg)
    grey = image.mode in _GREY if channels is None else channels == 1
    if "transparency" in image.info:
        image = image.convert("RGBA")
    image = image.convert("L" if grey else "RGB")
    if size is not None and image.size != size[::-1]:
        image = image.resize(size[::-1], _BILINEAR)
    array = np.asarray(image)
    return array[None] if grey else array.transpose(2, 0, 1)


def stack(pictures: Iterable[Values]) -> Tensor:
    """Stack pictures of one size, with one channel if all are grey."""
    found = list(pictures)
    channels = max((len(picture) for picture in found), default=1)
    shape = (channels, *found[0].shape[1:]) if found else (channels, 0, 0)
    out = np.empty((len(found), *shape), dtype=np.uint8)
    for row, picture in enumerate(found):
        out[row] = picture
    return torch.from_numpy(out)
