"""What all pictures share.

How they look, and the forms in which they are written. matplotlib, an extra.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.errors import ReportError
from fedgist.federation import atomic_files as files

# Okabe and Ito's colours, which colour-blind readers tell apart, on white and on black
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9467BD", "#7F7F7F")
INK, GRID = "#010101", "#dadad9"  # the page puts its own colours in their place
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedgist",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
Table = list[list[Any]]


@dataclass(frozen=True)
class Picture:
    """A figure, what it shows, and its numbers (the first line names the columns)."""

    name: str
    title: str
    caption: str
    figure: Any
    table: Table

    def csv(self) -> str:
        """Return its numbers."""
        buffer = io.StringIO(newline="")
        csv.writer(buffer, lineterminator="\n").writerows(self.table)
        return buffer.getvalue()

    def png(self) -> bytes:
        """Return it as pixels, on white."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=110, facecolor="white")
        return buffer.getvalue()

    def svg(self) -> str:
        """Return it as a drawing in the page's ink, each row's marks in the class ``row-N``."""
        buffer = io.StringIO()
        with matplotlib().rc_context(STYLE):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        text = (
            text[text.index("<svg") :]
            .replace(INK, "currentColor")
            .replace(GRID, "var(--grid, #dadad9)")
        )
        text = re.sub(r'id="(row-\d+)"', r'class="\1"', text)
        return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", text, count=2)


def matplotlib() -> Any:
    """Import the library, or say how to get it."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        msg = "pictures need matplotlib: pip install 'fedgist[plot]'"
        raise ReportError(msg) from error


def write(pictures: Iterable[Picture], folder: Path) -> None:
    """Write each picture as PNG, SVG and CSV."""
    for picture in pictures:
        for suffix, content in (
            ("png", picture.png()),
            ("svg", picture.svg()),
            ("csv", picture.csv()),
        ):
            files.write(folder / f"{picture.name}.{suffix}", content)


def new_figure(width: float = 6.4, height: float = 3.6, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure and its axes: one, or several side by side that share their y."""
    matplotlib()
    made = importlib.import_module("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    return made, made.subplots(1, columns, sharey=True)


def color(place: int) -> str:
    """Return the colour of a row."""
    return COLORS[place % len(COLORS)]


def dashes(place: int) -> str:
    """Return the line of a row: another one when the colours come round again."""
    return ("-", "--", ":", "-.")[place // len(COLORS) % 4]


def bubbles(axes: Any, counts: Sequence[Sequence[int]], classes: Sequence[str]) -> int:
    """Draw who has what, a bubble's area for its rows; return the rows of the largest."""
    most = max((n for line in counts for n in line), default=1) or 1
    points = [
        (i, c, 220 * n / most) for i, line in enumerate(counts) for c, n in enumerate(line) if n
    ]
    x, y, area = ([point[axis] for point in points] for axis in range(3))
    axes.scatter(x, y, s=area, color=COLORS[0], alpha=0.7, linewidths=0)
    axes.set(xlabel="client", ylabel="class")
    axes.set_yticks(range(len(classes)), classes)
    return most
