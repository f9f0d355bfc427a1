"""A table of texts, independent of its output: terminal, page or file."""

from __future__ import annotations

from dataclasses import dataclass


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
