"""Draw curves with characters, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedgist.errors import printable
from fedgist.report.pictures.curves import RunLines, curve
from fedgist.runs.files.columns import is_of_clients

MARKS = "●○▲△■□◆◇"

MARGIN = 8  # columns left of the chart, for the numbers of the y axis

ChartCurve = Sequence[tuple[float, float]]


def chart_of(lines: RunLines, width: int = 78) -> str:
    """Return a chart in characters of the mean over seeds by round, with one curve per row."""
    in_percent = lines.measure.unit == "fraction"
    curves: dict[str, ChartCurve] = {}
    for label, runs in lines.rows:
        if values := curve(runs, lines.metric):
            points = zip(values.rounds, values.mean, strict=True)
            curves[label] = [(float(r), (100 if in_percent else 1) * v) for r, v in points]
    whose = "mean of clients" if is_of_clients(lines.metric) else "of the server's models"
    y_label = f"{lines.measure.title.lower()}, {whose}{', %' if in_percent else ''}"
    return chart(curves, width, x_label="round", y_label=y_label)


def chart(
    curves: Mapping[str, ChartCurve],
    width: int = 78,
    height: int = 14,
    x_label: str = "",
    y_label: str = "",
) -> str:
    """Return a chart of curves of (x, y) points; later curves cover earlier ones."""
    points = [p for curve in curves.values() for p in curve]
    if not points:
        return ""
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    columns = max(10, width - MARGIN - 1)
    grid = [[" "] * columns for _ in range(height)]

    def place(value: float, start: float, end: float, cells: int) -> int:
        return round((value - start) / (end - start) * (cells - 1)) if end > start else 0

    marks = [MARKS[i % len(MARKS)] for i in range(len(curves))]
    for mark, line in zip(marks, curves.values(), strict=True):
        for x, y in line:
            grid[height - 1 - place(y, low, high, height)][place(x, low_x, high_x, columns)] = mark
    labels = {
        height - 1 - place(v, low, high, height): f"{v:.1f}" for v in (low, (low + high) / 2, high)
    }
    lines = [
        f"{labels.get(i, ''):>{MARGIN - 2}} ┤{''.join(row)}".rstrip() for i, row in enumerate(grid)
    ]
    left, right = f"{low_x:g}", f"{high_x:g}"
    axis = f"{left}{x_label:^{max(0, columns - len(left) - len(right))}}{right}"
    legend = "   ".join(
        f"{mark} {printable(name)}" for mark, name in zip(marks, curves, strict=True)
    )
    head = f"{y_label}   {legend}" if y_label else legend
    return "\n".join([head, *lines, " " * (MARGIN - 1) + "└" + "─" * columns, " " * MARGIN + axis])
