"""Read tables: .csv and .tsv, also packed by gzip, .parquet, .arff and Stata's .dta."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

import numpy as np

from fedgist.data.sources.arff_file import read_arff
from fedgist.data.sources.file_formats import GZIP, PARQUET, expect_format, expect_text
from fedgist.data.sources.file_sizes import (
    check_memory,
    check_packing,
    read_up_to,
    regular,
    usable_memory,
)
from fedgist.data.sources.optional_packages import need
from fedgist.data.sources.splits import Values
from fedgist.data.table_columns import MISSING_SIGNS, TABLE_FORM, TableForm
from fedgist.errors import DataError, first_line, listed

Table = Any  # of pandas or pyarrow, which may not be installed
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_NUMERIC = "iufb"
_MOST_COLUMNS = 100_000
_TIMES_AS_TEXT = 5  # a cell may be one comma in the file, and needs four more bytes as text
_BYTES_OF_A_CELL = 8
_ROWS_AT_ONCE = 4096
_BLOCK, _LARGEST_BLOCK = 1 << 20, 2**31 - 1  # bytes of a table of text that are read at a time
_ROOM = 1 << 20  # bytes for a row of marks
_PACKED = ".gz"
_OTHERS = ";\t|,"  # characters that often separate cells
TABLES = (*_SEPARATORS, ".parquet", ".arff", ".dta")
_NEED = "reading tables needs {}: pip install 'fedgist[table]'"


@dataclass(frozen=True, eq=False)
class TableFrame:
    """A table as a pandas frame.

    If ``untyped``, every cell is text. ``is_file`` says whether it was read from a file; else it is
    a user's data frame. ``signs`` are the texts of missing cells, in lower case. ``notes`` tell the
    user what was left out.
    """

    name: str
    frame: Table
    untyped: bool
    is_file: bool = True
    signs: tuple[str, ...] = MISSING_SIGNS
    notes: tuple[str, ...] = ()

    def take(self, mask: Values) -> TableFrame:
        """Return the rows where ``mask`` (rows,) is true, with their row numbers in the file."""
        return replace(self, frame=self.frame[mask])

    def place(self, position: int) -> str:
        """Return the place of one of the rows in the file, or in the data frame, in words."""
        row = int(self.frame.index[position])
        return f"row {row + 1} below the header" if self.is_file else f"row {row} (counted from 0)"


def ending_of(file: Path) -> str:
    """Return the ending of a file's name in lower case; that of a packed file is the one inside."""
    return Path(file.name.lower().removesuffix(_PACKED)).suffix


def is_table(file: Path) -> bool:
    """Return whether a file's name is that of a table."""
    return ending_of(file) in TABLES


def load_table(file: Path, form: TableForm = TABLE_FORM) -> TableFrame:
    """Read a table; every cell of a .csv or .tsv file, also packed by gzip, is read as text."""
    _pandas()
    ending = ending_of(file)
    if ending not in TABLES:
        raise DataError(f"{file.name} is not a table that can be read; use {', '.join(TABLES)}")
    if form.sep is not None and ending not in _SEPARATORS:
        raise DataError(f"sep = {form.sep!r} is for tables of text; {file.name} has no separators")
    try:
        frame = _READERS[ending](file, form)
    except DataError:
        raise
    except (OSError, EOFError, ValueError, TypeError, LookupError, NotImplementedError) as error:
        cure = "; save it as UTF-8" if "utf" in str(error).lower() else ""
        raise DataError(f"{file.name} cannot be read: {first_line(error)}{cure}") from error
    frame.columns = [str(name) for name in frame.columns]
    if (twice := frame.columns[frame.columns.duplicated()]).size:
        raise DataError(f"{file.name} has two columns named {twice[0]!r}")
    untyped = ending in _SEPARATORS
    return without_row_numbers(TableFrame(file.name, frame, untyped, signs=form.signs))


def cells_without_number(table: TableFrame, name: str) -> Values:
    """Return Booleans (rows,), true where a cell holds neither a number nor a sign of a gap."""
    read, gaps = numbers_and_gaps(table, name)
    return np.isnan(read) & ~gaps


