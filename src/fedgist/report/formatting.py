"""Text for readers: numbers with units, tables of texts (sheets), and escapes for each format.

Names come from users' files and may contain anything. In LaTeX, Markdown, HTML and CSV special
characters are escaped, and unprintable characters become escape sequences.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from fedgist.core.objectives.metrics import Metric
from fedgist.errors import printable
from fedgist.runs.files.columns import COMPLETE, EXPECTED
from fedgist.runs.files.record import Line

MINUTE = 60  # seconds in a minute, and minutes in an hour
UNITS = ("B", "kB", "MB", "GB", "TB")


def percent(value: float | None, digits: int = 2) -> str:
    """Return a fraction as percent; an unknown one as a dash."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.{digits}f} %"


def score_text(value: float | None, measure: Metric) -> str:
    """Return a score with its unit; an unknown one as a dash."""
    return percent(None) if value is None or math.isnan(value) else measure.text(value)


def replies(line: Line) -> str:
    """Return how many clients of a round replied; an empty text if all did, or it is not known.

    >>> replies({"clients/expected": 20, "clients/complete": 7})
    '7 of 20 replied'
    """
    orders = line.get(EXPECTED)
    answered = line.get(COMPLETE)
    if orders is None or answered is None or answered == orders:
        return ""
    return f"{answered:g} of {orders:g} replied"


def seconds_left(rounds: Sequence[float], left: int) -> float | None:
    """Return the seconds that ``left`` rounds take at the pace of the last ten rounds."""
    recent = rounds[-10:]
    return left * sum(recent) / len(recent) if recent else None


def printed(numbers: Iterable[float]) -> str:
    """Return a mean and, if given, its standard error, with two digits as in papers."""
    return " ± ".join(f"{number:.2f}" for number in numbers)


def bytes_text(count: float) -> str:
    """Return a number of bytes with a decimal unit (powers of 1000)."""
    power = min(int(math.log10(count) // 3), len(UNITS) - 1) if count >= 1 else 0
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {UNITS[power]}"


def bits_text(count: float) -> str:
    """Return a number of bits with a decimal unit, as in papers."""
    return bytes_text(count).removesuffix("B") + "b"


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), MINUTE)
    hours = minutes // MINUTE
    return f"{hours} h {minutes % MINUTE:02d} min" if hours else f"{minutes} min {rest:02d} s"


NONE = "-"  # the text of an empty cell
AMOUNT = r"[\[{(]?[+-]?\d"  # how numbers, their intervals and amounts with units begin


@dataclass(frozen=True)
class Sheet:
    """A title, the names of the columns, rows of cells, and a caption.

    The first column names the rows and the second is the main one: both stay visible if there is
    little room. So do the first ``named_by`` columns, if only these together name a row. Cells hold
    unescaped names; the function that shows a sheet escapes them for its format. ``bold`` are the
    places (row, column) of the best values.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    named_by: int = 1
    bold: frozenset[tuple[int, int]] = frozenset()

    @property
    def texts(self) -> list[bool]:
        """Which columns hold texts: the first, and each in which most cells have no number."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        shown = [[cell for cell in column if cell != NONE] for column in columns]
        numbers = [sum(bool(re.match(AMOUNT, cell)) for cell in column) for column in shown]
        return [
            not place or 2 * count < len(column)
            for place, (count, column) in enumerate(zip(numbers, shown, strict=True))
        ]

    def filled(self) -> Sheet:
        """Return the table without the columns that hold nothing but dashes."""
        places = [i for i in range(len(self.columns)) if any(row[i] != NONE for row in self.rows)]
        columns = tuple(self.columns[i] for i in places)
        rows = tuple(tuple(row[i] for i in places) for row in self.rows)
        bold = frozenset((r, places.index(i)) for r, i in self.bold if i in places)
        return replace(self, columns=columns, rows=rows, bold=bold)

    def transposed(self) -> Sheet:
        """Return the table with a row for each column; the first column becomes the heading."""
        columns, *rows = zip(self.columns, *self.rows, strict=True)
        return replace(self, columns=columns, rows=tuple(rows))


NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
VALUE = re.compile(rf"({NUMBER})(?: ± ({NUMBER}))?( %)?")
INTERVAL = re.compile(rf"\[{NUMBER}, {NUMBER}\]")
TEX_PLUS_MINUS = r"\pm"
TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": f"${TEX_PLUS_MINUS}$",
    "†": r"$\dagger$",
    "<": "$<$",
    ">": "$>$",
    "|": r"\textbar{}",
    "[": "{[}",  # at the start of a line, tabular would read it as an option
    "]": "{]}",
    "*": "{*}",
}
TEX |= {sign: f"\\{sign}" for sign in "%&_#${}"}
# code, emphasis, columns, math; strikethrough, tags, links, entities: each only if it has an effect
MARKDOWN = re.compile(r"[\\`*|$]|(?<!\w)_|_(?!\w)|~(?=~)|<(?=[\w/!?])|\](?=[(\[:])|&(?=#?\w+;)")
FORMULA = tuple("=+-@\t\r")  # first characters of a cell that a spreadsheet evaluates


def latex_text(text: str) -> str:
    r"""Return a text escaped for LaTeX; numbers and intervals are set in math mode.

    >>> print(latex_text("-19.08 ± 1.57"), latex_text("[-25.75, -21.66]"), latex_text("a_b"))
    $-19.08 \pm 1.57$ $[-25.75, -21.66]$ a\_b
    """
    if INTERVAL.fullmatch(text) or VALUE.fullmatch(text):
        powers = re.sub(r"e\+?(-?)0*(\d+)", r" \\times 10^{\1\2}", text.removesuffix(" %"))
        unit = r" \%" if text.endswith(" %") else ""
        return f"${powers.replace('±', TEX_PLUS_MINUS)}${unit}"
    escaped = "".join(TEX.get(sign, sign) for sign in printable(text))
    return re.sub("-(?=-)", "-{}", escaped)  # two hyphens do not become a dash


def markdown_text(text: str) -> str:
    r"""Return a text escaped for Markdown: no markup, HTML or new columns.

    >>> print(markdown_text("a|b <i>*c*</i> lg_fedavg"))
    a\|b \<i>\*c\*\</i> lg_fedavg
    """
    return MARKDOWN.sub(r"\\\g<0>", printable(text))


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV; texts that a spreadsheet would evaluate get a leading apostrophe.

    >>> print(csv_text([["name", "value"], ["=1+1", -2.5]]), end="")
    name,value
    '=1+1,-2.5
    """
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([[_harmless(cell) for cell in row] for row in rows])
    return buffer.getvalue()


def _harmless(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    computed = cell.startswith(FORMULA) and not re.fullmatch(NUMBER, cell) and len(cell) > 1
    return printable(f"'{cell}" if computed else cell)


def paragraph(text: str) -> str:
    """Return a line of text as an HTML paragraph."""
    return f"<p>{escape(printable(text))}</p>"


def html_table(sheet: Sheet) -> str:
    """Return a sheet as an HTML table that scrolls if it is too wide."""
    rows = [_row("th", sheet.columns), *(_row("td", cells) for cells in sheet.rows)]
    return f"<div style='overflow-x: auto'><table>{''.join(rows)}</table></div>"


def _row(tag: str, cells: Sequence[str]) -> str:
    opened = f"<{tag} style='text-align: right; padding: 0 0.6em; white-space: nowrap'>"
    return f"<tr>{''.join(f'{opened}{escape(printable(cell))}</{tag}>' for cell in cells)}</tr>"
