"""A data set of the user's own, as a table: .csv, .tsv or .parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.data.dataset import Column, Dataset
from fedgist.data.sources.file_sizes import check_memory
from fedgist.data.sources.labelled_rows import (
    LabelledRows,
    Values,
    as_texts,
    dataset,
    held_out,
    in_order,
)
from fedgist.data.sources.locations import existing
from fedgist.data.sources.table_file import (
    Table,
    expect,
    filled,
    is_number,
    load_table,
    reals,
    texts,
)
from fedgist.errors import DataError

_MOST_CATEGORIES = 1000  # of a column; more of them are identifiers or free text


def table(
    *,
    path: str | Path,
    label: str,
    client: str | None = None,
    test: str | Path | None = None,
    test_fraction: float = 0.2,
    ignore: list[str] | None = None,
) -> Dataset:
    """Read a table with a column of labels, and perhaps one of clients.

    All other columns that are not in ``ignore`` are numbers or categories. ``test`` is a second
    table with the test rows; without it, ``test_fraction`` of each class is held out.

    Raises
    ------
    DataError
        If a table cannot be read, lacks a column, or has a cell that cannot be used.
    """
    whole, mask = _split(path, label, client, test, test_fraction, ignore)
    train = whole.take(~mask)
    held = whole.take(mask) if test is None else load_table(existing(test))
    columns = _feature_columns(train, {label, client, *(ignore or [])})
    expect(held, [label])
    numbered = is_number(whole, label)
    train_rows, test_rows = (
        LabelledRows(
            encode(part, columns),
            labels_in(part, label, numbered=numbered),
            _clients(part, client),
        )
        for part in (train, held)
    )
    return with_columns(dataset(train.name, train_rows, test_rows), columns)


def encode(rows: Table, columns: Sequence[Column]) -> Tensor:
    """Return the columns as float32 (rows, numbers and categories).

    Raises
    ------
    DataError
        If a column is missing, or a cell of a column of numbers is not a finite number.
    """
    expect(rows, [column.name for column in columns])
    width = sum(len(column.categories or ("",)) for column in columns)
    what = f"{rows.name} with {len(rows.frame)} rows of {width} numbers and categories"
    check_memory(4 * len(rows.frame) * width, what, "name columns with many categories in ignore")
    return torch.cat([_encode(rows, column) for column in columns], dim=1)


def _split(
    path: str | Path,
    label: str,
    client: str | None,
    test: str | Path | None,
    test_fraction: float,
    ignore: list[str] | None,
) -> tuple[Table, Values]:
    """Return the table, and a mask of its rows that is true for test rows."""
    whole = load_table(existing(path))
    expect(whole, [label, *([] if client is None else [client]), *(ignore or [])])
    if test is not None:
        return whole, np.zeros(len(whole.frame), dtype=bool)
    return whole, held_out(labels_in(whole, label, numbered=is_number(whole, label)), test_fraction)


def _feature_columns(train: Table, no_features: set[str | None]) -> list[Column]:
    columns = [column_of(train, name) for name in train.frame.columns if name not in no_features]
    if not columns:
        msg = f"{train.name} has no column besides the label"
        raise DataError(msg)
    return columns


def column_of(train: Table, name: str) -> Column:
    """Return how a column is encoded: its training rows tell its categories, if not numbers.

    Raises
    ------
    DataError
        If it has too many different texts.
    """
    if is_number(train, name):
        return Column(name)
    categories = in_order(texts(train, name))
    if len(categories) > _MOST_CATEGORIES:
        msg = (
            f"{train.name}: the column {name!r} holds {len(categories)} different texts, more "
            f"than {_MOST_CATEGORIES}; name it in ignore, or replace it with numbers"
        )
        raise DataError(msg)
    return Column(name, categories)


def labels_in(rows: Table, name: str, *, numbered: bool) -> Values:
    """Return a column of labels as text (rows,); whole numbers if ``numbered``.

    Raises
    ------
    DataError
        If a cell is empty, or no whole number.
    """
    cells = filled(rows, name, "label", numbered=numbered)
    if not numbered:
        return cells
    return as_texts(reals(rows, name), f"{rows.name}: the labels {name!r}")


def _clients(rows: Table, name: str | None) -> Values | None:
    if name is None or name not in rows.frame.columns:
        return None
    return filled(rows, name, "client")


def _encode(rows: Table, column: Column) -> Tensor:
    """Return a column as numbers (rows, 1) or 0/1 (rows, categories), all 0 for a new category."""
    if column.categories is None:
        return _finite(rows, column.name)[:, None]
    position = {category: number for number, category in enumerate(column.categories)}
    unknown = len(position)
    code = torch.tensor(
        [position.get(cell, unknown) for cell in texts(rows, column.name)], dtype=torch.int64
    )
    return torch.nn.functional.one_hot(code, unknown + 1)[:, :-1].float()


def _finite(rows: Table, name: str) -> Tensor:
    numbers = reals(rows, name)
    finite = np.isfinite(numbers)
    if not finite.all():
        position = int(np.argmin(finite))
        row, cell = rows.frame.index[position] + 1, str(rows.frame[name].iloc[position])
        msg = (
            f"{rows.name}: the column {name!r} holds no number in row {row} below the header: "
            f"{cell!r}"
        )
        raise DataError(msg)
    return torch.from_numpy(numbers).float()


def with_columns(data: Dataset, columns: Sequence[Column]) -> Dataset:
    """Name the columns, and standardise numbers only: a 0/1 column stays as it is."""
    is_real = [column.categories is None for column in columns for _ in column.categories or ("",)]
    mean = tuple(m if real else 0.0 for m, real in zip(data.mean, is_real, strict=True))
    std = tuple(s if real else 1.0 for s, real in zip(data.std, is_real, strict=True))
    return replace(data, mean=mean, std=std, columns=tuple(columns))
