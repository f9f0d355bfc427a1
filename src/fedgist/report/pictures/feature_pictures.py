"""Figures of saved features: 2-dimensional features directly, others by t-SNE.

A t-SNE embedding is computed once and cached in the run's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors
import safetensors.numpy

from fedgist.methods.common.method_looks import INK
from fedgist.report.pictures.drawing import FigureTable, Picture, new_figure, short, wrapped
from fedgist.report.pictures.plot_elements import (
    SIGNS,
    group_color,
    groups,
    legend_of,
)
from fedgist.report.pictures.row_styles import RowStyle, styles_of
from fedgist.report.tables.comparison import Row, Study
from fedgist.runs.files import atomic_files
from fedgist.runs.files.record import FEATURES, to_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CACHE = "features-tsne.json"
MOST_POINTS = 1000  # more points take long and add nothing to the figure
FEWEST_POINTS = 4  # t-SNE needs at least this number

Points = list[tuple[float, float]]


@dataclass(frozen=True, eq=False)
class SavedFeatures:
    """The saved features of a run: ``features`` (points, width), ``clients``, ``labels`` (points,).

    ``heads`` are the weights (clients, classes, width) and biases (clients, classes) of the
    clients' heads, by client number, or None if they were not saved.
    """

    features: np.ndarray
    clients: np.ndarray
    labels: np.ndarray
    digest: str
    heads: tuple[np.ndarray, np.ndarray] | None = None


def saved(folder: Path, name: str = FEATURES) -> SavedFeatures | None:
    """Return the features saved in a run's folder, or None if the file is damaged."""
    blob = (folder / name).read_bytes()
    try:
        arrays = safetensors.numpy.load(blob)
        features, clients, labels = (arrays[name] for name in ("features", "client", "label"))
        heads = (arrays["weight"], arrays["bias"]) if "weight" in arrays else None
    except (safetensors.SafetensorError, KeyError):
        return None
    fits = _fit_each_other(features, clients, labels)
    if not fits or (heads and not _are_heads_of(*heads, features, clients)):
        return None
    return SavedFeatures(features, clients, labels, hashlib.sha256(blob).hexdigest(), heads)


def tsne_points(folder: Path) -> tuple[Points, list[int], list[int]] | None:
    """Return t-SNE points (van der Maaten and Hinton 2008), their clients and their classes.

    The points are computed once and cached in the folder. None if the features are damaged.
    """
    features = saved(folder)
    if features is None:
        return None
    count = len(features.features)
    picks = np.linspace(0, count - 1, min(MOST_POINTS, count)).round().astype(int)
    points = _cached_points(folder / CACHE, features.digest)
    if points is None or len(points) != len(picks):
        points = arranged(features.features[picks])
        with contextlib.suppress(OSError, ValueError):  # the folder may be read-only
            text = to_json({"of": features.digest, "points": points}) + "\n"
            atomic_files.write(folder / CACHE, text)
    return points, features.clients[picks].tolist(), features.labels[picks].tolist()


def _fit_each_other(features: np.ndarray, clients: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether features (points, width) have one client and one class per point."""
    numbers = np.issubdtype(features.dtype, np.floating)
    counts = all(np.issubdtype(array.dtype, np.integer) for array in (clients, labels))
    one_each = clients.shape == labels.shape == features.shape[:1]
    return bool(numbers and counts and one_each and len(features.shape[1:]) == 1 and len(features))


def _are_heads_of(
    weight: np.ndarray, bias: np.ndarray, features: np.ndarray, clients: np.ndarray
) -> bool:
    """Return whether there is one finite head per client, of the features' width."""
    count, width = len(np.unique(clients)), features.shape[1]
    fits = weight.shape == (count, *bias.shape[1:], width) and bias.shape[:1] == (count,)
    return bool(fits and all(np.isfinite(array).all() for array in (weight, bias, features)))


def _cached_points(path: Path, digest: str) -> Points | None:
    try:
        cache = json.loads(path.read_text(encoding="utf-8"))
        points = [(float(x), float(y)) for x, y in cache["points"]]
        return points if cache["of"] == digest and np.isfinite(points).all() else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def arranged(features: np.ndarray) -> Points:
    """Return the t-SNE point of each row of features (points, width)."""
    from sklearn.manifold import TSNE  # noqa: PLC0415  # a slow import that other pages do not need

    count = len(features)
    if count < FEWEST_POINTS or not np.isfinite(features).all():
        return [(float(i), 0.0) for i in range(count)]
    tsne = TSNE(2, perplexity=min(30.0, (count - 1) / 3), init="pca", random_state=0, n_jobs=1)
    return [(float(x), float(y)) for x, y in tsne.fit_transform(features.astype(np.float64))]


MARGIN = 0.06  # margin around the points, as a share of their range
AXES = 2  # dimensions of a plane
STYLES = ("--", ":", "-.", (0, (6, 2, 1, 2)))  # line styles of the first, second, ... head

Box = tuple[float, float, float, float]  # left, right, bottom, top


@dataclass(frozen=True)
class Border:
    """A line segment on which a head gives two classes the same, highest logit."""

    head: int
    classes: tuple[int, int]
    start: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True)