def _pandas() -> Table:
    return need("pandas", _NEED.format("pandas"))


def _pyarrow(module: str) -> Table:
    return need(module, _NEED.format("pyarrow"))


def _parquet(file: Path, _: TableForm) -> Table:
    """Read a few rows at a time, because a kilobyte can hold millions of equal rows."""
    expect_format(file, PARQUET, PARQUET)
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
        whole = _pyarrow("pyarrow").Table.from_batches(batches, schema=opened.schema_arrow)
    return _frame(file, whole)


def _frame(file: Path, arrow: Table) -> Table:
    cells = arrow.num_rows * arrow.num_columns
    check_memory(arrow.nbytes + _BYTES_OF_A_CELL * cells, f"{file.name} with {cells} cells")
    return arrow.replace_schema_metadata(None).to_pandas()


def _text_file(file: Path, form: TableForm) -> Table:
    """Read all cells as text with pyarrow, because pandas silently fills short rows."""
    content = _content(file)
    separator = form.sep or _SEPARATORS[ending_of(file)]
    try:
        rows = _rows(file.name, content, separator, _BLOCK)
    except ValueError as error:
        if "straddling" not in str(error):
            raise
        rows = _rows(file.name, content, separator, _LARGEST_BLOCK)  # a row is larger than a block
    return _frame(file, rows)


def _rows(name: str, content: bytes | bytearray, separator: str, block: int) -> Table:
    """Return the rows of a table of text, read in blocks of bytes.

    pyarrow takes a quoted cell to end with the file. So a row of marks is appended: if it is not
    the last row that is read, it is in such a cell.
    """
    csv = _pyarrow("pyarrow.csv")
    how = {
        "parse_options": csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        "read_options": csv.ReadOptions(block_size=min(block, len(content) + _ROOM)),
    }
    with csv.open_csv(io.BytesIO(content), **how) as reader:
        header = reader.schema.names
    _check_width(name, len(header))
    if header[0].startswith("sep="):
        line = f"{header[0]!r:.20}"
        raise DataError(f"{name}: its first line, {line}, is no header: delete this line")
    as_text = csv.ConvertOptions(column_types=dict.fromkeys(header, _pyarrow("pyarrow").string()))
    mark = "-" if separator != "-" else "."
    end = separator.join([mark] * len(header))
    marked = io.BytesIO(content + f"\n{end}\n".encode())
    read = csv.read_csv(marked, convert_options=as_text, **how)
    last = read.num_rows - 1
    if any(column[last].as_py() != mark for column in read.columns):
        raise DataError(
            f"{name}: a cell of row {last + 1} below the header has no closing quote, so the rest "
            "of the file is in this cell"
        )
    return read.slice(0, last)


def _content(file: Path) -> bytes | bytearray:
    """Return the bytes of a table of text, unpacked."""
    size = regular(file).stat().st_size
    if not file.name.lower().endswith(_PACKED):
        expect_text(file, f"a {ending_of(file)} table")
        check_memory(_TIMES_AS_TEXT * size, file.name)
        return file.read_bytes()
    expect_format(file, "a file packed by gzip", GZIP)
    most = usable_memory() // _TIMES_AS_TEXT
    with gzip.open(file) as stream:
        content = read_up_to(cast("IO[bytes]", stream), most + 1)
    check_packing(size, len(content), file.name, "unpack it by gunzip")
    check_memory(_TIMES_AS_TEXT * len(content), file.name)
    return content


def _arff(file: Path, _: TableForm) -> Table:
    """Read a table of Weka, whose columns are numbers or have values."""
    frame = _pandas().DataFrame(read_arff(file))
    texts_in = [name for name in frame.columns if frame[name].dtype.kind not in _NUMERIC]
    return frame.astype(dict.fromkeys(texts_in, "category"))


def _stata(file: Path, _: TableForm) -> Table:
    """Read a table of Stata; columns with labelled values are categories."""
    check_memory(_TIMES_AS_TEXT * regular(file).stat().st_size, file.name)
    return _pandas().read_stata(file)


