"""Convert Python objects to arrays, labels and tables, with one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.data.sources.array_file import exact_type
from fedgist.data.sources.splits import Values, as_texts, whole_numbers
from fedgist.data.sources.table_file import Table, TableFrame, without_row_numbers
from fedgist.data.sources.tabular import column_of
from fedgist.data.table_columns import Column
from fedgist.errors import DataError, first_line

_NUMBERS, _TEXTS = "biuf", "UOT"  # NumPy's kinds of types
_IN_COLUMNS = "biufOUT"  # the kinds in columns of a data frame
_PLAIN = (bool, int, float, np.number, np.bool_)  # objects that are read as numbers


def array(value: object, subject: str) -> Values:
    """Return an object as an array with at least one dimension, numeric if all items are."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise DataError(f"{subject} is masked in places; fill them, or leave these rows out")
    if not _is_array_like(value):  # NumPy would ask any object for its items, one by one
        raise DataError(f"{subject} is {_kind(value)}, not an array")
    try:
        if isinstance(value, list | tuple) and any(isinstance(item, str) for item in value):
            value = np.array([*value, None], dtype=object)[:-1]  # NumPy would turn all into text
        values = np.asarray(_on_cpu(value) if isinstance(value, Tensor) else value)
        if values.dtype == object and all(isinstance(item, _PLAIN) for item in values.flat):
            values = np.array(values.tolist())
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DataError(f"{subject} cannot be read as an array: {first_line(error)}") from error
    if values.ndim == 0:
        raise DataError(f"{subject} is {_kind(value)}, not an array")
    return values


def _is_array_like(value: object) -> bool:
    """Return whether an object is an array, a number, a text, or a sequence of such objects.

    Other objects with items may have no end: torch's data sets need not raise IndexError.
    """
    if isinstance(value, list | tuple):
        return not any(_has_items(kind) for kind in {type(item) for item in value})
    return not _has_items(type(value))


def _has_items(kind: type) -> bool:
    """Return whether objects of a type have items without being arrays or Python's sequences."""
    if issubclass(kind, Sequence | Mapping | Tensor | memoryview) or hasattr(kind, "__array__"):
        return False
    return hasattr(kind, "__getitem__")


def example_values(value: object, subject: str) -> Tensor:
    """Return a numeric array ``(rows, *shape)`` as examples: bytes, float32 or float64."""
    x = array(value, subject)
    if x.dtype.kind not in _NUMBERS:
        raise DataError(
            f"{subject} must hold numbers, not {x.dtype}; give texts as columns of a data frame"
        )
    if x.ndim == 1:
        raise DataError(f"{subject} has shape {list(x.shape)}: one value a row is x.reshape(-1, 1)")
    if 0 in x.shape[1:]:
        raise DataError(f"{subject} has shape {list(x.shape)}: there is nothing in a row")
    kind = np.uint8 if x.dtype == np.uint8 else exact_type(x.dtype)
    # numbers that are too large become infinite, which the check of the data set reports
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.require(x, kind, ["C", "W"]))


def label_values(value: Any, subject: str, *, signed: bool = False) -> Values:
    """Return labels (rows,) as whole numbers, from 0 on unless they are ``signed``, or as texts."""
    if categories(value):
        pairs = zip(value, value.isna(), strict=True)
        value = [None if missing else str(label) for label, missing in pairs]
    y = array(value, subject)
    if y.ndim > 1:
        more = " (of one-hot rows: y.argmax(1))" if y.shape[1] > 1 else " (y.ravel())"
        raise DataError(f"{subject} has shape {list(y.shape)}: one label a row is needed{more}")
    if y.dtype.kind in _TEXTS:
        return as_texts(y.astype(object), subject)
    if y.dtype.kind not in _NUMBERS:
        raise DataError(f"{subject} must be whole numbers or texts, not {y.dtype}")
    numbers = whole_numbers(y.astype(np.float64), subject) if y.dtype.kind in "fu" else y
    if len(y) and numbers.min() < 0 and not signed:
        row = int(np.argmin(numbers))
        raise DataError(
            f"{subject} holds {numbers[row]} in row {row}; labels are 0, 1, 2, ... or texts"
        )
    return numbers.astype(np.int64)


def are_texts(values: Values) -> bool:
    """Return whether labels are texts."""
    return values.dtype == object


def categories(value: Any) -> tuple[str, ...]:
    """Return the ordered categories of a pandas categorical, or an empty tuple."""
    array_of_it = value.array if _is_pandas(value, "Series") else value
    if not _is_pandas(array_of_it, "Categorical"):
        return ()
    return tuple(str(category) for category in array_of_it.categories)


def is_frame(value: object) -> bool:
    """Return whether an object is a pandas data frame."""
    return _is_pandas(value, "DataFrame")


def table_of(frame: Any, subject: str) -> TableFrame:
    """Return a data frame as a table whose rows are numbered from 0."""
    named = frame.infer_objects().reset_index(drop=True)
    named.columns = [str(name) for name in frame.columns]
    if (twice := named.columns[named.columns.duplicated()]).size:
        raise DataError(f"{subject} has two columns named {twice[0]!r}")
    for name, kind in named.dtypes.items():
        if kind.kind not in _IN_COLUMNS:
            raise DataError(
                f"{subject}: the column {name!r} holds {kind}, not numbers, texts or categories"
            )
    return without_row_numbers(TableFrame(subject, named, untyped=False, is_file=False))


def index_of(value: Table) -> Table:
    """Return the index of a pandas frame or series, or None."""
    return value.index if is_frame(value) or _is_pandas(value, "Series") else None


def chooses_others(rows: Table, table: object) -> bool:
    """Return whether rows that pandas chose, by labels or a mask, are others by their number."""
    index = index_of(table)
    if index is None:
        return False
    if _is_pandas(rows, "Series"):
        return rows.dtype.kind == "b" and not rows.index.equals(index)
    return _is_pandas(rows, "Index") and list(index) != list(range(len(index)))


def columns_of(table: TableFrame) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """Return the encoding of each column, and notes; a categorical keeps its own categories."""
    declared = {name: categories(table.frame[name]) for name in table.frame.columns}
    pairs = [
        (Column(name, own), "") if own else column_of(table, name) for name, own in declared.items()
    ]
    notes = (*table.notes, *(note for _, note in pairs if note))
    return tuple(column for column, _ in pairs), notes


def _is_pandas(value: object, name: str) -> bool:
    pandas = sys.modules.get("pandas")  # imported already if the object is a frame
    return pandas is not None and isinstance(value, getattr(pandas, name))


def _on_cpu(tensor: Tensor) -> Tensor:
    on_cpu = tensor.detach().cpu()
    return on_cpu.float() if on_cpu.dtype == torch.bfloat16 else on_cpu  # NumPy has no bfloat16


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
