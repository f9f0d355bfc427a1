"""Tables and lines of text as HTML for a notebook, with all names escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedgist.errors import printable
from fedgist.report.sheet import Sheet


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
