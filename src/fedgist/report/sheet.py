"""A table of texts, independent of its output: terminal, page or file."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sheet:
    """A title, the names of the columns, rows of cells, and a caption.

    The first column names the rows and the second is the main one: both stay visible if there is
    little room. Cells hold unescaped names; the function that shows a sheet escapes them for its
    format.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def filled(self) -> Sheet:
        """Return the table without the columns that hold nothing but dashes."""
        places = [i for i in range(len(self.columns)) if any(row[i] != "-" for row in self.rows)]
        columns = tuple(self.columns[i] for i in places)
        rows = tuple(tuple(row[i] for i in places) for row in self.rows)
        return replace(self, columns=columns, rows=rows)

    def transposed(self) -> Sheet:
        """Return the table with a row for each column; the first column becomes the heading."""
        columns, *rows = zip(self.columns, *self.rows, strict=True)
        return replace(self, columns=columns, rows=tuple(rows))
