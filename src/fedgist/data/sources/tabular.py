"""Data source for a user's table: .csv, .tsv or .parquet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from fedgist.core.objectives.target import NUMERIC, Target
from fedgist.data.dataset import Dataset
from fedgist.data.division import OwnTestRowsError
from fedgist.data.held_out_rows import held_out
from fedgist.data.sources.column_kinds import KINDS, Numbers, is_number, kind_of
from fedgist.data.sources.file_sizes import check_memory
from fedgist.data.sources.locations import existing
from fedgist.data.sources.splits import (
    Missing,
    RowOptions,
    Split,
    Values,
    as_mask,
    as_texts,
    dataset,
    division_of,
    note_on_left_out,
    refuse_group,
)
from fedgist.data.sources.stored_labels import label_columns
from fedgist.data.sources.table_file import (
    TableFrame,
    check_filled,
    expect,
    filled,
    is_missing,
    load_table,
    numbers_and_gaps,
    reals,
    texts,
)
from fedgist.data.table_columns import Column, TableForm
from fedgist.data.usable_rows import Unlisted
from fedgist.errors import DataError, listed, one_of

_Gaps = Literal["refuse", "mean", "any"]  # which cells of a column of numbers may hold none
_NUMBER, _CATEGORIES = KINDS  # a recipe's words for a column of numbers, and one of categories


def table(
    *,
    path: str | Path,
    label: str | list[str],
    client: str | None = None,
    group: str | None = None,
    test: str | Path | None = None,
    columns: dict[str, str | list[str]] | None = None,
    ignore: list[str] | None = None,
    annotations: list[str] | None = None,
    missing_signs: list[str] | None = None,
    kinds: dict[str, str] | None = None,
    sep: str | None = None,
    unlisted: Unlisted = "refuse",
    **options: Unpack[RowOptions],
) -> Dataset:
    """Read a table with a column of labels. The other columns are numbers or categories.

    Parameters
    ----------
    path
        The file: .csv or .tsv in UTF-8, also packed (.csv.gz), .parquet, .arff or Stata's .dta.
    label
        The column of labels. For the objectives ``regression`` and ``multilabel`` it holds numbers,
        or 1 and 0, and may be a list of columns; ``classes`` are not read.
    client
        The column with the name of the client that owns a row.
    group
        The column of what stays together when test or validation rows are chosen, such as
        ``"patient"``: all its rows are among them, or none. It is no input.
    test
        A column that is 1 (true) for test rows and 0 (false) for the others, or a second table with
        the test rows.
    columns
        The columns to use, each ``"number"`` or the list of its categories. State them if several
        sites must encode columns in the same way; an unlisted category is then an error.
        ``"categories"`` takes those of the training rows. The
        default is all columns but the label and those in ``ignore``, with the types and categories
        of the training rows. A category that they lack is read as none of these: 0 in all columns.
    ignore
        Columns to leave out.
    annotations
        Numeric columns that are not inputs. Methods may read them for each training row.
    missing_signs
        Further signs of a missing number or label, such as ``["unknown", "-9"]``.
    kinds
        ``{zip = "categories"}``: what a column is, ``"number"`` or ``"categories"``, if its texts
        could be both. ``columns`` does the same for all columns.
    sep
        The character between the cells of a .csv or .tsv file, if it is another one, such as
        ``";"``.

    Notes
    -----
    A column is numeric if its type says so, or if most of its cells are numbers. Then any other
    cell is an error, unless it is a sign of a missing value: empty, ``na``, ``n/a``, ``nan``,
    ``null``, ``none``, ``?``, or one of ``missing_signs``. Dates, times, percentages, numbers with
    a unit, and more than 20 different texts are no categories, and are errors. Any other column has
    categories, and each category becomes a 0/1 column; an empty cell among categories is a category
    of its own. A column without a name that numbers the
    rows is left out. Labels are whole numbers or texts, numbered in sorted order. A label that is a
    sign of a missing value is missing, unless ``classes`` lists it. Pooled normalization: mean and
    deviation of each column of numbers over all training rows, those held out for validation
    included; 0/1 columns stay as they are.

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
    form = TableForm.of(sep, missing_signs or ())
    target, missing = options.get("target", "class"), options.get("missing", "refuse")
    labels, beside = label_columns(label, target), annotations or []
    reading = _Reading(form, labels, client, group, options)
    loaded = load_table(existing(path), form)
    marks = (client, group, str(test) if str(test) in loaded.frame.columns else None)
    aside = [*labels, *(name for name in marks if name), *beside]
    expect(loaded, [*aside, *(ignore or [])])
    gaps: _Gaps = missing if unlisted == "refuse" else "any"
    inputs = _inputs_of(loaded, aside, ignore, columns, kinds or {})
    about = reading, [] if columns else inputs, kinds or {}, gaps
    with _naming_all_problems(loaded, *about):
        whole, train, held = reading.parts(loaded, test)
    numbered = is_number(whole, labels[0])
    with _naming_all_problems(train, *about):
        used, of_columns = _feature_columns(train, inputs, aside, columns, kinds or {})
        _room(whole.name, len(train.frame) + len(held.frame), used)
        train_rows, test_rows = (
            Split(
                encode(part, used, missing=gaps),
                labels_of(part, labels, target, numbered=numbered),
                _clients(part, client),
                _group(part, reading),
            )
            for part in (train, held)
        )
    names = labels if target in NUMERIC else options.get("classes", ())
    data = dataset(
        train.name,
        train_rows,
        test_rows,
        classes=names,
        missing=missing,
        target=target,
        drawn=test is None,
        inputs=[name for column in used for name in column.inputs],
        precise=options.get("precise", False),
    )
    numbers = [_finite(train, name, gaps, cured=False).float() for name in beside]
    notes = tuple(dict.fromkeys((*data.notes, *whole.notes, *held.notes, *of_columns)))
    return replace(
        with_columns(data, used),
        annotations=dict(zip(beside, numbers, strict=True)),
        notes=notes,
        form=form,
    )


