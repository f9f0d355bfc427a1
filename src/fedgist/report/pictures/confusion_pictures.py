"""Figures of confusion matrices: which classes the models of a row take for which."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fedgist.report.pictures.drawing import (
    ON_PAGE,
    FigureTable,
    Picture,
    new_figure,
    short,
    wrapped,
)
from fedgist.report.pictures.plot_elements import SHADES_OF_BARS
from fedgist.report.pictures.row_styles import mixed
from fedgist.report.tables.comparison import Row, Study
from fedgist.report.tables.mean_counts import sentence
from fedgist.runs.files.columns import CONFUSION, over_clients
from fedgist.runs.files.record import Line
from fedgist.runs.finished.finished_run import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap

COLUMN = over_clients("client", CONFUSION, statistic="")
MOST_CLASSES = 30  # with more, no cell of a figure can be told from the next
MOST_NUMBERED = 12  # with more classes, cells hold no numbers
MOST_CONFUSION_ROWS = 6  # number of rows with a figure
BLACK = "#111111"  # of numbers on light cells, on a dark page as well
BRIGHT = 0.35  # luminance of a cell from which its number is black
DARKEST = -0.3  # a share of 1 is a bit darker than the colour of the row
CELL = 0.27  # inches
SHADE = SHADES_OF_BARS[0]  # the same for all rows, so that their shades can be compared


def of_confusions(study: Study) -> Iterator[Picture]:
    """Yield a figure for each row whose runs hold counts (true class, predicted class)."""
    for number, row in enumerate(study.rows[:MOST_CONFUSION_ROWS], 1):
        matrices = [matrix for run in row.runs if (matrix := last_confusion(run)) is not None]
        same = len({matrix.shape for matrix in matrices}) == 1
        if same and len(matrices[0]) <= MOST_CLASSES:
            yield _picture(number, row, sum(matrices[1:], matrices[0]), len(matrices))


def last_confusion(run: FinishedRun) -> np.ndarray | None:
    """Return the last counts (true class, predicted class) of a run, over all clients."""
    columns = [line[COLUMN] for line in run.rounds if line.get(COLUMN) and _counts(run, line)]
    try:
        counts = np.array(columns[-1], dtype=np.int64) if columns else np.zeros(0)
    except (ValueError, TypeError, OverflowError):
        return None
    square = counts.ndim == len(("true", "predicted")) and counts.shape[0] == counts.shape[1]
    return counts if square and counts.min() >= 0 and counts.sum() else None


def _counts(run: FinishedRun, line: Line) -> bool:
    """Return whether a line is of the round that a run keeps."""
    return run.kept is None or line["round"] == run.kept


def _picture(number: int, row: Row, counts: np.ndarray, runs: int) -> Picture:
    split = row.runs[0].split
    classes = split["classes"] if split else []
    names = [str(k) for k in (classes if len(classes) == len(counts) else range(len(counts)))]
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    size = CELL * len(names)
    figure, axes = new_figure(max(2.4, size + 1.2), max(2.2, size + 1.0))
    _draw_cells(axes, counts, shares, mixed(SHADE, DARKEST))
    labels, places = [short(name, 12) for name in names], [i + 0.5 for i in range(len(names))]
    axes.set_xticks(places, labels, rotation=90)
    axes.set_yticks(places, labels)
    axes.set(xlabel="predicted", ylabel="true", aspect="equal")
    axes.set_title(wrapped(row.label, 10 + 2 * len(names)), fontsize="medium")
    axes.grid(visible=False)
    axes.invert_yaxis()
    table: FigureTable = [
        ["true", *names],
        *([n, *map(int, line)] for n, line in zip(names, counts, strict=True)),
    ]
    caption = (
        f"{row.label}: test rows of all clients and seeds in the last round that counted them; "
        "shade: share of the true class."
    )
    if runs < len(row.runs):
        caption += f" {runs} of {len(row.runs)} runs have such counts, of the round that they keep."
    partial = sentence({row.label: row.runs}, over_clients("client", row.measure.name))
    caption = f"{caption} {partial}".rstrip()
    return Picture(
        f"confusion-{number}", f"Confusion of classes: {row.label}", caption, figure, table
    )


def _draw_cells(axes: Axes, counts: np.ndarray, shares: np.ndarray, color: str) -> None:
    """Draw a cell per pair of classes: its shade is a share, its number a count."""
    shades = shades_of(color)
    axes.pcolormesh(shares, cmap=shades, vmin=0.0, vmax=1.0, edgecolors="white", linewidth=0.5)
    for i, j in np.ndindex(*counts.shape) if len(counts) <= MOST_NUMBERED else ():
        red, green, blue, _ = shades(float(shares[i, j]))
        ink = BLACK if 0.2126 * red**2 + 0.7152 * green**2 + 0.0722 * blue**2 > BRIGHT else "white"
        number = str(counts[i, j])
        axes.text(j + 0.5, i + 0.5, number, ha="center", va="center", color=ink, fontsize="x-small")


def shades_of(color: str) -> ListedColormap:
    """Return the colours of cells from white to ``color``.

    The page replaces the colours of paper, ink and grid by those of its mode, so no cell may have
    one of these: a number on it would not be seen.
    """
    colors = importlib.import_module("matplotlib.colors")
    ramp = colors.LinearSegmentedColormap.from_list("row", ["white", color])(np.linspace(0, 1, 256))
    own = ["white" if colors.to_hex(shade) in ON_PAGE else shade for shade in ramp]
    shades: ListedColormap = colors.ListedColormap(own)
    return shades
