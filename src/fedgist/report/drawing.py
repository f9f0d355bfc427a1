"""Style and output of all figures, with matplotlib (an extra)."""

from __future__ import annotations

import importlib
import io
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgist.errors import ReportError, printable
from fedgist.report.formatting import csv_text
from fedgist.runs import atomic_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours: colour-blind readers can distinguish them on white and on black
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#9467BD", "#7F7F7F")
# the page replaces these by its own colours
INK, GRID, PAPER = "#010101", "#dadad9", "#fefefe"
ON_PAGE = {INK: "currentColor", GRID: "var(--grid, #dadad9)", PAPER: "var(--paper, #ffffff)"}
WIDTH, HEIGHT = 5.0, 3.3  # inches: about the width of a phone
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedgist",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.parse_math": False,  # names may contain dollar signs
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

FigureTable = list[list[Any]]


@dataclass(frozen=True)
class Picture:
    """A figure with title, caption and a table of its numbers (its first row names the columns)."""

    name: str
    title: str
    caption: str
    figure: Figure
    table: FigureTable

    def csv(self) -> str:
        """Return the numbers of the figure as CSV."""
        return csv_text(self.table)

    def png(self) -> bytes:
        """Return the figure as a PNG on white."""
        return _saved(self.figure, "png", dpi=160, facecolor="white")

    def svg(self) -> str:
        """Return the figure as SVG in the page's colours; marks of row N have class ``row-N``."""
        text = _saved(self.figure, "svg", dpi=160, metadata={"Date": None}).decode()
        text = text[text.index("<svg") :]
        for color_here, color_there in ON_PAGE.items():
            text = text.replace(color_here, color_there)
        text = re.sub(r'id="(row-\d+)"', r'class="\1"', text)
        return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", text, count=2)

    @property
    def points(self) -> int:
        """Width of the figure in points."""
        inches: float = self.figure.get_figwidth()
        return round(72 * inches)


def matplotlib() -> Any:
    """Return matplotlib; if it is missing, the ReportError says how to install it."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ReportError("pictures need matplotlib: pip install 'fedgist[plot]'") from error


def write(pictures: Iterable[Picture], folder: Path) -> None:
    """Write each figure to a folder as PNG, SVG and CSV."""
    for picture in pictures:
        atomic_files.write(folder / f"{picture.name}.png", picture.png())
        atomic_files.write(folder / f"{picture.name}.svg", picture.svg())
        atomic_files.write(folder / f"{picture.name}.csv", picture.csv())


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure to a file, in the format of the file's suffix."""
    form = path.suffix.removeprefix(".").lower() or "png"
    formats = figure.canvas.get_supported_filetypes()
    if form not in formats:
        raise ReportError(f"{path}: unknown format {form!r}; known: {', '.join(sorted(formats))}")
    atomic_files.write(path, _saved(figure, form, dpi=150, facecolor="white"))


def _saved(figure: Figure, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with matplotlib().rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box replaces the glyph
        figure.savefig(buffer, format=form, **options)
    return buffer.getvalue()


def new_figure(
    width: float = WIDTH,
    height: float = HEIGHT,
    *,
    rows: int = 1,
    columns: int = 1,
    shared: bool = True,
) -> tuple[Figure, Any]:
    """Return a figure and its axes: a single one, or a grid whose axes may share x and y."""
    matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    sharey, sharex = shared and columns > 1, shared and rows > 1
    return figure, figure.subplots(rows, columns, sharey=sharey, sharex=sharex)


def color(number: int) -> str:
    """Return the colour of row ``number``."""
    return COLORS[number % len(COLORS)]


def dashes(number: int) -> str:
    """Return the line style of row ``number``; it changes when the colours repeat."""
    return ("-", "--", ":", "-.")[number // len(COLORS) % 4]


def short(name: object, most: int = 20) -> str:
    """Return a name for a figure: printable, and shortened in the middle to ``most`` characters.

    >>> short("a_rather_long_name_3", 9)
    'a_ra…me_3'
    """
    text = printable(str(name))
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
