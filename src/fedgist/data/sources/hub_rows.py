"""Inputs of Hugging Face splits: decoded when they are used, or all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fedgist.data.lazy_rows import Inputs, LazyRows, check_repeatable, held, sample_of
from fedgist.data.row_seeds import NO_SEED, own_draws
from fedgist.data.sources.array_file import features
from fedgist.data.sources.file_identity import identity_of
from fedgist.data.sources.file_sizes import check_memory
from fedgist.data.sources.hub_columns import HubColumns
from fedgist.data.sources.hub_splits import HubPart
from fedgist.data.sources.image_pixels import (
    is_grey,
    losses_of,
    pixels,
    plausible_size,
    shared_size,
    stacked_images,
)
from fedgist.data.sources.read_choice import Notes, choice
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.splits import Missing, Values
from fedgist.errors import DataError

_LOOKED_AT = 64  # images that decide whether all are grey
_COLORED, _GREY = 3, 1


@dataclass(frozen=True, eq=False)
class HubReader:
    """A reader of the inputs of several splits, one after the other.

    ``size`` is the height and width of images, ``channels`` is 1 or 3. ``shapes`` are the shapes of
    a cell of each column of numbers. ``files`` are the files of the rows, if they are all known.
    """

    name: str
    parts: tuple[HubPart, ...] = field(repr=False)
    columns: HubColumns
    size: tuple[int, ...] = ()
    channels: int = _GREY
    shapes: tuple[tuple[int, ...], ...] = ()
    missing: Missing = "refuse"
    notes: Notes = ()
    files: tuple[str, ...] | None = field(default=None, repr=False)

    @staticmethod
    def of(
        name: str,
        parts: Sequence[HubPart],
        columns: HubColumns,
        size: tuple[int, ...] | None,
        missing: Missing = "refuse",
    ) -> HubReader:
        """Return a reader; the first row has the form of all. ``size`` is that of images."""
        own = tuple(part.only(columns.inputs) for part in parts)
        reader = HubReader(name, own, columns, missing=missing)
        with own_draws(draws=reader.draws) as seed_row:
            seed_row(NO_SEED)
            return reader._with_images(size) if columns.kind == "image" else reader._with_shapes()

    def over(self, name: str, parts: Sequence[HubPart]) -> HubReader:
        """Return a reader of other splits, whose rows have the same form."""
        return replace(self, name=name, parts=tuple(p.only(self.columns.inputs) for p in parts))

    def _with_images(self, size: tuple[int, ...] | None) -> HubReader:
        few = [self._image(row) for row in sample_of(len(self), _LOOKED_AT).tolist()]
        grey = all(is_grey(getattr(image, "mode", "")) for image in few)
        sizes = [getattr(image, "size", (0, 0))[::-1] for image in few]
        first = "" if size else self._subject(0)
        high, wide = plausible_size(size or sizes[0], len(self), first)
        note = (
            f"images differ in size, and are resized to {high}x{wide} pixels, as the first one is"
        )
        notes = (f"{note}; data.image_size states another size",) * (not size and len({*sizes}) > 1)
        losses = Counter(loss for image in few for loss in losses_of(image))
        notes += tuple(
            f"images that lose {loss}, of {len(few)} looked at: {count}"
            for loss, count in losses.items()
        )
        channels = _GREY if grey else _COLORED
        return replace(self, size=(high, wide), channels=channels, notes=notes)

    def _with_shapes(self) -> HubReader:
        part, row = self._place(0)
        cells = part.row(row)
        arrays = [_array(_plain(cells[name]), np.float64) for name in self.columns.inputs]
        return replace(self, shapes=tuple(() if a is None else a.shape for a in arrays))

    @property
    def draws(self) -> bool:
        """Whether a user's function makes the rows, which may draw."""
        return any(part.is_transformed for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __call__(self, row: int) -> object:
        """Return an image, uint8 (channels, height, width), or numbers."""
        part, number = self._place(row)
        if self.columns.kind != "image":
            return self._numbers(part, number, {k: [v] for k, v in part.row(number).items()})[0]
        image, subject = self._image(row), self._subject(row)
        if self.channels == _GREY and not is_grey(getattr(image, "mode", "")):
            raise DataError(f"{subject} has colours, and the first images are grey")
        return np.array(pixels(image, self.size, subject, self.channels))

    def file_of(self, row: int) -> str:
        """Return the split of a row and its number there, if there are several splits."""
        if len(self.parts) == 1:
            return ""
        part, number = self._place(row)
        return f"row {number} of {part.name}"

    def identity(self) -> Sequence[str] | None:
        """Return the name, size and time of each file, if the files are known."""
        return tuple(identity_of(self.files)) if self.files else None

    def whole(self) -> Tensor:
        """Return all inputs, read now: images with three channels if any has colours."""
        if self.columns.kind == "image":
            shared_size(self.size, len(self), self._subject(0))
            images = (self._pixels(row) for row in range(len(self)))
            return stacked_images(images, len(self))
        return torch.cat([torch.from_numpy(block) for block in self._blocks()])

    def _pixels(self, row: int) -> Values:
        return pixels(self._image(row), self.size, self._subject(row))

    def _blocks(self) -> Iterator[Values]:
        for part in self.parts:
            begin = 0
            for block in part.blocks():
                numbers = self._numbers(part, begin, block)
                yield numbers
                begin += len(numbers)

    def _numbers(self, part: HubPart, begin: int, cells: Mapping[str, Sequence[object]]) -> Values:
        """Return the numbers of some rows of a part, from row ``begin`` on: (rows, *shape)."""
        columns = zip(self.columns.inputs, self.shapes, strict=True)
        parts = [self._column(part, begin, name, cells[name], shape) for name, shape in columns]
        if len(parts) == 1 and len(self.shapes[0]):
            return features(parts[0], f"{part.name}: the column {self.columns.inputs[0]!r}").numpy()
        return np.concatenate([values.reshape(len(values), -1) for values in parts], axis=1)

    def _column(
        self, part: HubPart, begin: int, name: str, cells: Sequence[object], shape: tuple[int, ...]
    ) -> Values:
        """Return the numbers of a column in some rows: (rows, *shape)."""
        dtype = np.uint8 if self.columns.kind == "bytes" else np.float64
        values = _array([_plain(cell) for cell in cells], dtype)
        subject = f"{part.name}: the column {name!r}"
        if values is None or values.shape[1:] != shape:
            for row, cell in enumerate(cells, begin):
                own = _array(_plain(cell), dtype)
                if cell is None or own is None or own.shape != shape:
                    held_there = cell if own is None or cell is None else f"{list(own.shape)} of it"
                    raise DataError(
                        f"{subject} must hold numbers, equally many in every row; row {row} "
                        f"(counted from 0) holds {held_there!s:.80}, row 0 has shape {list(shape)}"
                    )
        assert values is not None  # each row fits
        if self.missing == "refuse" and (empty := np.isnan(values)).any():
            row = begin + int(empty.reshape(len(values), -1).any(1).argmax())
            raise DataError(
                f"{subject} lacks a number in row {row} (counted from 0): leave such rows out with "
                "filter, or state data.missing = 'mean'"
            )
        return values

    def _image(self, row: int) -> object:
        part, number = self._place(row)
        name = self.columns.inputs[0]
        cell = part.row(number)[name]
        if not hasattr(cell, "convert"):
            raise DataError(
                f"{part.name}: the column {name!r} holds no image in row {number} (counted from 0)"
            )
        return cell

    def _subject(self, row: int) -> str:
        part, number = self._place(row)
        return f"{part.name}: the image in row {number} (counted from 0)"

    def _place(self, row: int) -> tuple[HubPart, int]:
        """Return the part of a row, and its number there."""
        ends = list(accumulate(map(len, self.parts)))
        at = int(np.searchsorted(ends, row, side="right"))
        return self.parts[at], row - (ends[at] - len(self.parts[at]))


def files_of(parts: Sequence[HubPart]) -> tuple[str, ...]:
    """Return the files behind some splits, in their order."""
    return tuple(file["filename"] for part in parts for file in part.split.cache_files)


def hub_inputs(readers: Sequence[HubReader], read: Read, share: int) -> tuple[list[Inputs], Notes]:
    """Return the inputs of each reader, held in memory or lazy, and a note on it for the user.

    ``share`` is the part of the usable memory that they may fill: 1 / share.
    """
    rows = [LazyRows.of(reader) for reader in readers]
    is_lazy, note = choice(rows, read, share)
    if any(reader.draws for reader in readers):
        for x in rows if is_lazy else ():
            check_repeatable(x)
        return [x if is_lazy else held(x, x.source.reader.name) for x in rows], note
    if is_lazy:
        return list[Inputs](rows), note
    for x in rows:
        check_memory(len(x) * x.source.row_bytes, f"{x.source.reader.name}: {len(x)} rows")
    whole = [reader.whole() for reader in readers]
    most = max(x.shape[1] for x in whole)
    is_image = readers[0].columns.kind == "image"
    return [x.expand(-1, most, -1, -1) if is_image else x for x in whole], note


def _plain(cell: object) -> object:
    if not isinstance(cell, Tensor):
        return cell
    on_cpu = cell.detach().cpu()
    return (on_cpu.float() if on_cpu.dtype == torch.bfloat16 else on_cpu).numpy()


def _array(cells: object, dtype: type[np.generic]) -> Values | None:
    """Return cells as an array of numbers, with NaN in the place of None; None if they do not fit.

    Numbers that are too large become infinite, which the check of the data set reports.
    """
    try:
        with np.errstate(over="ignore"):
            return np.asarray(cells, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        return None
