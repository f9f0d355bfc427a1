"""The columns of a table, and how they are encoded as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of a table: a number, or categories encoded as one 0/1 number each."""

    name: str
    categories: tuple[str, ...] | None = None
    closed: bool = False  # other categories are an error; otherwise they are encoded as all zeros
    found: bool = False  # the categories were found in the training rows

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the encoded numbers: ``age``, or ``town=Bonn`` and ``town=Ulm``."""
        if self.categories is None:
            return (self.name,)
        return tuple(f"{self.name}={category}" for category in self.categories)