@dataclass(frozen=True)
class _Reading:
    """How a table is read: which columns are labels and clients, and what becomes of empty ones."""

    form: TableForm
    labels: list[str]
    client: str | None
    group: str | None
    options: RowOptions

    @property
    def target(self) -> Target:
        """The form of the labels."""
        return self.options.get("target", "class")

    def parts(
        self, loaded: TableFrame, test: str | Path | None
    ) -> tuple[TableFrame, TableFrame, TableFrame]:
        """Return the rows of a table that are used, and its training rows and test rows."""
        whole = self.usable(loaded)
        mask = _test_rows(whole, self, test)
        if test is None or str(test) in whole.frame.columns:
            return whole, whole.take(~mask), whole.take(mask)
        return whole, whole, self.usable(load_table(existing(test), self.form))

    def usable(self, rows: TableFrame) -> TableFrame:
        """Return the rows with a client and a label, with a note on those that are left out."""
        return self._labelled(self._owned(rows))

    def _owned(self, rows: TableFrame) -> TableFrame:
        name = self.client
        drops = self.options.get("missing_clients") == "drop"
        if not drops or name is None or name not in rows.frame.columns:
            return rows
        absent = np.array([cell.strip() == "" for cell in texts(rows, name)], dtype=bool)
        return _without(rows, absent, "client")

    def _labelled(self, rows: TableFrame) -> TableFrame:
        expect(rows, self.labels)
        refuses = self.options.get("missing_labels", "refuse") == "refuse"
        if self.target in NUMERIC:
            if refuses:
                return rows
            absent = np.all([is_missing(rows, name) for name in self.labels], axis=0)
            return _without(rows, absent, "label")
        name = self.labels[0]
        absent = is_missing(rows, name)
        if not absent.any():
            return rows
        listed_signs = self.options.get("classes", ())
        absent &= np.array([cell not in listed_signs for cell in texts(rows, name)], dtype=bool)
        if refuses:
            check_filled(rows, name, "label", absent, _LABEL_CURE)
        return _without(rows, absent, "label")


_LABEL_CURE = (
    "data.missing_labels = 'mask' leaves such rows out, and a sign of a missing value is a class "
    "if data.classes lists it"
)
_MOST_PROBLEMS = 12  # of a table, that an error names
_LACKING = "missing numbers in the columns"
_FILLED = "data.missing = 'mean' replaces missing numbers by their column's mean"
_CLIENT_CURE = "data.missing_clients = 'drop' leaves such rows out"


def _without(rows: TableFrame, absent: Values, lack: str) -> TableFrame:
    """Return the rows that are not ``absent`` (rows,), with a note on what they lack."""
    notes = note_on_left_out(int(absent.sum()), lack)
    return replace(rows.take(~absent), notes=(*rows.notes, *notes)) if notes else rows


