"""How every picture is drawn and written, by matplotlib (an extra).

Looks, parts that several pictures share, t-SNE of saved features with its cache, and the PNGs of
the command line.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from fedgist.errors import ReportError
from fedgist.federation import atomic_files
from fedgist.federation.columns import ACCURACY, ACCURACY_SPREAD
from fedgist.federation.record import to_json
from fedgist.federation.saved_features import FEATURES
from fedgist.report.run_files import RunFiles

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
CACHE = "features-tsne.json"
MOST_POINTS = 1000  # of t-SNE: more take long and show no more
FEWEST_POINTS = 4  # of t-SNE: fewer cannot be arranged

Table = list[list[Any]]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Picture:
    """A figure, what it shows, and its numbers (the first line names the columns)."""

    name: str
    title: str
    caption: str
    figure: Any
    table: Table

    def csv(self) -> str:
        """Return its numbers as CSV."""
        buffer = io.StringIO(newline="")
        csv.writer(buffer, lineterminator="\n").writerows(self.table)
        return buffer.getvalue()

    def png(self) -> bytes:
        """Return it as a PNG on white."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=110, facecolor="white")
        return buffer.getvalue()

    def svg(self) -> str:
        """Return it as SVG in the page's text colour, each row's marks in the class ``row-N``."""
        buffer = io.StringIO()
        with matplotlib().rc_context(STYLE):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :].replace(INK, "currentColor")
        text = text.replace(GRID, "var(--grid, #dadad9)")
        text = re.sub(r'id="(row-\d+)"', r'class="\1"', text)
        return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", text, count=2)


def matplotlib() -> Any:
    """Return the library; raise ReportError that says how to install it where it is missing."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        msg = "pictures need matplotlib: pip install 'fedgist[plot]'"
        raise ReportError(msg) from error


def write(pictures: Iterable[Picture], folder: Path) -> None:
    """Write each picture into a folder as PNG, SVG and CSV."""
    for picture in pictures:
        atomic_files.write(folder / f"{picture.name}.png", picture.png())
        atomic_files.write(folder / f"{picture.name}.svg", picture.svg())
        atomic_files.write(folder / f"{picture.name}.csv", picture.csv())


def new_figure(width: float = 6.4, height: float = 3.6, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure and its axes: one, or a row of axes that share their y."""
    matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    return figure, figure.subplots(1, columns, sharey=True)


def color(number: int) -> str:
    """Return the colour of row ``number``."""
    return COLORS[number % len(COLORS)]