_READERS: Mapping[str, Callable[[Path, TableForm], Table]] = MappingProxyType(
    {".csv": _text_file, ".tsv": _text_file, ".parquet": _parquet, ".arff": _arff, ".dta": _stata}
)


def _other_separator(table: TableFrame) -> str:
    """Return the cure if the single column of a table shows that another character separates."""
    header = str(table.frame.columns[0])
    others = [character for character in _OTHERS if character in header]
    if len(table.frame.columns) > 1 or not table.untyped or not others:
        return ""
    return f"; if {others[0]!r} separates its cells, say data.sep = {others[0]!r}"


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
                + _other_separator(table)
            )


def texts(table: TableFrame, name: str) -> Values:
    """Return a column as text (rows,), with empty texts for empty cells."""
    column = table.frame[name]
    if table.untyped:
        return np.array(column.to_numpy(dtype=object))
    return np.array(
        ["" if empty else str(cell) for cell, empty in zip(column, column.isna(), strict=True)],
        dtype=object,
    )


def reals(table: TableFrame, name: str) -> Values:
    """Return a column as float64 (rows,), with NaN for cells that are not numbers, or missing."""
    return numbers_and_gaps(table, name)[0]


def is_missing(table: TableFrame, name: str) -> Values:
    """Return Booleans (rows,), true where a cell is a sign of a missing value."""
    return numbers_and_gaps(table, name)[1]


def numbers_and_gaps(table: TableFrame, name: str) -> tuple[Values, Values]:
    """Return a column as :func:`reals` and :func:`is_missing` do."""
    column = table.frame[name]
    if column.dtype.kind not in _NUMERIC:  # pandas refuses some types of decimal numbers
        column = _pandas().Series(texts(table, name))
    read = _pandas().to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    signs = _pandas().to_numeric(_pandas().Series(table.signs), errors="coerce").dropna()
    gaps = np.isin(read, signs.to_numpy(np.float64))  # such as -9
    none = np.flatnonzero(np.isnan(read))
    if column.dtype.kind in _NUMERIC:
        gaps[none] = True
    else:
        cells = column.to_numpy(dtype=object)[none]
        gaps[none] = [cell.strip().lower() in table.signs for cell in cells]
    return np.where(gaps, np.nan, read), gaps


def filled(table: TableFrame, name: str, role: str, cure: str) -> Values:
    """Return a column of clients or marks as text (rows,); an empty cell is an error."""
    cells = texts(table, name)
    check_filled(table, name, role, np.array([not c.strip() for c in cells], dtype=bool), cure)
    return cells


def check_filled(table: TableFrame, name: str, role: str, absent: Values, cure: str) -> None:
    """Raise DataError that names the first row of a column that is ``absent`` (rows,)."""
    if not absent.any():
        return
    row, cell = int(np.argmax(absent)), str(table.frame[name].iloc[int(np.argmax(absent))])
    held = f" ({cell!r})" if table.untyped and cell.strip() else ""
    raise DataError(
        f"{table.name}: the {role} column {name!r} is empty{held} in {table.place(row)}"
        f"{cure and '; '}{cure}"
    )


def without_row_numbers(table: TableFrame) -> TableFrame:
    """Return a table without the columns that hold only the numbers of its rows, with a note.

    pandas and R write such a column without a name, or pandas as ``Unnamed: 0`` or
    ``__index_level_0__``.
    """
    frame = table.frame
    numbered = [name for name in frame.columns if _counts_rows(table, str(name))]
    if not numbered:
        return table
    note = f"columns that are left out because they number the rows: {listed(map(repr, numbered))}"
    return replace(table, frame=frame.drop(columns=numbered), notes=(*table.notes, note))


def _counts_rows(table: TableFrame, name: str) -> bool:
    """Return whether a column without a name holds a different whole number in each row."""
    if name.startswith("__index_level_"):
        return True
    if name.strip() and not name.startswith("Unnamed: "):
        return False
    numbers = reals(table, name)
    whole = np.isfinite(numbers).all() and bool((numbers == np.round(numbers)).all())
    return bool(whole and len(numbers) > 1 and len(np.unique(numbers)) == len(numbers))
