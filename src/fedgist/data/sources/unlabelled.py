"""Read examples without labels for prediction: an array, a table or images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.facts import DataFacts
from fedgist.data.sources.array_file import CHANNELS, features, no_array, read_arrays
from fedgist.data.sources.array_file import ENDINGS as ARRAYS
from fedgist.data.sources.file_sizes import readable
from fedgist.data.sources.image_folder import ENDINGS, images_below, read_images
from fedgist.data.sources.image_pixels import stacked_images
from fedgist.data.sources.locations import existing, expanded_path
from fedgist.data.sources.splits import Values, fill_in
from fedgist.data.sources.table_file import TABLES, TableFrame, is_table, load_table
from fedgist.data.sources.tabular import encode
from fedgist.data.table_columns import Column
from fedgist.errors import DataError

_IMAGE = 3  # dimensions of an image
_WHITE = 255.0


def read_examples(path: str | Path, data: Dataset) -> Tensor:
    """Return the examples of a file or folder, in the form of ``data.x`` ``(rows, *shape)``.

    The examples have the shape, type and units of ``data.x``, and are not normalized. A table is
    encoded by the columns of ``data``, if any. Images are in the order of their paths.
    """
    place = expanded_path(path)
    place = existing(place, folder=place.is_dir())
    name = place.name or str(place)
    with readable(name):
        return fitted_rows(_read(place, name, data), name, data.facts, data.fill)


def _read(place: Path, name: str, data: Dataset) -> Tensor:
    """Return the examples of a file or folder, read by its kind."""
    ending = place.suffix.lower()
    if place.is_dir() or ending in ENDINGS:
        return _images(place, name, data)
    if ending in ARRAYS:
        return features(_array(place), f"{name}: the examples")
    if is_table(place):
        table = load_table(place, data.form)
        return _encoded(table, data) if data.columns else _numbers(table, data)
    raise DataError(
        f"{name} is not a file of examples; use {', '.join((*ARRAYS, *TABLES, *ENDINGS))} or "
        "a folder of images"
    )


def _encoded(table: TableFrame, data: Dataset) -> Tensor:
    """Return the encoded rows: a category that the model does not know is none of the others."""
    columns = [replace(column, closed=False) for column in data.columns]
    return encode(table, columns, missing="refuse" if data.fill is None else "mean")


def _array(file: Path) -> Values:
    """Return the array x of a file, or its single array."""

    def wanted(stored: list[str]) -> list[str]:
        if "x" not in stored and len(stored) != 1:
            raise no_array(file, "x", stored)
        return ["x"] if "x" in stored else stored

    [array] = read_arrays(file, wanted).values()
    return array


def _numbers(table: TableFrame, data: Dataset) -> Tensor:
    """Return a table (rows, columns) with the same number of numeric columns as the data set."""
    columns = [Column(name) for name in table.frame.columns]
    if len(data.input_shape) != 1 or len(columns) != data.input_shape[0]:
        raise _wrong_shape(table.name, [len(columns)], data.facts)
    return encode(table, columns)


def _images(place: Path, name: str, data: Dataset) -> Tensor:
    """Return one image, or a folder's images, uint8 (rows, channels, height, width).

    Size, channels and scale are those of the data set.
    """
    shape = data.input_shape
    if data.x.dtype != torch.uint8 or len(shape) != _IMAGE or shape[0] not in CHANNELS:
        kind = "bytes" if data.x.dtype == torch.uint8 else "numbers"
        raise DataError(
            f"{name}: images have one or three channels of bytes; this run takes {kind} of shape "
            f"{list(shape)}"
        )
    files = images_below(place) if place.is_dir() else [place]
    x = stacked_images(read_images(files, shape[1:], shape[0]), len(files))
    return (x * (data.scale / _WHITE)).round().to(torch.uint8)


def fitted_rows(x: Tensor, name: str, facts: DataFacts, fill: Tensor | None = None) -> Tensor:
    """Return ``x`` ``(rows, *input)`` in the form of the data; raise DataError for unfit values.

    ``fill`` ``(*input)`` replaces missing numbers, if these are allowed. Images with one channel
    may lack the channel dimension: (rows, height, width).
    """
    x = fill_in(x, fill) if x.shape[1:] == facts.input_shape else x
    if not len(x):
        raise DataError(f"{name} holds no examples")
    if _without_one_channel(x.shape[1:]) != _without_one_channel(facts.input_shape):
        raise _wrong_shape(name, list(x.shape[1:]), facts)
    element: torch.dtype = getattr(torch, facts.element)
    if facts.element == "uint8":
        most = facts.scale if facts.scale > 1 else _WHITE  # a data set of raw bytes
        bad = (x < 0) | (x > most) | (x != x.to(torch.uint8))
        needed = f"whole numbers 0..{most:g}"
    else:
        x = x.to(element)
        bad, needed = ~torch.isfinite(x), "finite numbers"
    if bool(bad.any()):
        first = int(bad.flatten().byte().argmax())
        row, value = first // x[0].numel(), x.flatten()[first].item()
        raise DataError(
            f"{name}: row {row} (counted from 0) holds {value:g}; this run takes {needed}"
        )
    return x.reshape(len(x), *facts.input_shape).to(element)


def _without_one_channel(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[1:] if len(shape) == _IMAGE and shape[0] == 1 else shape)


def _wrong_shape(name: str, shape: list[int], facts: DataFacts) -> DataError:
    return DataError(
        f"{name}: examples have shape {shape}; this run takes {list(facts.input_shape)}"
    )
