"""Data source for a user's table: .csv, .tsv or .parquet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedgist.core.target import NUMERIC, Target
from fedgist.data.dataset import Dataset
from fedgist.data.label_check import MissingLabels
from fedgist.data.sources.file_sizes import check_memory
from fedgist.data.sources.labelled_rows import (
    LabelledRows,
    Missing,
    Values,
    as_mask,
    as_texts,
    dataset,
    held_out,
    in_order,
    note_on_left_out,
    refuse_fraction,
)
from fedgist.data.sources.locations import existing
from fedgist.data.sources.stored_labels import label_columns
from fedgist.data.sources.table_file import (
    TableFrame,
    expect,
    filled,
    is_missing,
    is_number,
    load_table,
    reals,
    texts,
)
from fedgist.data.table_columns import Column
from fedgist.data.usable_rows import Unlisted
from fedgist.errors import DataError, listed

_Gaps = Literal["refuse", "mean", "any"]  # which cells of a column of numbers may hold none
_NUMBER = "number"  # a recipe's word for a numeric column
_MOST_CATEGORIES = 1000  # more categories in a column are identifiers or free text
_FEW_CATEGORIES, _FEW_ROWS_EACH = 20, 2  # above the one and below the other: identifiers, too
# a day in any order, with or without a time: 2021-03-04, 4.3.2021, 2021-03-04T10:00:00Z
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ]\d{1,2}:\d{2}.*)?", re.ASCII)


def table(
    *,
    path: str | Path,
    label: str | list[str],
    client: str | None = None,
    test: str | Path | None = None,
    test_fraction: float | None = None,
    columns: dict[str, str | list[str]] | None = None,
    ignore: list[str] | None = None,
    annotations: list[str] | None = None,
    missing: Missing = "refuse",
    classes: Sequence[str] = (),
    target: Target = "class",
    missing_labels: MissingLabels = "refuse",
    unlisted: Unlisted = "refuse",
) -> Dataset:
    """Read a table with a column of labels. The other columns are numbers or categories.

    Parameters
    ----------
    path
        The file: .csv, .tsv or .parquet.
    label
        The column of labels. For the objectives ``regression`` and ``multilabel`` it holds numbers,
        or 1 and 0, and may be a list of columns; ``classes`` are not read.
    client
        The column with the name of the client that owns a row.
    test
        A column that is 1 (true) for test rows and 0 (false) for the others, or a second table with
        the test rows.
    test_fraction
        Fraction of each class held out as test rows. Default 0.2. Not with ``test``.
    columns
        The columns to use, each ``"number"`` or the list of its categories. State them if several
        sites must encode columns in the same way; an unlisted category is then an error. The
        default is all columns but the label and those in ``ignore``, with the types and categories
        of the training rows. A category that occurs in test rows only is then 0 in all its columns.
    ignore
        Columns to leave out.
    annotations
        Numeric columns that are not inputs. Methods may read them for each training row.
    missing
        What to do with a missing number. ``"refuse"``: it is an error. ``"mean"``: the mean of its
        column over the training rows replaces it. An empty cell among categories is a category of
        its own.
    classes
        Names of the classes in the order of their numbers.

    Notes
    -----
    A column is numeric if its type in a .parquet file says so, or if each of its cells is a number
    or one of the signs of a missing value: empty, ``na``, ``n/a``, ``nan``, ``null``, ``none``,
    ``?``. Any other column has categories, and each category becomes a 0/1 column. Labels are whole
    numbers or texts, numbered in sorted order. Pooled normalization: mean and deviation of each
    column of numbers over all training rows, those held out for validation included; 0/1 columns
    stay as they are.

    Examples
    --------
    A recipe's section that encodes the rows of all sites in the same way::

        [data]
        name = "table"
        path = "patients.csv"
        label = "diagnosis"
        client = "hospital"
        classes = ["benign", "malignant"]
        missing = "mean"

        [data.columns]
        age = "number"
        town = ["Bonn", "Ulm"]
    """
    labels, masked = label_columns(label, target), missing_labels == "mask"
    whole = _labelled(load_table(existing(path)), labels, target, masked=masked)
    mask = _test_rows(whole, labels, target, test, test_fraction)
    by_column = test is None or str(test) in whole.frame.columns
    train, held = whole.take(~mask), whole.take(mask)
    if not by_column:
        held = _labelled(load_table(existing(test or "")), labels, target, masked=masked)
    beside = annotations or []
    marks = (client, str(test) if test and by_column else None)
    aside = [*labels, *(name for name in marks if name), *beside]
    expect(whole, [*aside, *(ignore or [])])
    expect(held, labels)
    gaps: _Gaps = missing if unlisted == "refuse" else "any"
    used = _feature_columns(train, aside, ignore, columns)
    numbered = is_number(whole, labels[0])
    _room(whole.name, len(train.frame) + len(held.frame), used)
    train_rows, test_rows = (
        LabelledRows(
            encode(part, used, missing=gaps),
            labels_of(part, labels, target, numbered=numbered),
            _clients(part, client),
        )
        for part in (train, held)
    )
    names = labels if target in NUMERIC else classes
    data = dataset(train.name, train_rows, test_rows, classes=names, missing=missing, target=target)
    numbers = encode(train, [Column(name) for name in beside], missing=gaps).T
    notes = note_on_left_out(whole.left_out + (0 if by_column else held.left_out))
    further = dict(zip(beside, numbers, strict=True))
    return replace(with_columns(data, used), annotations=further, notes=notes)


def encode(rows: TableFrame, columns: Sequence[Column], *, missing: _Gaps = "refuse") -> Tensor:
    """Return the encoded columns as float32 (rows, numbers and categories).

    With ``missing = "mean"``, a missing number becomes NaN. With ``"any"``, so does any cell of a
    column of numbers that holds none, and an unlisted category is none of the listed ones.
    """
    expect(rows, [column.name for column in columns])
    x = torch.empty(_room(rows.name, len(rows.frame), columns))
    parts = torch.split(x, [len(column.inputs) for column in columns], 1)
    for column, part in zip(columns, parts, strict=True):
        _encode(rows, column, missing, part)
    return x


def _room(name: str, rows: int, columns: Sequence[Column]) -> tuple[int, int]:
    """Return the shape of the encoded rows; raise DataError if memory is too small."""
    width = sum(len(column.inputs) for column in columns)
    subject = f"{name} with {rows} rows of {width} numbers and categories"
    check_memory(4 * rows * width, subject, "name columns with many categories in ignore")
    return rows, width


def _labelled(
    rows: TableFrame, labels: Sequence[str], target: Target, *, masked: bool
) -> TableFrame:
    """Return the rows with a label; all of them, unless labels may be missing (``masked``)."""
    if not masked:
        return rows
    expect(rows, list(labels))
    if target in NUMERIC:
        empty = [is_missing(rows, name) for name in labels]
    else:
        empty = [np.array([not cell.strip() for cell in texts(rows, labels[0])])]
    absent = np.all(empty, axis=0)
    return replace(rows.take(~absent), left_out=int(absent.sum()))


def _test_rows(
    whole: TableFrame,
    labels: Sequence[str],
    target: Target,
    test: str | Path | None,
    test_fraction: float | None,
) -> Values:
    """Return Booleans (rows,), true for a test row; all false if test rows have their own table."""
    if test is None:
        expect(whole, list(labels))
        numbered = is_number(whole, labels[0])
        return held_out(labels_of(whole, labels, target, numbered=numbered), test_fraction)
    refuse_fraction(test_fraction, f"test = {str(test)!r} names the test rows")
    if str(test) in whole.frame.columns:
        cells = filled(whole, str(test), "test")
        return as_mask(cells, f"{whole.name}: the test column {str(test)!r}")
    return np.zeros(len(whole.frame), dtype=bool)


def _feature_columns(
    train: TableFrame,
    aside: list[str],
    ignore: list[str] | None,
    stated: dict[str, str | list[str]] | None,
) -> list[Column]:
    """Return the input columns: the stated ones, or all that are not ``aside`` or ignored."""
    if stated is not None and ignore is not None:
        raise DataError("columns says which are used: leave out ignore")
    if stated is not None:
        columns = [_stated(name, kind, aside) for name, kind in stated.items()]
    else:
        unused = {*aside, *(ignore or [])}
        columns = [column_of(train, name) for name in train.frame.columns if name not in unused]
    if not columns:
        raise DataError(f"{train.name} has no column besides the label")
    return columns


def _stated(name: str, kind: str | list[str], aside: list[str]) -> Column:
    if name in aside:
        raise DataError(
            f"columns names {name!r}, which is the label, the client or the test column"
        )
    if kind == _NUMBER:
        return Column(name)
    if isinstance(kind, str) or not kind or len(set(kind)) < len(kind):
        raise DataError(
            f"columns.{name} is {kind!r:.80}; it must be {_NUMBER!r} or the list of its different "
            "categories"
        )
    return Column(name, tuple(kind), closed=True)


def column_of(train: TableFrame, name: str) -> Column:
    """Return the encoding of a column; categories are those of the training rows."""
    if is_number(train, name):
        return Column(name)
    cells = texts(train, name)
    categories = in_order(cells)
    if problem := _why_no_categories(categories, len(cells)):
        raise DataError(f"{train.name}: the column {name!r} holds {problem}; {_ways_out(train)}")
    return Column(name, categories, found=True)


def _why_no_categories(categories: Sequence[str], rows: int) -> str:
    """Return what the texts of a column are, if they are no categories; else an empty text."""
    count, given = len(categories), [text for text in categories if text]
    if given and all(_DATE.fullmatch(text) for text in given):
        return f"dates ({given[0]!r})"
    if count > _MOST_CATEGORIES:
        return f"{count} different texts, more than {_MOST_CATEGORIES}"
    if count > _FEW_CATEGORIES and rows < _FEW_ROWS_EACH * count:
        return f"{count} different texts in {rows} rows, like names or identifiers"
    return ""


def _ways_out(table: TableFrame) -> str:
    """Return what a user can do about a column whose texts are no categories."""
    if table.is_file:
        return "name it in ignore, or replace it with numbers"
    return "leave it out of the data frame, or replace it with numbers"


def labels_of(
    rows: TableFrame, columns: Sequence[str], target: Target, *, numbered: bool
) -> Values:
    """Return labels: texts (rows,) of one column, or numbers (rows, columns), NaN if missing."""
    if target not in NUMERIC:
        return labels_in(rows, columns[0], numbered=numbered)
    missing: Missing = "mean"  # they are masked, not filled in; data.missing_labels decides
    return np.stack([_finite(rows, name, missing).numpy() for name in columns], axis=1)


def labels_in(rows: TableFrame, name: str, *, numbered: bool) -> Values:
    """Return a column of labels as text (rows,), as whole numbers if ``numbered``."""
    cells = filled(rows, name, "label", numbered=numbered)
    if not numbered:
        return cells
    return as_texts(reals(rows, name), f"{rows.name}: the labels {name!r}")


def _clients(rows: TableFrame, name: str | None) -> Values | None:
    if name is None or name not in rows.frame.columns:
        return None
    return filled(rows, name, "client")


def _encode(rows: TableFrame, column: Column, missing: _Gaps, out: Tensor) -> None:
    """Write a column into ``out``, as numbers (rows, 1) or 0/1 (rows, categories)."""
    if column.categories is None:
        out[:, 0] = _finite(rows, column.name, missing)
        return
    position = {category: number for number, category in enumerate(column.categories)}
    unknown = len(position)
    cells = texts(rows, column.name)
    code = torch.tensor([position.get(cell, unknown) for cell in cells], dtype=torch.int64)
    if column.closed and missing != "any" and bool((new := code == unknown).any()):
        row = int(new.byte().argmax())
        raise DataError(
            f"{rows.name}: the column {column.name!r} holds {cells[row]!r:.80} in row "
            f"{rows.frame.index[row] + 1} below the header, which is not among its categories: "
            + listed(column.categories)
        )
    held = (code != unknown).nonzero()[:, 0]
    out.zero_()[held, code[held]] = 1.0


def _finite(rows: TableFrame, name: str, missing: _Gaps) -> Tensor:
    """Return a numeric column (rows,); missing numbers are NaN if allowed, else an error."""
    numbers = reals(rows, name)
    usable = np.isfinite(numbers)
    if usable.all() or missing == "any":
        return torch.from_numpy(numbers).float()
    absent = np.isnan(numbers) & is_missing(rows, name)
    if missing == "mean":
        usable |= absent
    if not usable.all():
        position = int(np.argmin(usable))
        row, cell = rows.frame.index[position] + 1, str(rows.frame[name].iloc[position])
        msg = f"{rows.name}: the column {name!r} holds no number in row {row} below the header: "
        msg += f"{cell!r:.80}"
        if absent[position]:
            msg += "; missing = 'mean' replaces missing numbers by their column's mean"
        raise DataError(msg)
    return torch.from_numpy(numbers).float()


def with_columns(data: Dataset, columns: Sequence[Column]) -> Dataset:
    """Return the data with named columns; only numeric columns keep their mean and std."""
    is_real = [column.categories is None for column in columns for _ in column.inputs]
    mean = tuple(m if real else 0.0 for m, real in zip(data.mean, is_real, strict=True))
    std = tuple(s if real else 1.0 for s, real in zip(data.std, is_real, strict=True))
    measured = data.measured | {"categories"} if any(c.found for c in columns) else data.measured
    measured = measured if any(is_real) else measured - {"moments"}
    return replace(data, mean=mean, std=std, columns=tuple(columns), measured=measured)
