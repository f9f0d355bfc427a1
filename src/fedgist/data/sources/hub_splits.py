"""Splits of the Hugging Face library, read without importing it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

from torch.utils.data import Subset

from fedgist.data.row_seeds import NO_SEED, own_draws
from fedgist.errors import DataError, first_line

AT_ONCE = 256  # rows that are read together


class HubSplit(Protocol):
    """The used part of the library's class ``Dataset``, a split of a data set."""

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""

    @property
    def features(self) -> Mapping[str, object]:
        """Type of each column; a type of class labels has ``names``."""

    @property
    def format(self) -> Mapping[str, object]:
        """The type of the values (``torch``, ``custom``, ...), and the columns that rows show."""

    @property
    def cache_files(self) -> Sequence[Mapping[str, str]]:
        """Each file's path, as ``filename``; empty if the rows are in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: int | slice, /) -> object:
        """Return a row by its number, or several: values by column."""

    def with_format(self, kind: str | None = None, /) -> HubSplit:
        """Return the same rows with values of another type; None gives Python objects."""

    def select(self, rows: Sequence[int], /) -> HubSplit:
        """Return some rows."""

    def select_columns(self, names: list[str], /) -> HubSplit:
        """Return some columns."""

    def cast_column(self, name: str, kind: object, /) -> HubSplit:
        """Return the same rows with another type of a column."""


def is_split(value: object) -> TypeGuard[HubSplit]:
    """Return whether an object is a split of the library."""
    return _is("Dataset", value)


def is_splits(value: object) -> bool:
    """Return whether an object is the library's mapping of names to splits."""
    return _is("DatasetDict", value)


def split_of(value: object) -> object:
    """Return a split for a torch ``Subset`` of it, and any other object unchanged.

    Raises
    ------
    DataError
        If the rows of a split can only be read in turn.
    """
    if _is("IterableDataset", value) or _is("IterableDatasetDict", value):
        raise DataError(
            f"data is a Hugging Face {type(value).__name__}, whose rows have no numbers: load it "
            "without streaming=True, or keep some rows: "
            "datasets.Dataset.from_list(list(data.take(1000)))"
        )
    if isinstance(value, Subset):
        whole = split_of(value.dataset)
        return whole.select(value.indices) if is_split(whole) else value
    return value


def _is(kind: str, value: object) -> bool:
    library = sys.modules.get("datasets")  # imported already if the object is of the library
    return library is not None and isinstance(value, getattr(library, kind, ()))


@dataclass(frozen=True, eq=False)
class HubPart:
    """A split, and the name that begins error messages about its rows."""

    name: str
    split: HubSplit = field(repr=False)

    @property
    def is_transformed(self) -> bool:
        """Whether a user's function makes the rows when they are read."""
        return self.split.format["type"] == "custom"

    def __len__(self) -> int:
        return len(self.split)

    def kinds(self) -> Mapping[str, object]:
        """Return the type of each column that rows show; of a transformed row, its values.

        Raises
        ------
        DataError
            If the split is empty, or the user's function fails.
        """
        if not len(self.split):
            raise DataError(f"{self.name} has no rows")
        if self.is_transformed:
            with own_draws(draws=True) as seed_row:
                seed_row(NO_SEED)
                return self.row(0)
        names, shown = self.split.column_names, self.split.format["columns"]
        if isinstance(shown, list) and not self.split.format["output_all_columns"]:
            names = shown
        return {name: self.split.features[name] for name in names}

    def only(self, columns: Sequence[str]) -> HubPart:
        """Return the part with some columns, as Python objects; a transformed one is unchanged."""
        if self.is_transformed:
            return self
        names = list(dict.fromkeys(columns))
        plain = self.split.with_format(None).select_columns(names)
        for name in names:  # the image, not its bytes
            kind = plain.features[name]
            if getattr(kind, "decode", True) is False:
                plain = plain.cast_column(name, type(kind)())
        return HubPart(self.name, plain)

    def row(self, number: int) -> Mapping[str, object]:
        """Return the values of a row by column.

        Raises
        ------
        DataError
            If the row cannot be read.
        """
        values = self._read(number, f"row {number}")
        if not isinstance(values, Mapping):
            raise DataError(f"{self.name}: row {number} is a {type(values).__name__}, no mapping")
        return values

    def blocks(self) -> Iterator[Mapping[str, Sequence[object]]]:
        """Yield the values of some rows by column, in the order of the rows."""
        for begin in range(0, len(self), 1 if self.is_transformed else AT_ONCE):
            if self.is_transformed:  # a function may draw for several rows at once
                yield {name: [value] for name, value in self.row(begin).items()}
                continue
            rows = slice(begin, min(begin + AT_ONCE, len(self)))
            values = self._read(rows, f"one of the rows {begin} to {rows.stop - 1}")
            assert isinstance(values, Mapping)  # the library's rows
            yield values

    def _read(self, key: int | slice, subject: str) -> object:
        try:
            return self.split[key]
        except Exception as error:  # a decoder or a user's function may fail in any way
            raise DataError(
                f"{self.name}: {subject} (counted from 0) cannot be read: {first_line(error)}"
            ) from error
