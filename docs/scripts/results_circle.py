"""Makes the picture of the circle, FedLog's fig. 1: python docs/scripts/results_circle.py.

The curves are those of the runs in the archive; the features and heads are of five runs in
``runs/circle``, which are done if they are not there (seconds). Writes ``img/circle.png``, and its
numbers into ``circle.csv``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import fedgist
from fedgist.cli.recipe_files import find_recipe
from fedgist.data.sources.loading import load_data
from fedgist.methods.common.method_looks import INK
from fedgist.recipe.reading import read
from fedgist.report.pictures.drawing import STYLE, FigureTable, Picture, matplotlib, new_figure
from fedgist.report.pictures.feature_pictures import (
    Plane,
    borders_of,
    box_of,
    draw_plane,
    plane,
    saved,
)
from fedgist.report.pictures.varied import draw_varied as draw_lines
from fedgist.report.pictures.varied import varied
from fedgist.report.tables import comparison
from fedgist.runs.files.columns import over_clients
from fedgist.runs.finished import run_reader
from results_pictures import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[1] / "results"
CURVES, PLANES = RESULTS / "data" / "fedlog" / "circle", Path("runs/circle")
RECIPE, SEED, ITERATIONS = "fedlog/circle", 0, "train.local_epochs"
CLASSES, CLIENTS = ("outside", "inside"), ("left", "right")
RADIUS = 26 / 7
HIGH, WIDE = 7.2, 11.0  # inches


def main() -> None:
    """Do the runs of the planes and write the picture."""
    run_planes(PLANES)
    picture = figure(CURVES, PLANES)
    (RESULTS / "img").mkdir(exist_ok=True)
    write(picture, RESULTS / "img")
    (RESULTS / f"{picture.name}.csv").write_text(picture.csv(), encoding="utf-8")


def run_planes(folder: Path) -> None:
    """Do the runs whose features and heads are shown, unless they are there.

    ``start`` takes a step that changes nothing, so its models are as they start. In ``left`` and
    ``right`` one client alone is online, so that the average is its own head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    averaged = "method.name=lg_fedavg@1"
    run(folder / "fedlog", "method.name=fedlog")
    run(folder / "lg_fedavg", averaged)
    run(folder / "start", averaged, "train.lr=1e-30")
    for number, client in enumerate(CLIENTS):
        online = folder / f"{client}.csv"
        online.write_text(f"round,client\n1,{number}\n", encoding="utf-8")
        run(folder / client, averaged, f"clients.availability={online}")


def run(folder: Path, *settings: str) -> None:
    """Do a run of the recipe."""
    if not (folder / "result.json").exists():
        fedgist.run(read(find_recipe(RECIPE), [*settings, f"seed={SEED}"]), out=folder)


def figure(archive: Path, planes: Path) -> Picture:
    """Return the picture and its numbers: points, three planes, and two curves."""
    with matplotlib().rc_context(STYLE | {"axes.grid": False}):
        whole, axes = new_figure(WIDE, HIGH, rows=2, columns=3, shared=False)
        tables = {
            "points": points(axes[0, 0]),
            "start": learned(axes[0, 1], planes / "start", "Random start, one head"),
            "lg_fedavg": averaged(axes[1, 0], planes),
            "fedlog": learned(axes[1, 1], planes / "fedlog", "FedLog's head"),
            "train": curves(axes[0, 2], archive, "train", "Accuracy, training points"),
            "test": curves(axes[1, 2], archive, "client", "Accuracy, test points"),
        }
    lines = [[panel, *line] for panel, table in tables.items() for line in table]
    return Picture("circle", "The circle", "", whole, lines)


def points(axes: Axes) -> FigureTable:
    """Draw the training points and the circle."""
    data = load_data("circle", seed=SEED)
    assert data.clients is not None
    clients, labels = data.clients.tolist(), data.y.tolist()
    where = [(float(x), float(y)) for x, y in data.x.tolist()]
    table = draw_plane(axes, Plane(where, clients, labels), CLASSES, CLIENTS)
    angles = np.linspace(0, 2 * np.pi, 200)
    axes.plot(RADIUS * np.cos(angles), RADIUS * np.sin(angles), color=INK, linewidth=1)
    axes.set(title="80 training points", aspect="equal")
    return table


def learned(axes: Axes, folder: Path, title: str) -> FigureTable:
    """Draw the features of a run's test points, and its heads."""
    found = plane(folder)
    assert found is not None, f"{folder} has no features of 2 numbers"
    axes.set_title(title)
    return draw_plane(axes, found, CLASSES, CLIENTS)


def averaged(axes: Axes, planes: Path) -> FigureTable:
    """Draw what LG-FedAvg learns: the line of each client's own head, of the average is solid."""
    found, features = plane(planes / "lg_fedavg"), saved(planes / "lg_fedavg")
    assert found is not None
    assert features is not None
    own = []
    for number, client in enumerate(CLIENTS):
        alone = saved(planes / client)
        assert alone is not None
        assert alone.heads is not None
        weight, bias = (heads[number] for heads in alone.heads)
        own += list(borders_of(weight, bias, box_of(features.features), number))
    table = draw_plane(
        axes, replace(found, borders=tuple(own), heads=((0,), (1,))), CLASSES, CLIENTS
    )
    for border in found.borders:
        x, y = zip(border.start, border.end, strict=True)
        axes.plot(x, y, color=INK, linestyle="-", linewidth=1.8)
        table.append(["average", "", "", *border.start, *border.end])
    axes.set_title("LG-FedAvg's own heads, average solid")
    return table


def curves(axes: Axes, archive: Path, split: str, title: str) -> FigureTable:
    """Draw the accuracy over the number of local iterations."""
    metric = over_clients(split, "accuracy")
    study = comparison.study(run_reader.find([archive]), metric=metric)
    table = draw_lines(axes, varied(study.rows, ITERATIONS), study.measure)
    axes.set(title=title, xlabel="local iterations")
    axes.grid(visible=True)
    return table


if __name__ == "__main__":
    main()
