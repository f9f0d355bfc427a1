"""A table in words, whoever shows it: a terminal, a page, a file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sheet:
    """A title, the columns' names, rows of cells, and a caption.

    The first column names the rows and the second is the main one: where there is little room,
    these two stay in sight. Cells hold names as they are; whoever shows a sheet makes them
    harmless where they are shown.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
