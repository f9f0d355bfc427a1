"""Rounds as a table of HTML, for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedgist.cli.progress import main_column
from fedgist.errors import printable
from fedgist.federation.columns import DOWN_BYTES, TRAIN_LOSS, UP_BYTES, spread_of
from fedgist.federation.record import Line
from fedgist.federation.server_side import ServerSide
from fedgist.report.formatting import duration, percent, size


def table_of_rounds(side: ServerSide, lines: Sequence[Line], most: int) -> str:
    """Return at most ``most`` rounds, evenly spread, the last among them, as an HTML table."""
    column, score = main_column(side)
    heads = ("round", score, "spread", "train loss", "sent up", "sent down", "time")
    count, shown = len(lines), min(len(lines), most)
    places = sorted({round(k * (count - 1) / max(1, shown - 1)) for k in range(shown)})
    body = [_cells(lines[place], column) for place in places]
    rows = [_row("th", heads), *(_row("td", cells) for cells in body)]
    return f"<table>{''.join(rows)}</table>"


def paragraph(text: str) -> str:
    """Return a line of text as a paragraph of HTML; names in it are data."""
    return f"<p>{escape(printable(text))}</p>"


def _cells(line: Line, column: str) -> tuple[str, ...]:
    loss = line.get(TRAIN_LOSS)
    return (
        str(line["round"]),
        percent(line.get(column)),
        percent(line.get(spread_of(column) or "")),
        "-" if loss is None else f"{loss:.4f}",
        size(line[UP_BYTES]),
        size(line[DOWN_BYTES]),
        duration(line["time/round_s"]),
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    inner = "".join(f"<{tag} style='text-align: right'>{escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"
