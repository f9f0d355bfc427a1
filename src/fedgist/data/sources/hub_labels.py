"""Labels and clients of Hugging Face splits, by the names that the data set gives its classes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from fedgist.core.target import NUMERIC, Target
from fedgist.data.lazy_rows import CHECKED, sample_of
from fedgist.data.row_seeds import NO_SEED, own_draws
from fedgist.data.sources.hub_columns import HubColumns
from fedgist.data.sources.hub_splits import HubPart
from fedgist.data.sources.labelled_rows import Values, as_texts
from fedgist.data.sources.map_rows import plain
from fedgist.data.sources.stored_labels import stored_labels
from fedgist.errors import DataError, first_line

_LEAVE_OUT = "leave such rows out with filter, or name another split by data.test"


def labels_of(part: HubPart, columns: HubColumns, target: Target) -> Values:
    """Return the labels of a split: texts (rows,), numbers (rows, outputs), or pixels.

    Raises
    ------
    DataError
        If a row has no class, or the labels are others than the target needs.
    """
    if target in NUMERIC:
        return np.concatenate([_numbers(part, name, target) for name in columns.labels], axis=1)
    name = columns.labels[0]
    subject = f"{part.name}: the labels {name!r}"
    cells = _cells(part, name)
    if target == "class":
        return _texts(part, name, cells, subject)
    return stored_labels(_stacked([np.asarray(cell) for cell in cells], subject), subject, target)


def clients_of(part: HubPart, columns: HubColumns) -> Values | None:
    """Return the name of the client of each row, texts (rows,); None without such a column."""
    if (name := columns.client) is None:
        return None
    return _texts(part, name, _cells(part, name), f"{part.name}: the clients {name!r}")


def class_names(parts: Sequence[HubPart], columns: HubColumns, target: Target) -> tuple[str, ...]:
    """Return the names of all classes or labels, in the data set's order; empty if it has none."""
    if target in NUMERIC and len(columns.labels) > 1:
        return columns.labels
    names = chain(*(names_of(part, columns.labels[0]) for part in parts))
    return tuple(dict.fromkeys(names)) or (columns.labels if target in NUMERIC else ())


def has_value(part: HubPart, column: str) -> Values:
    """Return Booleans (rows,): whether a row has a value, such as a class, in a column."""
    coded = bool(names_of(part, column))
    return np.array([not _is_missing(c, coded=coded) for c in _cells(part, column)], dtype=bool)


def names_of(part: HubPart, column: str) -> tuple[str, ...]:
    """Return the names of the classes of a column, or of the labels in its lists."""
    kind = part.split.features.get(column)
    inner = getattr(kind, "feature", None)
    return tuple(getattr(kind if inner is None else inner, "names", None) or ())


def _is_missing(cell: object, *, coded: bool) -> bool:
    return cell is None or (coded and cell == -1)  # the library's sign of rows without a label


def _texts(part: HubPart, name: str, cells: Sequence[object], subject: str) -> Values:
    """Return cells as texts: names of classes, texts, whole numbers or Booleans."""
    names = names_of(part, name)
    empty = [row for row, cell in enumerate(cells) if _is_missing(cell, coded=bool(names))]
    if empty:
        rows = "every row" if len(empty) == len(cells) else f"row {empty[0]} (counted from 0)"
        raise DataError(
            f"{subject} are missing ({cells[empty[0]]}) in {rows}, in {len(empty)} of {len(cells)} "
            f"rows: {_LEAVE_OUT}"
        )
    for row, code in enumerate(cells if names else ()):
        if isinstance(code, int) and not 0 <= code < len(names):
            raise DataError(
                f"{subject} hold {code} in row {row} (counted from 0), outside 0..{len(names) - 1}"
            )
    if names:
        cells = [names[code] if isinstance(code, int) else code for code in cells]
    if any(isinstance(cell, str) for cell in cells):
        return as_texts(np.array([*cells, None], dtype=object)[:-1], subject)
    return as_texts(_stacked(cells, subject), subject)


def _numbers(part: HubPart, name: str, target: Target) -> Values:
    """Return a column of numbers or of several labels, float32 (rows, outputs)."""
    cells, names = _cells(part, name), names_of(part, name)
    subject = f"{part.name}: the labels {name!r}"
    is_list = hasattr(part.split.features.get(name), "feature")
    if target == "labels" and names and is_list:  # lists of the labels that a row has
        numbers = np.zeros((len(cells), len(names)))
        for row, own in enumerate(cells):
            assert isinstance(own, list)
            numbers[row, own] = 1
        return stored_labels(numbers, subject, target)
    filled = [np.nan if cell is None else cell for cell in cells]
    values = _stacked(filled, subject)
    return stored_labels(
        values.astype(float) if values.dtype == object else values, subject, target
    )


def _stacked(cells: Sequence[object], subject: str) -> Values:
    try:
        return np.asarray(cells)
    except ValueError as error:
        raise DataError(f"{subject} differ in shape: {first_line(error)}") from error


def _cells(part: HubPart, column: str) -> list[object]:
    """Return a column's values. A user's function is asked for all rows only if it changes some."""
    own = part.only([column])
    if not part.is_transformed:
        return [cell for block in own.blocks() for cell in block[column]]
    with own_draws(draws=True) as seed_row:
        seed_row(NO_SEED)
        if column in part.split.column_names:
            stored = HubPart(part.name, part.split.with_format(None)).only([column])
            cells = [cell for block in stored.blocks() for cell in block[column]]
            rows = sample_of(len(part), CHECKED).tolist()
            if str([cells[row] for row in rows]) == str([_cell(part, row, column) for row in rows]):
                return cells
        return [_cell(part, row, column) for row in range(len(part))]


def _cell(part: HubPart, row: int, column: str) -> object:
    cells = part.row(row)
    if column not in cells:
        raise DataError(f"{part.name}: row {row} (counted from 0) has no column {column!r}")
    return plain(cells[column])