def dashes(number: int) -> str:
    """Return the line style of row ``number``: another one where the colours start again."""
    return ("-", "--", ":", "-.")[number // len(COLORS) % 4]


def bubbles(axes: Any, counts: Sequence[Sequence[int]], classes: Sequence[str]) -> int:
    """Draw each client's rows of each class as the area of a bubble; return the largest count."""
    most = max((count for line in counts for count in line), default=1) or 1
    cells = [(x, y, n) for x, line in enumerate(counts) for y, n in enumerate(line) if n]
    axes.scatter(
        [x for x, _, _ in cells],
        [y for _, y, _ in cells],
        s=[220 * n / most for _, _, n in cells],
        color=COLORS[0],
        alpha=0.7,
        linewidths=0,
    )
    axes.set(xlabel="client", ylabel="class")
    axes.set_yticks(range(len(classes)), classes)
    return most


def boxes(axes: Any, rows: Sequence[tuple[int, str, list[float]]]) -> None:
    """Draw a lying box for each row's number, label and values, from top to bottom."""
    parts = axes.boxplot(
        [values for _, _, values in rows],
        orientation="horizontal",
        widths=0.6,
        patch_artist=True,
        flierprops={"markersize": 3, "markeredgecolor": INK},
        medianprops={"color": INK},
        whiskerprops={"color": INK},
        capprops={"color": INK},
    )
    for (i, _, _), box in zip(rows, parts["boxes"], strict=True):
        box.set(facecolor=color(i), alpha=0.6, edgecolor=color(i), gid=f"row-{i}")
    axes.set_yticks(range(1, len(rows) + 1), [label for _, label, _ in rows])
    axes.invert_yaxis()


def stacked_bars(axes: Any, names: Sequence[str], rows: Table) -> None:
    """Draw a lying bar for each row, its label first, then the length of each part in ``names``."""
    labels = [row[0] for row in rows]
    left = [0.0] * len(rows)
    for place, name in enumerate(names, 1):
        widths = [row[place] for row in rows]
        part_color = COLORS[(0, 2, 4)[place - 1]]
        axes.barh(labels, widths, left=left, color=part_color, label=name, height=0.6)
        left = [end + width for end, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def embedding(folder: Path) -> tuple[Points, list[int], list[int]] | None:
    """Return points by t-SNE (van der Maaten and Hinton 2008), their clients and their classes.

    The points are computed once and kept beside the features. None if the features are damaged.
    """
    blob = (folder / FEATURES).read_bytes()
    try:
        arrays = safetensors.numpy.load(blob)
        features, clients, labels = (arrays[name] for name in ("features", "client", "label"))
    except (safetensors.SafetensorError, KeyError):
        return None
    count = len(features)
    picks = np.linspace(0, count - 1, min(MOST_POINTS, count)).round().astype(int)
    digest = hashlib.sha256(blob).hexdigest()
    points = _cached_points(folder / CACHE, digest)
    if points is None or len(points) != len(picks):
        points = _compute_points(features[picks])
        with contextlib.suppress(OSError):  # a folder that is read-only: computed again next time
            text = to_json({"of": digest, "points": points}) + "\n"
            atomic_files.write(folder / CACHE, text)
    return points, clients[picks].tolist(), labels[picks].tolist()


def _cached_points(path: Path, digest: str) -> Points | None:
    try:
        cache = json.loads(path.read_text(encoding="utf-8"))
        points = [(float(x), float(y)) for x, y in cache["points"]]
        return points if cache["of"] == digest else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _compute_points(features: np.ndarray) -> Points:
    from sklearn.manifold import TSNE  # noqa: PLC0415  # a second that other pages need not wait

    count = len(features)
    if count < FEWEST_POINTS or not np.isfinite(features).all():
        return [(float(i), 0.0) for i in range(count)]
    tsne = TSNE(2, perplexity=min(30.0, (count - 1) / 3), init="pca", random_state=0, n_jobs=1)
    return [(float(x), float(y)) for x, y in tsne.fit_transform(features.astype(np.float64))]


def curves_png(runs: Sequence[RunFiles], path: Path) -> None:
    """Write a PNG of several runs' accuracy by round, with its spread over clients, and by bytes.

    Raises
    ------
    ReportError
        If matplotlib is missing or does not know the file's format.
    """
    figure, (by_round, by_bytes) = new_figure(10, 4, columns=2)
    for run in runs:
        _curves_of_run(run, by_round, by_bytes)
    by_round.set(
        xlabel="round",
        ylabel="accuracy, mean of clients (%)",
        title="By round; band: spread over clients",
    )
    by_bytes.set(xlabel="bytes sent, up and down", title="By communication")
    if any(run.total("comm/up_bytes") for run in runs):
        by_bytes.set_xscale("log")
    for axes in (by_round, by_bytes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    by_round.legend(frameon=False)
    _save(figure, path)


def _curves_of_run(run: RunFiles, by_round: Any, by_bytes: Any) -> None:
    rounds, values = run.column(ACCURACY)
    if not rounds:
        return
    accuracy = [100 * v for v in values]
    line = by_round.plot(rounds, accuracy, label=run.name, linewidth=1.8)[0]
    _, spread = run.column(ACCURACY_SPREAD)
    low = [a - 100 * s for a, s in zip(accuracy, spread, strict=True)]
    high = [min(100.0, a + 100 * s) for a, s in zip(accuracy, spread, strict=True)]
    by_round.fill_between(rounds, low, high, color=line.get_color(), alpha=0.1, linewidth=0)
    sent = run.sent()
    if any(sum(both) for both in sent.values()):
        totals = [sum(sent[r]) for r in rounds]
        by_bytes.plot(totals, accuracy, label=run.name, linewidth=1.8, color=line.get_color())


def partition_png(counts: Sequence[Sequence[int]], classes: Sequence[str], path: Path) -> None:
    """Write a PNG with a bubble for each client and class, its area the training rows."""
    figure, axes = new_figure(max(5.0, 0.22 * len(counts) + 2), 0.3 * len(classes) + 1.5)
    most = bubbles(axes, counts, classes)
    axes.set_title(f"Training rows; the largest bubble is {most}")
    axes.grid(alpha=0.2)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.part{path.suffix or '.png'}")
    try:
        figure.savefig(part, dpi=150)
        part.replace(path)
    except ValueError as error:  # a format that matplotlib does not know
        raise ReportError(str(error)) from error
    finally:
        part.unlink(missing_ok=True)
