"""Curves in characters, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedgist.federation.columns import ACCURACY
from fedgist.report.run_files import RunFiles

MARKS = "●○▲△■□◆◇"

MARGIN = 8  # columns left of the chart, for the numbers of the y axis

Curve = Sequence[tuple[float, float]]


def accuracy_chart(runs: Sequence[RunFiles], width: int = 78) -> str:
    """Return the runs' accuracy by round, drawn in characters."""
    curves = {}
    for run in runs:
        name = run.name if run.name not in curves else str(run.folder)
        curves[name] = [(float(r), 100 * v) for r, v in zip(*run.column(ACCURACY), strict=True)]
    return chart(curves, width, x_label="round", y_label="accuracy, mean of clients, %")


def chart(
    curves: Mapping[str, Curve],
    width: int = 78,
    height: int = 14,
    x_label: str = "",
    y_label: str = "",
) -> str:
    """Return curves of (x, y) points, drawn in characters; later curves lie over earlier ones."""
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
    for mark, curve in zip(marks, curves.values(), strict=True):
        for x, y in curve:
            grid[height - 1 - place(y, low, high, height)][place(x, low_x, high_x, columns)] = mark
    labels = {
        height - 1 - place(v, low, high, height): f"{v:.1f}" for v in (low, (low + high) / 2, high)
    }
    lines = [
        f"{labels.get(i, ''):>{MARGIN - 2}} ┤{''.join(row)}".rstrip() for i, row in enumerate(grid)
    ]
    left, right = f"{low_x:g}", f"{high_x:g}"
    axis = f"{left}{x_label:^{max(0, columns - len(left) - len(right))}}{right}"
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(marks, curves, strict=True))
    head = f"{y_label}   {legend}" if y_label else legend
    return "\n".join([head, *lines, " " * (MARGIN - 1) + "└" + "─" * columns, " " * MARGIN + axis])
