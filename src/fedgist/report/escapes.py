"""Escape text for files of other formats: LaTeX, Markdown and CSV.

Names come from users' files and may contain anything. Here special characters of the target format
are escaped, and unprintable characters become escape sequences.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from fedgist.errors import printable

NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
VALUE = re.compile(rf"({NUMBER})(?: ± ({NUMBER}))?")
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
        powers = re.sub(r"e\+?(-?)0*(\d+)", r" \\times 10^{\1\2}", text)
        return f"${powers.replace('±', TEX_PLUS_MINUS)}$"
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
