"""Read .csv, .tsv and .parquet files; invalid cells are errors, never guessed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.data.sources.file_formats import PARQUET, expect_format, expect_text
from fedgist.data.sources.file_sizes import check_memory, check_packing, regular
from fedgist.data.sources.labelled_rows import Values
from fedgist.data.sources.optional_packages import need
from fedgist.errors import DataError, first_line, listed

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_MOST_COLUMNS = 100_000
_TIMES_AS_TEXT = 5  # a cell may be one comma in the file, and needs four more bytes as text
_BYTES_OF_A_CELL = 8
_ROWS_AT_ONCE = 4096
TABLES = (*_SEPARATORS, ".parquet")
_NEED = "reading tables needs {}: pip install 'fedgist[table]'"
_NO_NUMBER = ("", "na", "n/a", "nan", "null", "none", "?")  # missing numbers in text files


@dataclass(frozen=True, eq=False)
class TableFrame:
    """A table as a pandas frame.

    If ``untyped``, every cell is text, and a column is numeric if all its cells are numbers.
    ``is_file`` says whether it was read from a file; else it is a user's data frame. ``left_out``
    is the number of rows that were left out because they have no label.
    """

    name: str
    frame: Any
    untyped: bool
    is_file: bool = True
    left_out: int = 0

    def take(self, mask: Values) -> TableFrame:
        """Return the rows where ``mask`` (rows,) is true, with their row numbers in the file."""
        return replace(self, frame=self.frame[mask])


def load_table(file: Path) -> TableFrame:
    """Read a table; every cell of a .csv or .tsv file is read as text."""
    _pandas()
    ending = file.suffix.lower()
    if ending not in TABLES:
        raise DataError(f"{file.name} is not a table that can be read; use {', '.join(TABLES)}")
    try:
        times = _TIMES_AS_TEXT if ending in _SEPARATORS else 1
        check_memory(times * regular(file).stat().st_size, file.name)
        _check_format(file, ending)
        arrow = _parquet(file) if ending == ".parquet" else _text_file(file, _SEPARATORS[ending])
        cells = arrow.num_rows * arrow.num_columns
        check_memory(arrow.nbytes + _BYTES_OF_A_CELL * cells, f"{file.name} with {cells} cells")
        frame = arrow.replace_schema_metadata(None).to_pandas()
    except DataError:
        raise
    except (OSError, ValueError, TypeError, LookupError, NotImplementedError) as error:
        raise DataError(f"{file.name} cannot be read: {first_line(error)}") from error
    if (twice := frame.columns[frame.columns.duplicated()]).size:
        raise DataError(f"{file.name} has two columns named {twice[0]!r}")
    # pandas writes its row numbers as columns with this name
    row_numbers = [name for name in frame.columns if name.startswith("__index_level_")]
    return TableFrame(file.name, frame.drop(columns=row_numbers), untyped=ending != ".parquet")


def _check_format(file: Path, ending: str) -> None:
    """Raise DataError if the content has the structure of another format than the name says."""
    if ending == ".parquet":
        expect_format(file, PARQUET, PARQUET)
    else:
        expect_text(file, f"a {ending} table")


def _pandas() -> Any:
    return need("pandas", _NEED.format("pandas"))


def _pyarrow(module: str) -> Any:
    return need(module, _NEED.format("pyarrow"))


def _parquet(file: Path) -> Any:
    """Read a few rows at a time, because a kilobyte can hold millions of equal rows."""
    with _pyarrow("pyarrow.parquet").ParquetFile(file) as opened:
        held = opened.metadata
        _check_width(file.name, held.num_columns)
        groups = [held.row_group(group) for group in range(held.num_row_groups)]
        values = sum(g.column(i).num_values for g in groups for i in range(held.num_columns))
        rows = f"{file.name} with its {held.num_rows} rows of {held.num_columns} columns"
        check_memory(_BYTES_OF_A_CELL * values, rows)
        check_packing(file.stat().st_size, _BYTES_OF_A_CELL * values, rows, "use a .csv file")
        batches, size = [], 0
        for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE):
            size += batch.nbytes
            check_memory(size, rows)
            batches.append(batch)
        return _pyarrow("pyarrow").Table.from_batches(batches, schema=opened.schema_arrow)


def _text_file(file: Path, separator: str) -> Any:
    """Read all cells as text with pyarrow, because pandas silently fills short rows."""
    csv = _pyarrow("pyarrow.csv")
    parse = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    with csv.open_csv(file, parse_options=parse) as reader:
        header = reader.schema.names
    _check_width(file.name, len(header))
    as_text = csv.ConvertOptions(column_types=dict.fromkeys(header, _pyarrow("pyarrow").string()))
    return csv.read_csv(file, parse_options=parse, convert_options=as_text)


def _check_width(name: str, columns: int) -> None:
    if columns > _MOST_COLUMNS:
        raise DataError(
            f"{name} has {columns} columns, more than {_MOST_COLUMNS}; use an .npz file"
        )


def expect(table: TableFrame, columns: list[str]) -> None:
    """Raise DataError that lists the columns if the table lacks one of ``columns``."""
    for name in columns:
        if name not in table.frame.columns:
            raise DataError(
                f"{table.name} has no column {name!r}; it has {listed(table.frame.columns)}"
            )


def texts(table: TableFrame, name: str) -> Values:
    """Return a column as text (rows,), with empty texts for empty cells."""
    column = table.frame[name]
    return np.array(
        ["" if empty else str(cell) for cell, empty in zip(column, column.isna(), strict=True)],
        dtype=object,
    )


def reals(table: TableFrame, name: str) -> Values:
    """Return a column as float64 (rows,), with NaN for cells that are not numbers."""
    column = _pandas().to_numeric(table.frame[name], errors="coerce")
    return np.array(column.to_numpy(np.float64, na_value=np.nan))


def is_missing(table: TableFrame, name: str) -> Values:
    """Return Booleans (rows,), true where a cell marks a missing number."""
    cells = texts(table, name)
    return np.array([cell.strip().lower() in _NO_NUMBER for cell in cells], dtype=bool)


def filled(table: TableFrame, name: str, role: str, *, numbered: bool = False) -> Values:
    """Return a column of labels or clients as text (rows,); empty cells are errors."""
    cells = texts(table, name)
    empty = _NO_NUMBER if numbered else ("",)
    for row, cell in zip(table.frame.index, cells, strict=True):
        if cell.strip().lower() in empty:
            raise DataError(
                f"{table.name}: the {role} column {name!r} is empty in row {row + 1} below the "
                "header"
            )
    return cells


def is_number(table: TableFrame, name: str) -> bool:
    """Return whether a column is numeric.

    The column's type decides. In an untyped table, every cell must be a number or mark a missing
    one.
    """
    column = table.frame[name]
    if column.dtype.kind in "iuf":
        return True
    if not table.untyped:
        return False
    given = [cell for cell in column if cell.strip().lower() not in _NO_NUMBER]
    return bool(given) and not np.isnan(_pandas().to_numeric(given, errors="coerce")).any()
