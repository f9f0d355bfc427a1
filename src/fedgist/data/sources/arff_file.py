"""Read ARFF files, Weka's table format, with numeric and nominal columns."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from fedgist.data.sources.file_sizes import check_memory, regular
from fedgist.data.sources.splits import Values
from fedgist.errors import DataError, first_line

# an optionally quoted name, then its values; WISDM writes no blank between the two
_ATTRIBUTE = re.compile(
    r"""@attribute\s+("[^"]*"|'[^']*'|[^\s{]+)\s*(\{.*\}|\w+)\s*""", re.IGNORECASE
)
_NUMBERS = ("numeric", "real", "integer")
_MISSING = "?"
_TIMES = 20  # bytes of memory per byte of the file while it is read

Kinds = dict[str, tuple[str, ...] | None]  # values of each column by name; None: numbers


def read_arff(path: Path) -> dict[str, Values]:
    """Return the columns of an ARFF file by name.

    Numeric columns are float64 (rows,), with NaN for the cell ``?``. Other columns are texts
    (rows,) among the values that the file declares, or empty for the cell ``?``.
    """
    check_memory(_TIMES * regular(path).stat().st_size, str(path))
    try:
        head, mark, body = _parts(path.read_text("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text") from error
    if not mark:
        raise DataError(f"{path} has no line @data: it is no ARFF file")
    kinds = _kinds(path, head)
    first = head.count("\n") + 2  # the number of the line after @data
    rows = [
        _row(f"{path}, line {number}", _cells(f"{path}, line {number}", line), kinds)
        for number, line in enumerate(body.split("\n"), first)
        if line.strip() and not line.lstrip().startswith("%")
    ]
    return {
        name: np.array([row[i] for row in rows], dtype=np.float64 if values is None else object)
        for i, (name, values) in enumerate(kinds.items())
    }


def _parts(text: str) -> tuple[str, str, str]:
    data_line = re.search(r"^@data[^\n]*$", text, re.IGNORECASE | re.MULTILINE)
    if data_line is None:
        return text, "", ""
    return text[: data_line.start()], data_line[0], text[data_line.end() :].removeprefix("\n")


def _cells(location: str, line: str) -> list[str]:
    """Return the cells between the commas of a line, without quotes."""
    try:
        cells = next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error as error:
        raise DataError(f"{location}: {first_line(error)}") from error
    return [cell.strip().strip("\"'") for cell in cells]


def _kinds(path: Path, head: str) -> Kinds:
    kinds: Kinds = {}
    for number, line in enumerate(head.split("\n"), 1):
        if not line.lower().lstrip().startswith("@attribute"):
            continue
        attribute = _ATTRIBUTE.fullmatch(line.strip())
        if not attribute or not (attribute[2].lower() in _NUMBERS or attribute[2].startswith("{")):
            raise DataError(
                f"{path}, line {number}: {line.strip()!r:.80}: a column is numeric or has values"
                " in braces"
            )
        name = attribute[1].strip("\"'")
        if name in kinds:
            raise DataError(f"{path}, line {number}: there are two columns {name!r:.80}")
        values = _cells(f"{path}, line {number}", attribute[2].strip("{}"))
        kinds[name] = tuple(values) if attribute[2].startswith("{") else None
    if not kinds:
        raise DataError(f"{path} has no line @attribute: it is no ARFF file")
    return kinds


def _row(location: str, cells: list[str], kinds: Kinds) -> list[float | str]:
    if len(cells) != len(kinds):
        raise DataError(f"{location} has {len(cells)} cells; there are {len(kinds)} columns")
    return [
        _cell(f"{location}: {name}", cell, values)
        for cell, (name, values) in zip(cells, kinds.items(), strict=True)
    ]


def _cell(location: str, cell: str, values: tuple[str, ...] | None) -> float | str:
    if values is not None:
        if cell == _MISSING:
            return ""
        if cell not in values:
            raise DataError(f"{location} is {cell!r:.80}, which is not among its values")
        return cell
    try:
        number = float("nan") if cell == _MISSING else float(cell)
    except ValueError:
        number = float("inf")
    if np.isinf(number) or (cell != _MISSING and np.isnan(number)):
        raise DataError(f"{location} is {cell!r:.80}, not a finite number")
    return number
