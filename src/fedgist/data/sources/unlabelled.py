"""Examples to predict, which need no labels.

An array, a table or images, in the form of a run's data set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources.assembly import Values
from fedgist.data.sources.image_folder import ENDINGS, images_below, pictures
from fedgist.data.sources.image_pixels import stack
from fedgist.data.sources.locations import existing
from fedgist.data.sources.npz import CHANNELS, features, read_arrays
from fedgist.data.sources.table_file import TABLES, load_table
from fedgist.data.sources.tabular import Column, encode, encode_like
from fedgist.errors import DataError

_ARRAYS = (".npz", ".npy")
_IMAGE = 3  # dimensions of an image
_WHITE = 255.0


def read_examples(
    path: str | Path, data: Dataset, source: str, options: Mapping[str, Any]
) -> Tensor:
    """Return the examples of a file or folder, raw, in the shape, type and units of ``data.x``.

    ``data`` was loaded from ``source`` with ``options``, which tell how a table is encoded. Images
    are in the order of their paths.

    Raises
    ------
    DataError
        If they cannot be read, or are not what ``data`` holds; with the name of the file, what was
        found and what fits.
    """
    found = Path(path).expanduser()
    found = existing(found, folder=found.is_dir())
    name, kind = found.name or str(found), found.suffix.lower()
    if found.is_dir() or kind in ENDINGS:
        x = _images(found, name, data)
    elif kind in _ARRAYS:
        x = features(_array(found), f"{name}: the examples")
    elif kind in TABLES:
        x = encode_like(found, options) if source == "table" else _flat(found, data)
    else:
        msg = (
            f"{name} holds no examples that can be read; "
            f"{', '.join((*_ARRAYS, *TABLES, *ENDINGS))} and folders can"
        )
        raise DataError(msg)
    return _checked(x, name, data)


def _array(file: Path) -> Values:
    """Return the array x, or the only one."""

    def wanted(held: list[str]) -> list[str]:
        if "x" not in held and len(held) != 1:
            msg = f"{file.name} has no array 'x'; it holds {', '.join(held) or 'nothing'}"
            raise DataError(msg)
        return ["x"] if "x" in held else held

    [array] = read_arrays(file, wanted).values()
    return array


def _flat(file: Path, data: Dataset) -> Tensor:
    """Return a table of as many columns of numbers as the data set has."""
    table = load_table(file)
    columns = [Column(name) for name in table.frame.columns]
    if len(data.input_shape) != 1 or len(columns) != data.input_shape[0]:
        raise _misfit(file.name, [len(columns)], data)
    return encode(table, columns)


def _images(place: Path, name: str, data: Dataset) -> Tensor:
    shape = data.input_shape
    if data.x.dtype != torch.uint8 or len(shape) != _IMAGE or shape[0] not in CHANNELS:
        kind = "bytes" if data.x.dtype == torch.uint8 else "numbers"
        msg = (
            f"{name}: images have one or three channels of bytes; this run takes {kind} of shape "
            f"{list(shape)}"
        )
        raise DataError(msg)
    files = images_below(place) if place.is_dir() else [place]
    x = stack(pictures(files, shape[1:], shape[0]))
    return (x * (data.scale / _WHITE)).round().to(torch.uint8)


def _checked(x: Tensor, name: str, data: Dataset) -> Tensor:
    """Return ``x`` in the type of ``data.x``, if it is like it.

    Images of one channel may lack that dimension.
    """
    if not len(x):
        msg = f"{name} holds no examples"
        raise DataError(msg)
    if _bare(x.shape[1:]) != _bare(data.input_shape):
        raise _misfit(name, list(x.shape[1:]), data)
    if data.x.dtype == torch.uint8:
        bad, need = (
            (x < 0) | (x > data.scale) | (x != x.to(torch.uint8)),
            f"whole numbers 0..{data.scale:g}",
        )
    else:
        bad, need = ~torch.isfinite(x), "finite numbers"
    if bool(bad.any()):
        first = int(bad.flatten().byte().argmax())
        row, value = first // x[0].numel(), x.flatten()[first].item()
        msg = f"{name}: row {row} (counted from 0) holds {value:g}; this run takes {need}"
        raise DataError(msg)
    return x.reshape(len(x), *data.input_shape).to(data.x.dtype)


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[1:] if len(shape) == _IMAGE and shape[0] == 1 else shape)


def _misfit(name: str, shape: list[int], data: Dataset) -> DataError:
    return DataError(
        f"{name}: examples have shape {shape}; this run takes {list(data.input_shape)}"
    )