class Plane:
    """Points with their clients and classes, and the decision borders of each distinct head."""

    points: Points
    clients: list[int]
    labels: list[int]
    borders: tuple[Border, ...] = ()
    heads: tuple[tuple[int, ...], ...] = ()  # the clients of each head


def plane(folder: Path) -> Plane | None:
    """Return a run's features and its heads' borders; None unless features have 2 dimensions."""
    kept = saved(folder)
    if kept is None or kept.heads is None or kept.features.shape[1] != AXES:
        return None
    count = len(kept.features)
    picks = np.linspace(0, count - 1, min(MOST_POINTS, count)).round().astype(int)
    box = box_of(kept.features)
    by_head: dict[bytes, list[int]] = {}
    clients = np.unique(kept.clients)
    for place, (weight, bias) in enumerate(zip(*kept.heads, strict=True)):
        by_head.setdefault(weight.tobytes() + bias.tobytes(), []).append(place)
    borders = [
        border
        for number, places in enumerate(by_head.values())
        for border in borders_of(kept.heads[0][places[0]], kept.heads[1][places[0]], box, number)
    ]
    return Plane(
        [(float(x), float(y)) for x, y in kept.features[picks]],
        kept.clients[picks].tolist(),
        kept.labels[picks].tolist(),
        tuple(borders),
        tuple(tuple(int(clients[place]) for place in places) for places in by_head.values()),
    )


def box_of(points: np.ndarray) -> Box:
    """Return the limits of a box around points (points, 2), with a margin."""
    low, high = points.min(0), points.max(0)
    margin = MARGIN * np.maximum(high - low, 1e-6)
    (left, bottom), (right, top) = low - margin, high + margin
    return float(left), float(right), float(bottom), float(top)


def borders_of(weight: np.ndarray, bias: np.ndarray, box: Box, head: int = 0) -> Iterator[Border]:
    """Yield the line segments in a box at which the class with the highest logit changes.

    The logits of a point z are ``weight`` z + ``bias``, with weight (classes, 2) and bias
    (classes,). The border of two classes lies on a line with coordinate t. Each side of the box
    and each other class gives one linear condition on t.
    """
    weight, bias = weight.astype(float), bias.astype(float)
    left, right, bottom, top = box
    for i, j in itertools.combinations(range(len(bias)), 2):
        normal, offset = weight[i] - weight[j], bias[i] - bias[j]
        if not (square := float(normal @ normal)):
            continue
        start, step = -offset * normal / square, np.array([-normal[1], normal[0]])
        others = [k for k in range(len(bias)) if k not in {i, j}]
        at_least = [  # pairs (a, b): a t + b >= 0
            *((step[d], start[d] - low) for d, low in enumerate((left, bottom))),
            *((-step[d], high - start[d]) for d, high in enumerate((right, top))),
            *(
                (
                    (weight[i] - weight[k]) @ step,
                    (weight[i] - weight[k]) @ start + bias[i] - bias[k],
                )
                for k in others
            ),
        ]
        first, last = _between(at_least)
        if first < last:
            ends = (start + t * step for t in (first, last))
            start_point, end_point = ((float(x), float(y)) for x, y in ends)
            yield Border(head, (i, j), start_point, end_point)


