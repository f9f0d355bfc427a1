"""The columns of a table, and how they are encoded as numbers."""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[float, float]


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
