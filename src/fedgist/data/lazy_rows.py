"""Rows that are read when they are used, for data that are larger than memory.

A data set holds its inputs as a tensor or as :class:`LazyRows`. Lazy rows know the number, shape
and type of all rows, and read only the rows of a batch. A view of some rows reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedgist.core.far_numbers import is_far
from fedgist.data.row_seeds import NO_SEED, own_draws, seeds_of
from fedgist.data.sources.file_sizes import check_memory
from fedgist.errors import DataError, first_line

PIECE = 1 << 24  # bytes of rows that are read together where all rows are read in turn
_LOOKED_AT = 16  # rows that decide whether float32 holds the numbers
CHECKED = 4  # rows that are read twice before a run


class RowReader(Protocol):
    """A function that reads one row, and facts about the rows behind it."""

    @property
    def name(self) -> str:
        """Name of the data, which begins error messages."""

    @property
    def draws(self) -> bool:
        """Whether a read may draw from the generators of torch, NumPy or Python."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __call__(self, row: int) -> object:
        """Return the inputs of a row: a tensor or an array."""

    def file_of(self, row: int) -> str:
        """Return the file that holds a row; empty if it is not known."""

    def identity(self) -> Sequence[str] | None:
        """Return the name, size and time of each file; None if the files are not known."""


@dataclass(frozen=True, eq=False)
class RowSource:
    """A reader, with the shape and the type that each of its rows must have."""

    reader: RowReader
    input_shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(reader: RowReader) -> RowSource:
        """Return the source of a reader; its first row has the shape and the type of all.

        Raises
        ------
        DataError
            If there are no rows, or the first row cannot be read.
        """
        if not len(reader):
            raise DataError(f"{reader.name} has no rows")
        with own_draws(draws=reader.draws) as seed_row:
            seed_row(NO_SEED)
            x = _row(reader, 0)
            dtype = x.dtype
            if dtype == torch.float64:
                few = [_row(reader, row) for row in sample_of(len(reader), _LOOKED_AT).tolist()]
                fit = all(row.shape == x.shape for row in few)
                far = fit and is_far(torch.stack([row.double() for row in few]))
                dtype = torch.float64 if far else torch.float32
        if not x.dim() or not x.numel():
            raise DataError(f"{reader.name}: a row has shape {list(x.shape)}: it holds no numbers")
        return RowSource(reader, tuple(x.shape), dtype)

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return math.prod(self.input_shape) * self.dtype.itemsize

    def read(self, numbers: Tensor, seeds: Tensor) -> Tensor:
        """Return rows ``(rows, *input)`` by their numbers (rows,), each read with its seed.

        Raises
        ------
        DataError
            If a row cannot be read, has another shape or type than the first row, or holds a number
            that is not finite.
        """
        out = torch.empty(len(numbers), *self.input_shape, dtype=self.dtype)
        pairs = zip(numbers.tolist(), seeds.tolist(), strict=True)
        with own_draws(draws=self.reader.draws) as seed_row:
            for place, (number, seed) in enumerate(pairs):
                seed_row(seed)
                out[place] = self._checked(_row(self.reader, number), number)
        return out

    def _checked(self, x: Tensor, number: int) -> Tensor:
        if x.is_floating_point() and self.dtype.is_floating_point:
            x = x.to(self.dtype)
        if tuple(x.shape) != self.input_shape or x.dtype != self.dtype:
            kinds = [f"{_short(d)} {list(s)}" for d, s in ((x.dtype, x.shape), self._form)]
            raise DataError(f"{_subject(self.reader, number)} is {kinds[0]}, row 0 is {kinds[1]}")
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise DataError(
                f"{_subject(self.reader, number)} holds a number that is not finite: "
                f"{float(x[~torch.isfinite(x)][0]):g}"
            )
        return x

    @property
    def _form(self) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.dtype, self.input_shape