def _between(conditions: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the least and largest t with a t + b >= 0 for all (a, b); (1, 0) if there is none."""
    first, last = -math.inf, math.inf
    for a, b in conditions:
        if a > 0:
            first = max(first, -b / a)
        elif a < 0:
            last = min(last, -b / a)
        elif b < 0:
            return 1.0, 0.0
    return float(first), float(last)


def draw_plane(
    axes: Axes, shown: Plane, classes: Sequence[object] = (), clients: Sequence[object] = ()
) -> FigureTable:
    """Draw points, coloured by class and marked by client, and the borders; return the numbers.

    ``classes`` and ``clients`` are names for the legend; numbers are shown without them.
    """
    table: FigureTable = [["what", "client", "class", "x", "y", "to x", "to y"]]
    groups = list(zip(shown.clients, shown.labels, strict=True))
    for (client, label), point in zip(groups, shown.points, strict=True):
        table.append(["point", client, label, *point, "", ""])
    for group in sorted(set(groups)):
        some = [point for point, own in zip(shown.points, groups, strict=True) if own == group]
        x, y = zip(*some, strict=True)
        sign, hue = SIGNS[group[0] % len(SIGNS)], group_color(group[1])
        axes.scatter(x, y, s=14, color=hue, marker=sign, alpha=0.6, linewidths=0)
    for border in shown.borders:
        axes.plot(
            *zip(border.start, border.end, strict=True),
            color=INK,
            linestyle=STYLES[border.head % len(STYLES)],
            linewidth=1.4,
        )
        names = " ".join(map(str, shown.heads[border.head])), "-".join(map(str, border.classes))
        table.append(["border", *names, *border.start, *border.end])
    marks = [(f"class {_name(i, classes)}", "s", group_color(i)) for i in sorted(set(shown.labels))]
    owners = sorted(set(shown.clients))
    marks += [(f"client {_name(i, clients)}", SIGNS[i % len(SIGNS)], INK) for i in owners]
    legend_of(axes, marks)
    return table


def _name(number: int, names: Sequence[object]) -> str:
    return short(names[number] if 0 <= number < len(names) else number, 12)


MOST_FIGURE_ROWS = 6  # number of rows with figures of features
MAP_HEIGHT = 3.6  # inches, without the legend
FRAME = 1.4  # points: the frame of a map has the colour of its row


def of_features(study: Study) -> Iterator[Picture]:
    """Yield figures of the saved features of each row's first seed."""
    styles = styles_of([row.method for row in study.rows])
    rows = [
        (row, style)
        for row, style in zip(study.rows, styles, strict=True)
        if (row.runs[0].folder / FEATURES).exists()
    ]
    for number, (row, style) in enumerate(rows[:MOST_FIGURE_ROWS], 1):
        run = row.runs[0]
        split = run.split or {}
        names = (split.get("classes"), split.get("clients"))
        if as_they_are := plane(run.folder):
            yield _plane(f"features-{number}", row, style, as_they_are, *names)
        elif arranged := tsne_points(run.folder):
            points, clients, labels = arranged
            by_group = {
                "class": _named(labels, names[0]),
                "client": _named(clients, names[1]),
            }
            for by, groups_of in by_group.items():
                yield _embedding(f"features-{number}-{by}", by, row, style, points, groups_of)


def _map(row: Row, style: RowStyle) -> tuple[Figure, Axes]:
    """Return a figure for points, with the name of its row, in a frame of the row's colour."""
    figure, axes = new_figure(height=MAP_HEIGHT)
    axes.set_title(wrapped(row.label, 50), fontsize="medium")
    axes.spines[:].set(visible=True, color=style.color, linewidth=FRAME)
    axes.margins(MARGIN / 2)
    return figure, axes


def _named(numbers: Sequence[int], names: Sequence[object] | None) -> list[str]:
    all_names = names or ()
    return [str(all_names[i]) if 0 <= i < len(all_names) else str(i) for i in numbers]


def _embedding(
    name: str,
    by: str,
    row: Row,
    style: RowStyle,
    points: Points,
    groups_of: Sequence[object],
) -> Picture:
    figure, axes = _map(row, style)
    groups(axes, points, [str(group) for group in groups_of], by)
    axes.set(xticks=[], yticks=[])  # the numbers of a t-SNE mean nothing
    caption = f"t-SNE of test rows of {row.label}, seed {row.runs[0].seed}; colour and sign: {by}."
    table: FigureTable = [["x", "y", by]]
    table += [[*point, group] for point, group in zip(points, groups_of, strict=True)]
    return Picture(name, f"Features of {row.label}, by {by}", caption, figure, table)


def _plane(
    name: str,
    row: Row,
    style: RowStyle,
    shown: Plane,
    classes: Sequence[object] | None,
    clients: Sequence[object] | None,
) -> Picture:
    figure, axes = _map(row, style)
    table = draw_plane(axes, shown, classes or (), clients or ())
    caption = (
        f"The 2 features of test rows of {row.label}, seed {row.runs[0].seed}. Colour: class; "
        "sign: client. Lines: where a head gives two classes the same chance."
    )
    return Picture(name, f"Features of {row.label}", caption, figure, table)
