"""Plot of 2-dimensional features with the decision borders of linear heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedgist.report.drawing import INK, FigureTable, color, short
from fedgist.report.feature_map import MOST_POINTS, Points, saved
from fedgist.report.plot_elements import SIGNS, legend_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARGIN = 0.06  # margin around the points, as a share of their range
AXES = 2  # dimensions of a plane
TICKS = 0.08  # room for tick labels below the axes, as a share of their height
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
    saved_features = saved(folder)
    if (
        saved_features is None
        or saved_features.heads is None
        or saved_features.features.shape[1] != AXES
    ):
        return None
    count = len(saved_features.features)
    picks = np.linspace(0, count - 1, min(MOST_POINTS, count)).round().astype(int)
    box = box_of(saved_features.features)
    by_head: dict[bytes, list[int]] = {}
    clients = np.unique(saved_features.clients)
    for place, (weight, bias) in enumerate(zip(*saved_features.heads, strict=True)):
        by_head.setdefault(weight.tobytes() + bias.tobytes(), []).append(place)
    borders = [
        border
        for number, places in enumerate(by_head.values())
        for border in borders_of(
            saved_features.heads[0][places[0]], saved_features.heads[1][places[0]], box, number
        )
    ]
    return Plane(
        [(float(x), float(y)) for x, y in saved_features.features[picks]],
        saved_features.clients[picks].tolist(),
        saved_features.labels[picks].tolist(),
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
        some = [point for point, other in zip(shown.points, groups, strict=True) if other == group]
        x, y = zip(*some, strict=True)
        sign, hue = SIGNS[group[0] % len(SIGNS)], color(group[1])
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
    marks = [(f"class {_name(i, classes)}", "s", color(i)) for i in sorted(set(shown.labels))]
    owners = sorted(set(shown.clients))
    marks += [(f"client {_name(i, clients)}", SIGNS[i % len(SIGNS)], INK) for i in owners]
    legend_of(axes, marks, TICKS)
    return table


def _name(number: int, names: Sequence[object]) -> str:
    return short(names[number] if 0 <= number < len(names) else number, 12)
