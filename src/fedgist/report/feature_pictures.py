"""Figures of saved features: 2-dimensional features directly, others by t-SNE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedgist.report.comparison import Row, Study
from fedgist.report.drawing import Picture, Table, new_figure
from fedgist.report.feature_map import Points, embedding
from fedgist.report.feature_plane import Plane, draw, plane
from fedgist.report.plot_elements import groups
from fedgist.runs.record import FEATURES

MOST_ROWS = 6  # number of rows with figures of features


def of_features(study: Study) -> Iterator[Picture]:
    """Yield figures of the saved features of each row's first seed."""
    rows = [row for row in study.rows if (row.runs[0].folder / FEATURES).exists()]
    for number, row in enumerate(rows[:MOST_ROWS], 1):
        run = row.runs[0]
        split = run.split or {}
        names = (split.get("classes"), split.get("clients"))
        if as_they_are := plane(run.folder):
            yield _plane(f"features-{number}", row, as_they_are, *names)
        elif arranged := embedding(run.folder):
            points, clients, labels = arranged
            classes, owners = _named(labels, names[0]), _named(clients, names[1])
            yield _embedding(f"features-{number}-class", "class", row, points, classes)
            yield _embedding(f"features-{number}-client", "client", row, points, owners)


def _named(numbers: Sequence[int], names: Sequence[object] | None) -> list[str]:
    known = names or ()
    return [str(known[i]) if 0 <= i < len(known) else str(i) for i in numbers]


def _embedding(
    name: str, by: str, row: Row, points: Points, groups_of: Sequence[object]
) -> Picture:
    figure, axes = new_figure(height=4.6)
    groups(axes, points, [str(group) for group in groups_of])
    caption = f"t-SNE of test rows of {row.label}, seed {row.runs[0].seed}; colour and sign: {by}."
    table: Table = [["x", "y", by]]
    table += [[*point, group] for point, group in zip(points, groups_of, strict=True)]
    return Picture(name, f"Features of {row.label}, by {by}", caption, figure, table)


def _plane(
    name: str,
    row: Row,
    shown: Plane,
    classes: Sequence[object] | None,
    clients: Sequence[object] | None,
) -> Picture:
    figure, axes = new_figure(height=4.6)
    table = draw(axes, shown, classes or (), clients or ())
    caption = (
        f"The 2 features of test rows of {row.label}, seed {row.runs[0].seed}. Colour: class; "
        "sign: client. Lines: where a head gives two classes the same chance."
    )
    return Picture(name, f"Features of {row.label}", caption, figure, table)
