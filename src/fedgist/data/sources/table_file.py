"""Reads .csv, .tsv and .parquet files, without guessing where a cell is wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.data.sources.assembly import Values
from fedgist.data.sources.locations import first_line, need
from fedgist.errors import DataError

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (*_SEPARATORS, ".parquet")
_NEED = "reading tables needs pandas: pip install 'fedgist[table]'"
_EMPTY = (
    "",
    "na",
    "n/a",
    "nan",
    "null",
    "none",
    "?",
)  # how CSV files write a number that is not there


@dataclass(frozen=True, eq=False)
class Table:
    """A table; of untyped text (CSV), columns that hold only numbers are numbers."""

    name: str
    frame: Any
    untyped: bool

    def take(self, mask: Values) -> Table:
        """Return the rows where ``mask`` is true; each keeps its number."""
        return replace(self, frame=self.frame[mask])


def load_table(file: Path) -> Table:
    """Read a table, every cell of a .csv or .tsv file as text."""
    need("pandas", _NEED)
    kind = file.suffix.lower()
    if kind not in TABLES:
        msg = f"{file.name} is no table that can be read; .csv, .tsv and .parquet can"
        raise DataError(msg)
    try:
        found = _parquet(file) if kind == ".parquet" else _text_file(file, _SEPARATORS[kind])
        frame = found.replace_schema_metadata(None).to_pandas()
    except (OSError, ValueError, LookupError, NotImplementedError) as error:
        msg = f"{file.name} cannot be read: {first_line(error)}"
        raise DataError(msg) from error
    if (twice := frame.columns[frame.columns.duplicated()]).size:
        msg = f"{file.name} has two columns named {twice[0]!r}"
        raise DataError(msg)
    nameless = [
        name for name in frame.columns if name.startswith("__index_level_")
    ]  # the row numbers of pandas
    return Table(file.name, frame.drop(columns=nameless), kind != ".parquet")


def _parquet(file: Path) -> Any:
    return need("pyarrow.parquet", _NEED.replace("pandas", "pyarrow")).read_table(
        file, partitioning=None
    )


def _text_file(file: Path, separator: str) -> Any:
    """Read all cells as text. pyarrow, because pandas fills short rows without a word."""
    csv = need("pyarrow.csv", _NEED.replace("pandas", "pyarrow"))
    parse = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    with csv.open_csv(file, parse_options=parse) as reader:
        header = reader.schema.names
    text = csv.ConvertOptions(column_types=dict.fromkeys(header, need("pyarrow", _NEED).string()))
    return csv.read_csv(file, parse_options=parse, convert_options=text)


def expect(found: Table, columns: list[str]) -> None:
    """Fail with the choices if the table lacks a column."""
    for name in columns:
        if name not in found.frame.columns:
            msg = (
                f"{found.name} has no column {name!r}; it has "
                f"{', '.join(map(str, found.frame.columns))}"
            )
            raise DataError(msg)


def texts(found: Table, name: str) -> Values:
    """Return a column as text, an empty cell as the empty text."""
    column = found.frame[name]
    return np.array(
        ["" if gone else str(cell) for cell, gone in zip(column, column.isna(), strict=True)],
        dtype=object,
    )


def reals(found: Table, name: str) -> Values:
    """Return a column as numbers, NaN where a cell holds none."""
    pandas = need("pandas", _NEED)
    column = pandas.to_numeric(found.frame[name], errors="coerce")
    return np.array(column.to_numpy(np.float64, na_value=np.nan))


def filled(found: Table, name: str, role: str, *, numbered: bool = False) -> Values:
    """Return the column of labels or clients as text, every row of which must say something."""
    cells = texts(found, name)
    for row, cell in zip(found.frame.index, cells, strict=True):
        if cell.strip().lower() in (_EMPTY if numbered else _EMPTY[:1]):
            msg = (
                f"{found.name}: the {role} column {name!r} is empty in row {row + 1} below the "
                "header"
            )
            raise DataError(msg)
    return cells


def is_number(found: Table, name: str) -> bool:
    """Tell whether a column holds numbers.

    By its type, or in untyped text because every filled cell is one.
    """
    column = found.frame[name]
    if column.dtype.kind in "iuf":
        return True
    if not found.untyped:
        return False
    given = [cell for cell in column if cell.strip().lower() not in _EMPTY]
    return (
        bool(given) and not np.isnan(need("pandas", _NEED).to_numeric(given, errors="coerce")).any()
    )
