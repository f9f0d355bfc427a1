"""Style and output of all figures, with matplotlib (an extra)."""

from __future__ import annotations

import importlib
import io
import re
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgist.errors import ReportError, printable
from fedgist.methods.common.method_looks import INK
from fedgist.report.formatting import csv_text
from fedgist.runs.files import atomic_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# of classes, clients and models; Nelson and others' palette for colour-blind readers, less light
GROUP_COLORS = (
    *("#6650c8", "#44aa99", "#cc6677", "#ddaa33", "#117733", "#66bbdd"),
    *("#aa4499", "#999933", "#aa3377", "#888888", "#a85532", "#6699cc"),
)
# the page replaces these by its own colours
GRID, PAPER = "#dadad9", "#fefefe"
ON_PAGE = {INK: "currentColor", GRID: "var(--grid, #dadad9)", PAPER: "var(--paper, #ffffff)"}
WIDTH, HEIGHT = 4.2, 3.0  # inches: its texts can still be read in a column of 3.3 inches
DOTS = 300  # per inch of a PNG, as journals ask
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedgist",
    "pdf.fonttype": 42,  # TrueType: publishers refuse type 3
    "font.family": "sans-serif",
    "font.size": 9,
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
    "lines.linewidth": 1.6,
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
    _bytes: dict[str, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def csv(self) -> str:
        """Return the numbers of the figure as CSV."""
        return csv_text(self.table)

    def png(self, dots: int = DOTS) -> bytes:
        """Return the figure as a PNG on white, with ``dots`` per inch."""
        return self._saved(f"png of {dots}", "png", dpi=dots, facecolor="white")

    def pdf(self) -> bytes:
        """Return the figure as a PDF that holds its fonts."""
        return self._saved("pdf", "pdf", metadata={"CreationDate": None})

    def svg(self) -> str:
        """Return the figure as SVG in the page's colours; marks of row N have class ``row-N``."""
        text = self.svg_file().decode()
        text = text[text.index("<svg") :]
        for color_here, color_there in ON_PAGE.items():
            text = text.replace(color_here, color_there)
        text = re.sub(r'id="(row-\d+)"', r'class="\1"', text)
        return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", text, count=2)

    def svg_file(self) -> bytes:
        """Return the figure as an SVG for other programs, with colours of its own."""
        return self._saved("svg", "svg", metadata={"Date": None})

    def _saved(self, name: str, form: str, **options: Any) -> bytes:
        """Return the figure's bytes in a format; a page and its folder of figures need the same."""
        if name not in self._bytes:
            self._bytes[name] = _saved(self.figure, form, **options)
        return self._bytes[name]

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
    """Write each figure to a folder as PDF, SVG, PNG and CSV."""
    for picture in pictures:
        atomic_files.write(folder / f"{picture.name}.pdf", picture.pdf())
        atomic_files.write(folder / f"{picture.name}.svg", picture.svg_file())
        atomic_files.write(folder / f"{picture.name}.png", picture.png())
        atomic_files.write(folder / f"{picture.name}.csv", picture.csv())


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a file, in the format of the file's suffix: .pdf, .svg, .png or another."""
    form = path.suffix.removeprefix(".").lower() or "png"
    formats = figure.canvas.get_supported_filetypes()
    if form not in formats:
        raise ReportError(f"{path}: unknown format {form!r}; known: {', '.join(sorted(formats))}")
    atomic_files.write(path, _saved(figure, form, dpi=DOTS, facecolor="white"))


def _saved(figure: Figure, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with matplotlib().rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box replaces the glyph
        if figure.get_layout_engine() is not None:
            figure.draw_without_rendering()  # ticks are known then
            figure.draw_without_rendering()  # and the layout makes room for all
            figure.set_layout_engine("none")  # the same layout for all formats: it takes longest
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


def short(name: object, most: int = 20) -> str:
    """Return a name for a figure: printable, and shortened in the middle to ``most`` characters.

    >>> short("a_rather_long_name_3", 9)
    'a_ra…me_3'
    """
    text = printable(str(name))
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def wrapped(name: object, width: int, most_lines: int = 6) -> str:
    r"""Return a name for a figure: printable, in lines of at most ``width`` characters.

    >>> wrapped("fedlog train.lr=0.001", 14)
    'fedlog\ntrain.lr=0.001'
    """
    text = printable(str(name))
    lines = textwrap.wrap(
        text, width, max_lines=most_lines, placeholder="…", break_on_hyphens=False
    )
    return "\n".join(lines)
