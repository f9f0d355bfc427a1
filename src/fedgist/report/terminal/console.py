"""Terminal output: lines of text and tables, with all names escaped.

A name may contain anything: brackets that rich would read as markup, or sequences that move the
cursor or rename the window. Here brackets are printed as brackets, and unprintable characters as
escape sequences. No other module creates a console or writes to one. Characters that the output's
encoding lacks are replaced by ASCII.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from fedgist.errors import printable
from fedgist.report.formatting import Sheet

GAP = 2  # columns between two columns of a sheet
NARROW = 24  # smallest width for the rows' names if a sheet does not fit


def console(
    file: IO[str] | None = None,
    *,
    stderr: bool = False,
    width: int | None = None,
    soft_wrap: bool = False,
) -> Console:
    """Return a console that reads no text as markup."""
    return Console(
        file=file,
        stderr=stderr,
        width=width,
        soft_wrap=soft_wrap,
        markup=False,
        emoji=False,
        highlight=False,
    )


def words(text: str, style: str = "") -> Text:
    """Return one line of text with unprintable characters escaped."""
    return Text(printable(text), style)


def paragraph(text: str) -> Text:
    """Return a text of several lines with unprintable characters escaped."""
    return Text("\n".join(map(printable, text.split("\n"))))


def column(template: str, style: str = "none") -> TextColumn:
    """Return a column of a progress display that reads no name as markup."""
    return TextColumn(template, style=style, markup=False)


def say(line: str, *, error: bool = False) -> None:
    """Write one line to standard output or standard error, and flush."""
    stream = sys.stderr if error else sys.stdout
    stream.write(printable(line) + "\n")
    stream.flush()


def blocks_of(sheet: Sheet, room: int) -> tuple[list[list[int]], list[int]]:
    """Return the columns of each block of a sheet that fits in ``room``, and all widths."""
    widths = _fitted(_widths(sheet), room)
    return _blocks(widths, room, sheet.named_by), widths


def _widths(sheet: Sheet) -> list[int]:
    """Return the width that each column needs."""
    lines = [sheet.columns, *sheet.rows]
    return [max(cell_len(printable(line[i])) for line in lines) for i in range(len(sheet.columns))]


def _fitted(widths: Sequence[int], room: int) -> list[int]:
    """Return the widths with the rows' names narrowed first, and no column above its room."""
    first, *rest = widths
    left = room - sum(rest) - GAP * len(rest)
    first = min(first, max(left, min(NARROW, room // 2)))
    return [first, *(min(width, max(1, room - GAP - first)) for width in rest)]


def _blocks(widths: Sequence[int], room: int, named_by: int = 1) -> list[list[int]]:
    """Return the column numbers of each block; every block has the columns that name a row.

    >>> _blocks([5, 5, 5, 5], 20, named_by=2)
    [[0, 1, 2], [0, 1, 3]]
    """
    names = list(range(named_by))
    of_names = sum(widths[:named_by]) + GAP * (named_by - 1)
    blocks, used = [[*names]], of_names
    for number, width in enumerate(widths[named_by:], named_by):
        if used + GAP + width > room and len(blocks[-1]) > named_by:
            blocks.append([*names])
            used = of_names
        blocks[-1].append(number)
        used += GAP + width
    return blocks


@dataclass(frozen=True)
class SheetView:
    """A sheet as a rich renderable that never cuts a header.

    Columns that do not fit are shown in blocks below each other, each with the rows' names. Long
    names are folded.
    """

    sheet: Sheet

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield title, tables and caption."""
        if self.sheet.title:
            yield words(self.sheet.title, "bold")
        blocks, widths = blocks_of(self.sheet, options.max_width)
        for block in blocks:
            yield _table(self.sheet, block, widths)
        if self.sheet.caption:
            yield words(self.sheet.caption, "italic dim")


def _table(sheet: Sheet, block: Sequence[int], widths: Sequence[int]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    numbered = all(row[0].isdigit() for row in sheet.rows)
    for i in block:
        left = sheet.texts[i] and not (numbered and not i)
        table.add_column(
            words(sheet.columns[i]),
            justify="left" if left else "right",
            width=widths[i],
            overflow="fold",
        )
    for number, row in enumerate(sheet.rows):
        styles = ("bold" if (number, i) in sheet.bold else "" for i in block)
        table.add_row(*(words(row[i], style) for i, style in zip(block, styles, strict=True)))
    return table


SIZES = "0*[1-9][0-9]{0,3}"  # from 1 to 9999 columns or lines
HANDLER = "fedgist.plain"
PLAIN = {
    **dict(zip("●○▲△■□◆◇", "ox^v#=%+", strict=True)),
    **dict(zip("▁▂▃▄▅▆▇█", "._-~=+*#", strict=True)),
    **dict(zip("·░▒▓", ".:+*", strict=True)),
    **dict(zip("┤└─━", "|+-=", strict=True)),
    "±": "+-",
    "†": "*",
    "…": "..",
    "ε": "epsilon",
}


def drop_odd_sizes() -> None:
    """Forget a terminal's size in the environment that is no size; schedulers set it to 0."""
    for key in ("COLUMNS", "LINES"):
        if not re.fullmatch(SIZES, os.environ.get(key, "80"), re.ASCII):
            del os.environ[key]


def use_plain_signs() -> None:
    """Make standard output and error replace unencodable characters instead of failing."""
    codecs.register_error(HANDLER, _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # notebooks and tests replace the streams
            stream.reconfigure(errors=HANDLER)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement of unencodable characters, and the position after them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(PLAIN.get(sign, "?") for sign in signs), error.end
