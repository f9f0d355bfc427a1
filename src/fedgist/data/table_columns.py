"""The columns of a table, how its text is read, and how columns are encoded as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedgist.errors import DataError

Range = tuple[float, float]
MISSING_SIGNS = ("", "na", "n/a", "nan", "null", "none", "?")  # in lower case


@dataclass(frozen=True)
class Column:
    """A column of a table: a number, or categories encoded as one 0/1 number each."""

    name: str
    categories: tuple[str, ...] | None = None
    closed: bool = False  # other categories are an error; otherwise they are encoded as all zeros
    found: bool = False  # the categories were found in the training rows
    usual: Range | None = None  # of numbers, low and high; only the columns of a model have it

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the encoded numbers: ``age``, or ``town=Bonn`` and ``town=Ulm``."""
        if self.categories is None:
            return (self.name,)
        return tuple(f"{self.name}={category}" for category in self.categories)


@dataclass(frozen=True)
class TableForm:
    """How the text of a table is read: the separator of cells, and the signs of missing cells."""

    sep: str | None = None
    signs: tuple[str, ...] = MISSING_SIGNS

    @staticmethod
    def of(sep: str | None, missing_signs: Sequence[str]) -> TableForm:
        """Return the form with a recipe's separator and its further signs of missing cells."""
        if sep is not None and len(sep) != 1:
            raise DataError(f"sep = {sep!r}: one character separates the cells of a table")
        signs = (*MISSING_SIGNS, *(sign.strip().lower() for sign in missing_signs))
        return TableForm(sep, tuple(dict.fromkeys(signs)))


TABLE_FORM = TableForm()
