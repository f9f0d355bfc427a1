"""How rows are divided into training rows and test rows, where the data do not say it.

A division is one of several: a fold, or one of several random shares. A study repeats a run with
all of them, so that what it says of a method does not hang on the test rows of one draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedgist.errors import DataError

Within = Literal["client", "pooled"]
TEST_FRACTION = 0.2  # share of the rows that are test rows, if a recipe says nothing


class OwnTestRowsError(DataError):
    """Test rows are to be chosen among data with test rows of their own."""


@dataclass(frozen=True)
class Division:
    """How test rows are chosen: a share of the rows, or one of ``folds`` parts.

    ``number`` counts divisions from 0: the folds of the first repeat, then those of the second, or
    random shares. ``within`` says whether the rows of each client are divided by themselves, as the
    sites of a federation do, or all rows together.
    """

    fraction: float | None = None
    folds: int | None = None
    number: int = 0
    repeats: int = 1
    within: Within = "client"

    @property
    def repeat(self) -> int:
        """The repeat that this division belongs to, from 0."""
        return self.number // (self.folds or 1)

    @property
    def fold(self) -> int:
        """The fold whose rows are the test rows, from 0."""
        return self.number % (self.folds or 1)

    @property
    def share(self) -> float:
        """The share of test rows, as stated or the default.

        Raises
        ------
        DataError
            If the stated share is no share.
        """
        if self.folds is not None:
            return 1 / self.folds
        if self.fraction is None:
            return TEST_FRACTION
        if not 0 <= self.fraction < 1:
            raise DataError(f"test_fraction is {self.fraction}; it must be at least 0 and below 1")
        return self.fraction

    @property
    def is_stated(self) -> bool:
        """Whether a user asks for test rows to be chosen."""
        return self.fraction is not None or self.folds is not None or self.repeats > 1

    def refuse(self, test_rows: str) -> None:
        """Raise OwnTestRowsError if a user asks for test rows beside the data's own."""
        if not self.is_stated:
            return
        keys = {"folds": self.folds, "test_fraction": self.fraction, "repeats": self.repeats}
        stated = next(f"{key} = {value:g}" for key, value in keys.items() if value is not None)
        raise OwnTestRowsError(f"{stated} is not read: {test_rows}; leave it out")


USUAL = Division()
