"""Tables and lines of words as HTML, for a notebook: names in them are data."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedgist.errors import printable
from fedgist.report.sheet import Sheet


def paragraph(text: str) -> str:
    """Return a line of words as a paragraph."""
    return f"<p>{escape(printable(text))}</p>"


def html_table(sheet: Sheet) -> str:
    """Return a sheet's columns and rows as a table, which scrolls where there is no room."""
    rows = [_row("th", sheet.columns), *(_row("td", cells) for cells in sheet.rows)]
    return f"<div style='overflow-x: auto'><table>{''.join(rows)}</table></div>"


def _row(tag: str, cells: Sequence[str]) -> str:
    opened = f"<{tag} style='text-align: right; padding: 0 0.6em; white-space: nowrap'>"
    return f"<tr>{''.join(f'{opened}{escape(printable(cell))}</{tag}>' for cell in cells)}</tr>"
