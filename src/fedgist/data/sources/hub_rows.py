"""Readers of rows of Hugging Face data sets, for data that are larger than memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedgist.data.lazy_rows import LazyRows, sample_of
from fedgist.data.sources.file_identity import identity_of
from fedgist.data.sources.hub_pairs import HubRows
from fedgist.data.sources.image_pixels import is_grey, pixels
from fedgist.errors import DataError

_LOOKED_AT = 64  # images that decide whether all are grey
_COLORED, _GREY = 3, 1


@dataclass(frozen=True, eq=False)
class HubReader:
    """A reader of one column of images, or of columns of numbers that are joined.

    ``size`` is the height and width of images, empty for numbers; ``channels`` is 1 or 3.
    """

    name: str
    rows: HubRows = field(repr=False)
    columns: tuple[str, ...]
    size: tuple[int, ...] = ()
    channels: int = _GREY
    draws: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, row: int) -> object:
        """Return an image, uint8 (channels, height, width), or numbers, float32 (columns,)."""
        cells = _cells(self.rows, row)
        if not self.size:
            parts = [np.asarray(cells[name], dtype=np.float32).ravel() for name in self.columns]
            return np.concatenate(parts)
        image = _image(cells[self.columns[0]], self.name, self.columns[0], row)
        subject = f"{self.name}: the image in row {row} (counted from 0)"
        if self.channels == _GREY and not is_grey(getattr(image, "mode", "")):
            raise DataError(f"{subject} has colours, and the first images are grey")
        return np.array(pixels(image, self.size, subject, self.channels))

    def file_of(self, row: int) -> str:
        """Return an empty text: rows of several files are in one table."""
        del row
        return ""

    def identity(self) -> Sequence[str] | None:
        """Return the name, size and time of each file of the library's cache, if it has any."""
        files = [str(entry["filename"]) for entry in getattr(self.rows, "cache_files", None) or ()]
        return tuple(identity_of(files)) if files else None


def lazy_images(name: str, rows: HubRows, column: str, size: tuple[int, ...] | None) -> LazyRows:
    """Return a column's images, decoded when they are used.

    ``size`` is height and width, by default those of the first image.
    """
    few = [
        _image(_cells(rows, row)[column], name, column, row)
        for row in sample_of(len(rows), _LOOKED_AT).tolist()
    ]
    grey = all(is_grey(getattr(image, "mode", "")) for image in few)
    wide, high = getattr(few[0], "size", (0, 0))
    channels = _GREY if grey else _COLORED
    return LazyRows.of(HubReader(name, rows, (column,), size or (high, wide), channels))


def lazy_numbers(name: str, rows: HubRows, columns: Sequence[str]) -> LazyRows:
    """Return columns of numbers, joined in this order and read when they are used."""
    return LazyRows.of(HubReader(name, rows, tuple(columns)))


def _cells(rows: HubRows, row: int) -> Mapping[str, object]:
    cells = rows[row]
    assert isinstance(cells, Mapping)  # the library's rows
    return cells


def _image(cell: object, name: str, column: str, row: int) -> object:
    if not hasattr(cell, "convert"):
        raise DataError(
            f"{name}: the column {column!r} holds no image in row {row} (counted from 0)"
        )
    return cell
