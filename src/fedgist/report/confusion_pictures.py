"""Figures of confusion matrices: which classes the models of a row take for which."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedgist.report.comparison import Row, Study
from fedgist.report.drawing import FigureTable, Picture, new_figure, short
from fedgist.runs.columns import CONFUSION, over_clients
from fedgist.runs.finished.finished_run import FinishedRun

COLUMN = over_clients("client", CONFUSION, statistic="")
MOST_CLASSES = 30  # with more, no cell of a figure can be told from the next
MOST_NUMBERED = 12  # with more classes, cells hold no numbers
MOST_CONFUSION_ROWS = 6  # number of rows with a figure
BLACK = "#111111"  # of numbers on light cells, on a dark page as well
DARK = 0.5  # share of a true class from which a cell's number is white


def of_confusions(study: Study) -> Iterator[Picture]:
    """Yield a figure for each row whose runs hold counts (true class, predicted class)."""
    for number, row in enumerate(study.rows[:MOST_CONFUSION_ROWS], 1):
        matrices = [matrix for run in row.runs if (matrix := last_confusion(run)) is not None]
        same = len({matrix.shape for matrix in matrices}) == 1
        if same and len(matrices[0]) <= MOST_CLASSES:
            yield _picture(number, row, sum(matrices[1:], matrices[0]))


def last_confusion(run: FinishedRun) -> np.ndarray | None:
    """Return the last counts (true class, predicted class) of a run, over all clients."""
    columns = [line[COLUMN] for line in run.rounds if line.get(COLUMN)]
    try:
        counts = np.array(columns[-1], dtype=np.int64) if columns else np.zeros(0)
    except (ValueError, TypeError, OverflowError):
        return None
    square = counts.ndim == len(("true", "predicted")) and counts.shape[0] == counts.shape[1]
    return counts if square and counts.min() >= 0 and counts.sum() else None


def _picture(number: int, row: Row, counts: np.ndarray) -> Picture:
    split = row.runs[0].split
    classes = split["classes"] if split else []
    names = [str(k) for k in (classes if len(classes) == len(counts) else range(len(counts)))]
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    size = max(3.2, 0.34 * len(names) + 1.6)
    figure, axes = new_figure(size + 0.6, size)
    axes.pcolormesh(shares, cmap="Blues", vmin=0.0, vmax=1.0, edgecolors="white", linewidth=0.5)
    for i, j in np.ndindex(*counts.shape) if len(names) <= MOST_NUMBERED else ():
        ink = "white" if shares[i, j] > DARK else BLACK
        axes.text(j + 0.5, i + 0.5, str(counts[i, j]), ha="center", va="center", color=ink)
    labels, places = [short(name, 12) for name in names], [i + 0.5 for i in range(len(names))]
    axes.set_xticks(places, labels, rotation=90)
    axes.set_yticks(places, labels)
    axes.set(xlabel="predicted", ylabel="true", aspect="equal")
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
    return Picture(
        f"confusion-{number}", f"Confusion of classes: {row.label}", caption, figure, table
    )
