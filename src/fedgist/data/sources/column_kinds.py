"""What the cells of a table's column are: numbers, categories, or neither, which is an error.

A column is never guessed from a few cells, and no rule depends on the number of rows. If most cells
are numbers, the column is numeric, and any other cell is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType

import numpy as np

from fedgist.data.sources.splits import Values, in_order
from fedgist.data.sources.table_file import TableFrame, numbers_and_gaps, texts
from fedgist.errors import DataError

MOST_CATEGORIES = 20  # more texts in a column are names, identifiers or free text
_LONGEST = 80  # signs of a missing number that an error proposes, in characters
_NUMERIC = "iuf"
#: Texts that mean a number or a time, but are none that can be computed with.
_FORMS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        # a day in any order, with or without a time: 2021-03-04, 4.3.2021, 2021-03-04T10:00:00Z
        "dates": re.compile(
            r"\d{1,4}[-/. ](\d{1,2}|[A-Za-z]{3,9}\.?)[-/., ]+\d{1,4}([T ]\d{1,2}:\d{2}.*)?"
            r"|[A-Za-z]{3,9}\.? \d{1,2},? \d{4}|(19|20)\d{2}[-/](0[1-9]|1[0-2])",
            re.ASCII,
        ),
        "times": re.compile(r"\d{1,3}:[0-5]\d(:[0-5]\d(\.\d+)?)?( ?[AaPp]\.?[Mm]\.?)?", re.ASCII),
        "percentages": re.compile(r"[-+]?\d[\d.,]* ?%", re.ASCII),
        "numbers with a comma": re.compile(
            r"[-+]?\d{1,3}(([,. ' ]\d{3})+([.,]\d+)?|,\d+)", re.ASCII
        ),
        "amounts of money": re.compile(r"[-+]?[$€£¥] ?\d[\d.,]*|\d[\d.,]* ?[$€£¥]", re.ASCII),
        "numbers with a unit": re.compile(
            r"[-+]?\d([\d.,]*\d)? ?(?!(st|nd|rd|th)$)[A-Za-zµμΩ°²³/]{1,10}"
        ),
    }
)


KINDS = ("number", "categories")


@dataclass(frozen=True)
class Numbers:
    """The answer that a column is numeric, with a note for the user or an empty text."""

    note: str = ""


def kind_of(table: TableFrame, name: str, stated: str | None = None) -> Numbers | tuple[str, ...]:
    """Return Numbers, or the categories of a column in sorted order.

    ``stated`` is what a user says that the column is.

    Raises
    ------
    DataError
        If the column is neither, or its cells could be both.
    """
    column = table.frame[name]
    if stated != "categories" and column.dtype.kind in _NUMERIC:
        return Numbers()  # without a look at each cell
    if not table.untyped:
        _refuse_nested(table, name)
    if stated == "number" or (not stated and not table.untyped and _are_decimals(column.dropna())):
        return Numbers()
    cells = texts(table, name)
    if stated == "categories":
        return in_order(cells)
    numbers, gaps = numbers_and_gaps(table, name)
    given = ~gaps
    if column.dtype == "category" or column.dtype.kind == "b" or not given.any():
        return _categories(table, name, cells)
    numeric = given & ~np.isnan(numbers)
    if (numeric == given).all():
        return _number_texts(table, name, cells[given])
    if 2 * numeric.sum() > given.sum():
        raise _odd_cell(table, name, cells, given, numeric)
    return _categories(table, name, cells)


def is_number(table: TableFrame, name: str) -> bool:
    """Return whether every cell of a column is a number or missing, and some cell is a number."""
    column = table.frame[name]
    if column.dtype.kind in _NUMERIC:
        return True
    if not table.untyped:
        return _are_decimals(column.dropna())
    numbers, gaps = numbers_and_gaps(table, name)
    return not gaps.all() and not np.isnan(numbers[~gaps]).any()


def _are_decimals(given: Sequence[object]) -> bool:
    """Return whether cells of any type that are not missing are decimal numbers, all of them."""
    return len(given) > 0 and all(isinstance(cell, Decimal) for cell in given)


def _refuse_nested(table: TableFrame, name: str) -> None:
    """Raise DataError if a cell holds several values, bytes, or a point in time."""
    column = table.frame[name]
    if column.dtype.kind in "mM":
        raise _no_kind(table, name, f"times ({column.dtype})")
    for cell in column:
        if isinstance(cell, bytes | Mapping | list | tuple | set | np.ndarray):
            kind = type(cell).__name__.replace("ndarray", "list")
            raise _no_kind(table, name, f"a {kind} in each cell")


def _number_texts(table: TableFrame, name: str, cells: Values) -> Numbers:
    """Return the answer for texts that are all numbers; raise DataError if they may be codes."""
    if table.untyped:
        return Numbers()
    if padded := [cell for cell in cells if re.match(r"[-+]?0\d", cell.strip())]:
        cure = (
            "give it as categories (.astype('category')) or as numbers (.astype(float))"
            if not table.is_file
            else f"say which: {_stated(name, 'number')} or {_stated(name, 'categories')}"
        )
        raise DataError(
            f"{table.name}: the column {name!r} holds texts of digits with leading zeros "
            f"({padded[0]!r:.40}), numbers or codes: {cure}"
        )
    return Numbers(f"the texts in column {name!r} are all numbers, and are read as numbers")


def _odd_cell(
    table: TableFrame, name: str, cells: Values, given: Values, numeric: Values
) -> DataError:
    """Return the error about the first cell that is no number in a column of numbers."""
    odd = np.flatnonzero(given & ~numeric)
    cell, place = str(cells[odd[0]]), table.place(odd[0])
    ways = "replace such cells, name the column in data.ignore"
    signs = str(list(dict.fromkeys(text.strip() for text in cells[odd])))
    if len(signs) <= _LONGEST:
        ways += f", name them signs of a missing number: data.missing_signs = {signs}"
    if not table.is_file:
        ways = "replace it by a number or NaN"
    return DataError(
        f"{table.name}: all but {len(odd)} of {int(given.sum())} cells of the column {name!r} are "
        f"numbers; {place} holds {cell!r:.80}: {ways}, or {_stated_categories(table, name)}"
    )


def _categories(table: TableFrame, name: str, cells: Values) -> tuple[str, ...]:
    categories = in_order(cells)
    if table.frame[name].dtype != "category" and (problem := _why_no_categories(cells)):
        raise _no_kind(table, name, problem)
    return categories


def _why_no_categories(cells: Values) -> str:
    """Return what the texts of a column are, if they are no categories; else an empty text."""
    given = [cell.strip() for cell in cells if cell.strip()]
    for form, pattern in _FORMS.items():
        if 2 * sum(bool(pattern.fullmatch(cell)) for cell in given) > len(given):
            return f"{form} ({next(filter(pattern.fullmatch, given))!r:.40})"
    if (count := len({*cells})) > MOST_CATEGORIES:
        return f"{count} different texts, more than {MOST_CATEGORIES}, like names or identifiers"
    return ""


def _no_kind(table: TableFrame, name: str, problem: str) -> DataError:
    """Return the error about a column that is neither numbers nor categories, with the ways out."""
    way = "leave it out of the data frame" if not table.is_file else "name it in data.ignore"
    return DataError(
        f"{table.name}: the column {name!r} holds {problem}; {way}, replace it with numbers, or "
        f"{_stated_categories(table, name)}"
    )


def _stated_categories(table: TableFrame, name: str) -> str:
    if not table.is_file:
        return "make it categories (.astype('category'))"
    return f"say that they are categories: {_stated(name, 'categories')}"


def _stated(name: str, kind: str) -> str:
    """Return the setting that says what a column is, in TOML, also if a dot is in its name."""
    if re.fullmatch(r"[\w-]+", name, re.ASCII):
        return f"data.kinds.{name} = {kind!r}"
    return f"data.kinds = {{{json.dumps(name, ensure_ascii=False)} = {kind!r}}}"