class RowService(Protocol):
    """Something that reads rows while the caller computes, such as other processes."""

    def request(self, source: RowSource, numbers: Tensor, seeds: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows (rows,); return a function that waits for ``(rows, *input)``."""


@dataclass(frozen=True, eq=False)
class LazyRows:
    """Rows ``(rows, *input)`` that are read when they are used.

    ``numbers`` (rows,) are the rows' numbers at the source. ``device`` is the device of the rows
    that were read. With a ``service``, rows are read there.
    """

    source: RowSource
    numbers: Tensor = field(repr=False)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    service: RowService | None = field(default=None, repr=False)

    @staticmethod
    def of(reader: RowReader) -> LazyRows:
        """Return all rows of a reader. The first row is read."""
        return LazyRows(RowSource.of(reader), torch.arange(len(reader)))

    @property
    def shape(self) -> torch.Size:
        """Shape of all rows: ``(rows, *input)``."""
        return torch.Size((len(self.numbers), *self.source.input_shape))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers: uint8, float32 or float64."""
        return self.source.dtype

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: Tensor | slice) -> LazyRows:
        """Return a view of some rows: row numbers (rows,), Booleans (all rows,), or a slice."""
        at = rows if isinstance(rows, slice) else rows.cpu()
        return replace(self, numbers=self.numbers[at])

    def to(self, device: torch.device | str) -> LazyRows:
        """Return the same rows for a device. Nothing is read."""
        return replace(self, device=torch.device(device))

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows in turn: row numbers (rows,), and the rows ``(rows, *input)``."""
        at_once = max(1, PIECE // max(1, self.source.row_bytes))
        for rows in torch.split(torch.arange(len(self)), at_once):
            yield rows, self.read(rows)

    def read(self, rows: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Return the rows of row numbers of any shape, ``(*rows.shape, *input)``.

        ``seeds``, in the shape of ``rows``, seed the draws of random transforms. The default is 0.

        Raises
        ------
        DataError
            If a row cannot be read or does not fit; the message names the row and its file.
        """
        return self.ask(rows, torch.zeros_like(rows) if seeds is None else seeds)()

    def ask(self, rows: Tensor, seeds: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows, as :meth:`read` does; return a function that waits for them."""
        numbers, flat = self.numbers[rows.cpu().flatten()], seeds.cpu().flatten()
        shape = (*rows.shape, *self.source.input_shape)
        if self.service is None:
            return lambda: self.source.read(numbers, flat).view(shape).to(self.device)
        waiting = self.service.request(self.source, numbers, flat)
        return lambda: waiting().view(shape).to(self.device)

    def ask_batch(self, rows: Tensor, keys: Tensor | None) -> Callable[[], Tensor]:
        """Begin to read a batch of all clients; return a function that waits for it.

        ``rows`` (clients, batch) are row numbers, or -1 for absent rows, which come last. ``keys``
        (clients,) draw the random transforms of training. For an absent row the result has the
        client's first row, which is not read again, or zeros if the client has no rows.
        """
        present, seeds = rows >= 0, seeds_of(keys, rows)
        if bool(present.all()):
            return self.ask(rows, seeds)
        waiting = self.ask(rows[present], seeds[present])

        def whole() -> Tensor:
            read = waiting()
            out = read.new_zeros(*rows.shape, *self.source.input_shape)
            out[present] = read
            client, place = (~present).nonzero(as_tuple=True)
            out[client, place] = out[client, torch.zeros_like(place)]
            return out

        return whole


Inputs = Tensor | LazyRows


def pieces_of(x: Inputs) -> Iterator[Tensor]:
    """Yield all rows ``(rows, *input)`` in turn: a tensor at once, and lazy rows in pieces."""
    if isinstance(x, Tensor):
        yield x
    else:
        yield from (rows for _, rows in x.pieces())


def outline(x: Inputs) -> Tensor:
    """Return a tensor, or for lazy rows a tensor of their shape and type without numbers."""
    return x if isinstance(x, Tensor) else torch.empty(x.shape, dtype=x.dtype, device="meta")


def lazy_or_none(x: Inputs) -> LazyRows | None:
    """Return rows that are read when they are used; None for a tensor."""
    return None if isinstance(x, Tensor) else x


def held(x: Inputs, subject: str) -> Tensor:
    """Return rows ``(rows, *input)`` as a tensor; lazy rows are read now.

    Raises
    ------
    DataError
        If ``subject`` would take more than the usable memory, or a row cannot be read.
    """
    if isinstance(x, Tensor):
        return x
    check_memory(len(x) * x.source.row_bytes, f"{subject} are held in memory: {len(x)} rows")
    out = torch.empty(x.shape, dtype=x.dtype)
    for rows, piece in x.pieces():
        out[rows] = piece.cpu()
    return out.to(x.device)


def check_repeatable(x: LazyRows) -> None:
    """Read a few rows twice with the same seed.

    Raises
    ------
    DataError
        If the reads differ.
    """
    rows = sample_of(len(x), CHECKED)
    for row in rows.tolist():
        at = torch.tensor([row])
        if not torch.equal(x.read(at), x.read(at)):
            raise DataError(
                f"{_subject(x.source.reader, int(x.numbers[row]))}: two reads with the same seed "
                "differ; draw from the generators of torch, NumPy or Python, which are seeded for "
                "each row"
            )


def sample_of(count: int, most: int) -> Tensor:
    """Return at most ``most`` row numbers, evenly spread over ``count`` rows: (rows,)."""
    return torch.arange(count) if count <= most else torch.arange(most) * count // most


def as_numbers(value: object) -> Tensor:
    """Return the inputs of a row as a tensor of bytes, float32 or float64, which is exact.

    Raises
    ------
    TypeError
        If ``value`` is no tensor, array or number.
    """
    if not isinstance(value, Tensor | np.ndarray | np.generic | int | float | list | tuple):
        raise TypeError(f"a {type(value).__name__} is not a tensor or an array")
    x = torch.as_tensor(value).detach().cpu()
    if x.is_complex():
        raise TypeError("complex numbers are no inputs")
    if x.dtype == torch.uint8:
        return x
    short = x.dtype.itemsize <= (4 if x.is_floating_point() else 2)
    return x.to(torch.float32 if short else torch.float64)


def _row(reader: RowReader, number: int) -> Tensor:
    try:
        return as_numbers(reader(number))
    except DataError:
        raise
    except Exception as error:  # a user's code may fail in any way
        raise DataError(
            f"{_subject(reader, number)} cannot be read: {first_line(error)}"
        ) from error


def _subject(reader: RowReader, number: int) -> str:
    file = reader.file_of(number)
    return f"{reader.name}: row {number} (counted from 0{', ' * bool(file)}{file})"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