def encode(rows: TableFrame, columns: Sequence[Column], *, missing: _Gaps = "refuse") -> Tensor:
    """Return the encoded columns as float64 (rows, numbers and categories).

    With ``missing = "mean"``, a missing number becomes NaN. With ``"any"``, so does any cell of a
    column of numbers that holds none, and an unlisted category is none of the listed ones.
    """
    expect(rows, [column.name for column in columns])
    x = torch.empty(_room(rows.name, len(rows.frame), columns), dtype=torch.float64)
    parts = torch.split(x, [len(column.inputs) for column in columns], 1)
    for column, part in zip(columns, parts, strict=True):
        _encode(rows, column, missing, part)
    return x


def _room(name: str, rows: int, columns: Sequence[Column]) -> tuple[int, int]:
    """Return the shape of the encoded rows; raise DataError if memory is too small."""
    width = sum(len(column.inputs) for column in columns)
    subject = f"{name} with {rows} rows of {width} numbers and categories"
    check_memory(8 * rows * width, subject, "name columns with many categories in data.ignore")
    return rows, width


def _test_rows(whole: TableFrame, reading: _Reading, test: str | Path | None) -> Values:
    """Return Booleans (rows,), true for a test row; all false if test rows have their own table."""
    division = division_of(reading.options)
    if test is None:
        numbered = is_number(whole, reading.labels[0])
        labels = labels_of(whole, reading.labels, reading.target, numbered=numbered)
        return held_out(division, labels, _clients(whole, reading.client), _group(whole, reading))
    refuse_group(reading.group, f"test = {str(test)!r} names the test rows")
    division.refuse(f"test = {str(test)!r} names the test rows")
    if str(test) in whole.frame.columns:
        cells = filled(whole, str(test), "test", "it holds 1 or 0")
        return as_mask(cells, f"{whole.name}: the test column {str(test)!r}")
    return np.zeros(len(whole.frame), dtype=bool)


@contextlib.contextmanager
def _naming_all_problems(
    rows: TableFrame,
    reading: _Reading,
    inputs: Sequence[str],
    kinds: Mapping[str, str],
    gaps: _Gaps,
) -> Iterator[None]:
    """If a cell is not what it should be, name the problems of all columns, not only the first."""
    try:
        yield
    except OwnTestRowsError:
        raise
    except DataError as error:
        place = f"{rows.name}: "
        each = [
            problem.removeprefix(place) for problem in _problems(rows, reading, inputs, kinds, gaps)
        ]
        if len(each) == 1 and each[0].startswith(_LACKING):
            raise DataError(f"{place}{each[0]}") from error
        if len(each) <= 1:
            raise
        shown = each[:_MOST_PROBLEMS]
        if more := len(each) - len(shown):
            shown.append(f"and {more} more; fedgist init proposes what to do about each")
        raise DataError(f"{place}{len(each)} problems:", items=shown) from error


def _problems(
    rows: TableFrame,
    reading: _Reading,
    inputs: Sequence[str],
    kinds: Mapping[str, str],
    gaps: _Gaps,
) -> Iterator[str]:
    """Yield a sentence for each problem; one for all columns that lack numbers alone."""
    lacking: dict[str, int] = {}

    def check_column(name: str) -> None:
        if isinstance(kind_of(rows, name, kinds.get(name)), Numbers):
            numbers = _finite(rows, name, "mean" if gaps == "refuse" else gaps)
            lacking[name] = int(numbers.isnan().sum())

    checks: list[Callable[[], object]] = [
        partial(reading.usable, rows),
        partial(_clients, rows, reading.client),
        *(partial(check_column, name) for name in inputs),
    ]
    for check in checks:
        try:
            check()
        except DataError as error:
            yield str(error)
    counts = [f"{name} ({count})" for name, count in lacking.items() if count]
    if gaps == "refuse" and counts:
        head = _LACKING if len(counts) > 1 else _LACKING.removesuffix("s")
        yield f"{head} {listed(counts)}; {_filled(rows)}"


def _inputs_of(
    rows: TableFrame,
    aside: Sequence[str],
    ignore: list[str] | None,
    stated: dict[str, str | list[str]] | None,
    kinds: Mapping[str, str],
) -> list[str]:
    """Return the names of the input columns: the stated ones, or all not aside or ignored."""
    if stated is not None and (ignore is not None or kinds):
        raise DataError("columns says which are used: leave out ignore and kinds")
    if stated:
        return [*stated]
    unused = {*aside, *(ignore or [])}
    names = [name for name in rows.frame.columns if name not in unused]
    if not names or stated is not None:
        raise DataError(f"{rows.name} has no column besides the label")
    for name, kind in kinds.items():
        if name not in names:
            raise DataError(f"kinds names {name!r}; the columns of inputs are {listed(names)}")
        one_of(kind, KINDS, f"kinds.{name}")
    return names


