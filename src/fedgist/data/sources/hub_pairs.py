"""Data sets of the Hugging Face library as map-style data sets of pairs (inputs, label)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np

from fedgist.data.sources.image_pixels import pixels
from fedgist.errors import DataError, listed

LABELS = ("label", "labels", "target", "y")  # columns of labels, in the order of preference


class HubRows(Protocol):
    """The used part of the library's class ``Dataset``, a split of a data set."""

    @property
    def column_names(self) -> Sequence[str]:
        """Names of the columns."""

    @property
    def features(self) -> Mapping[str, object]:
        """Type of each column."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int | str, /) -> object: ...


@dataclass(frozen=True, eq=False)
class HubPairs:
    """Pairs of a row's inputs, the values of ``columns``, and its label.

    Images are uint8 (channels, height, width). Several columns of numbers are joined.
    """

    rows: HubRows
    columns: tuple[str, ...]
    label: str

    @staticmethod
    def of(rows: HubRows) -> HubPairs:
        """Return the pairs of a split: one column holds labels, all others are inputs.

        Raises
        ------
        DataError
            If no column of labels is named in a usual way.
        """
        names = list(rows.column_names)
        label = next((name for name in LABELS if name in names), None)
        if label is None or len(names) == 1:
            raise DataError(
                f"data has the columns {listed(names)}; a column of labels ({listed(LABELS)}) and "
                "others of inputs are needed: rename or remove columns"
            )
        return HubPairs(rows, tuple(name for name in names if name != label), label)

    @property
    def targets(self) -> object:
        """The labels of all rows."""
        values = self.rows[self.label]
        return list(values) if isinstance(values, Sequence) else values

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[object, object]:
        """Return the inputs and the label of a row."""
        cells = self.rows[row]
        assert isinstance(cells, Mapping)  # the library's rows
        parts = [_values(cells[name], f"data: row {row}") for name in self.columns]
        x = parts[0] if len(parts) == 1 else np.concatenate([np.ravel(part) for part in parts])
        return x, cells[self.label]


def is_hub(value: object) -> TypeGuard[HubRows]:
    """Return whether an object is a split of a Hugging Face data set."""
    return all(hasattr(value, name) for name in ("column_names", "features", "__getitem__"))


def _values(cell: object, subject: str) -> np.ndarray:
    if hasattr(cell, "convert"):  # an image of pillow
        return np.array(pixels(cell, None, subject))
    return np.asarray(cell)
