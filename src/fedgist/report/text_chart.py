"""A curve in characters, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MARKS = "●○▲△■□◆◇"

Points = Sequence[tuple[float, float]]


def chart(
    curves: Mapping[str, Points],
    width: int = 78,
    height: int = 14,
    x_label: str = "",
    y_label: str = "",
) -> str:
    """Draw curves of (x, y) points; later curves lie over earlier ones."""
    points = [p for curve in curves.values() for p in curve]
    if not points:
        return ""
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = 8
    columns = max(10, width - margin - 1)
    grid = [[" "] * columns for _ in range(height)]

    def place(value: float, start: float, end: float, cells: int) -> int:
        return round((value - start) / (end - start) * (cells - 1)) if end > start else 0

    for mark, curve in zip(_endless(MARKS, len(curves)), curves.values(), strict=True):
        for x, y in curve:
            grid[height - 1 - place(y, low, high, height)][place(x, low_x, high_x, columns)] = mark
    labels = {
        height - 1 - place(v, low, high, height): f"{v:.1f}" for v in (low, (low + high) / 2, high)
    }
    lines = [
        f"{labels.get(i, ''):>{margin - 2}} ┤{''.join(row)}".rstrip() for i, row in enumerate(grid)
    ]
    left, right = f"{low_x:g}", f"{high_x:g}"
    axis = f"{left}{x_label:^{max(0, columns - len(left) - len(right))}}{right}"
    legend = "   ".join(
        f"{mark} {name}" for mark, name in zip(_endless(MARKS, len(curves)), curves, strict=True)
    )
    head = f"{y_label}   {legend}" if y_label else legend
    return "\n".join([head, *lines, " " * (margin - 1) + "└" + "─" * columns, " " * margin + axis])


def _endless(marks: str, count: int) -> list[str]:
    return [marks[i % len(marks)] for i in range(count)]