def _feature_columns(
    train: TableFrame,
    inputs: Sequence[str],
    aside: Sequence[str],
    stated: dict[str, str | list[str]] | None,
    kinds: Mapping[str, str],
) -> tuple[list[Column], list[str]]:
    """Return the input columns with their encodings, and notes."""
    if stated:
        found = [_stated(train, name, kind, aside) for name, kind in stated.items()]
        return found, []
    columns = [column_of(train, name, kinds.get(name)) for name in inputs]
    return [column for column, _ in columns], [note for _, note in columns if note]


def _stated(train: TableFrame, name: str, kind: str | list[str], aside: Sequence[str]) -> Column:
    if name in aside:
        raise DataError(
            f"columns names {name!r}, which is the label, the client or the test column"
        )
    if kind == _NUMBER:
        return Column(name)
    if kind == _CATEGORIES:
        return column_of(train, name, _CATEGORIES)[0]
    if isinstance(kind, str) or not kind or len(set(kind)) < len(kind):
        raise DataError(
            f"columns.{name} is {kind!r:.80}; it must be {_NUMBER!r}, {_CATEGORIES!r} or the list "
            "of its different categories"
        )
    return Column(name, tuple(kind), closed=True)


def column_of(train: TableFrame, name: str, stated: str | None = None) -> tuple[Column, str]:
    """Return the encoding of a column, and a note or an empty text.

    Categories are those of the training rows. ``stated`` is what a user says that the column is.
    """
    kind = kind_of(train, name, stated)
    if isinstance(kind, Numbers):
        return Column(name), kind.note
    return Column(name, kind, found=True), ""


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
    if not numbered:
        return texts(rows, name)
    return as_texts(reals(rows, name), f"{rows.name}: the labels {name!r}")


def _clients(rows: TableFrame, name: str | None) -> Values | None:
    if name is None or name not in rows.frame.columns:
        return None
    return filled(rows, name, "client", _CLIENT_CURE)


def _group(rows: TableFrame, reading: _Reading) -> Values | None:
    if reading.group is None:
        return None
    expect(rows, [reading.group])
    return filled(rows, reading.group, "group", "a row of its own needs a name of its own")


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
            f"{rows.name}: the column {column.name!r} holds {cells[row]!r:.80} in "
            f"{rows.place(row)}, which is not among its categories: " + listed(column.categories)
        )
    held = (code != unknown).nonzero()[:, 0]
    out.zero_()[held, code[held]] = 1.0


def _filled(rows: TableFrame) -> str:
    """Return what helps against missing numbers."""
    return _FILLED if rows.is_file else "fill them in, or leave such rows out of the data frame"


def _finite(rows: TableFrame, name: str, missing: _Gaps, *, cured: bool = True) -> Tensor:
    """Return a numeric column (rows,); missing numbers are NaN if allowed, else an error.

    The error says what helps, if anything ``cured`` missing numbers.
    """
    numbers, gaps = numbers_and_gaps(rows, name)
    usable = np.isfinite(numbers)
    if usable.all() or missing == "any":
        return torch.from_numpy(numbers)
    absent = np.isnan(numbers) & gaps
    if missing == "mean":
        usable |= absent
    if not usable.all():
        position = int(np.argmin(usable))
        cell, place = str(rows.frame[name].iloc[position]), rows.place(position)
        msg = f"{rows.name}: the column {name!r} holds no number in {place}: {cell!r:.80}"
        if absent[position] and cured:
            msg += f"; {_filled(rows)}"
        raise DataError(msg)
    return torch.from_numpy(numbers)


def with_columns(data: Dataset, columns: Sequence[Column]) -> Dataset:
    """Return the data with named columns; only numeric columns keep their mean and std."""
    is_real = [column.categories is None for column in columns for _ in column.inputs]
    mean = tuple(m if real else 0.0 for m, real in zip(data.mean, is_real, strict=True))
    std = tuple(s if real else 1.0 for s, real in zip(data.std, is_real, strict=True))
    measured = data.measured | {"categories"} if any(c.found for c in columns) else data.measured
    measured = measured if any(is_real) else measured - {"moments"}
    return replace(data, mean=mean, std=std, columns=tuple(columns), measured=measured)
