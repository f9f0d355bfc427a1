"""Makes the picture of two clients' features as rounds go on, representation sharing's fig. 5.

``python docs/scripts/results_features.py``, from the root: four runs in ``runs/features``, which
are done if they are not there (one to three minutes each). Writes ``img/features.png``, and its
numbers into ``features.csv``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from sklearn.neighbors import KNeighborsClassifier

import fedgist
from fedgist.cli.recipe_files import find_recipe
from fedgist.recipe.reading import read
from fedgist.report.pictures.drawing import STYLE, FigureTable, Picture, matplotlib, new_figure
from fedgist.report.pictures.feature_pictures import SavedFeatures, arranged, saved
from fedgist.report.pictures.plot_elements import SIGNS
from fedgist.runs.files.record import FEATURES, features_of
from results_pictures import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS, RUNS = Path(__file__).parents[1] / "results", Path("runs/features")
RECIPE, ROUNDS, ROWS = "repshare/mnist", (1, 25, 100), 400
METHODS = ("fedavg@adam", "local", "fd", "repshare")  # as the figure of the paper
HIGH, WIDE, POINT = 14.4, 11.0, 9  # inches, inches, and points squared


def main() -> None:
    """Do the runs, and write the picture."""
    for method in METHODS:
        run(RUNS / method, method)
    picture = figure(RUNS)
    (RESULTS / "img").mkdir(exist_ok=True)
    write(picture, RESULTS / "img")
    (RESULTS / f"{picture.name}.csv").write_text(picture.csv(), encoding="utf-8")


def run(folder: Path, method: str, *settings: str) -> None:
    """Do a run of two clients, unless it is there."""
    if (folder / "result.json").exists():
        return
    between = list(ROUNDS[:-1])
    asked = (f"method.name={method}", "clients.num_clients=2", f"train.num_rounds={ROUNDS[-1]}")
    features = (f"evaluate.save_features={ROWS}", f"evaluate.save_features_at={between}")
    every = f"evaluate.every={ROUNDS[-1]}"
    recipe = read(find_recipe(RECIPE), [*asked, *features, every, *settings])
    fedgist.run(recipe, out=folder)


def figure(runs: Path) -> Picture:
    """Return the picture: a row for each method, a column for each round."""
    lines: FigureTable = []
    with matplotlib().rc_context(STYLE | {"axes.grid": False}):
        whole, axes = new_figure(WIDE, HIGH, rows=len(METHODS), columns=len(ROUNDS), shared=False)
        for row, method in enumerate(METHODS):
            for column, number in enumerate(ROUNDS):
                name = FEATURES if number == ROUNDS[-1] else features_of(number)
                found = saved(runs / method, name)
                assert found is not None, f"{runs / method} has no {name}"
                share = told(found)
                draw(axes[row, column], found, f"{method}, round {number}: {100 * share:.1f} %")
                lines.append([method, number, share])
    return Picture("features", "Features of two clients", "", whole, lines)


def told(found: SavedFeatures) -> float:
    """Return how many of a client's rows lie nearest to a row of their class of the other's."""
    own, other = (found.clients == client for client in np.unique(found.clients))
    shares = []
    for mine, theirs in ((own, other), (other, own)):
        nearest = KNeighborsClassifier(1, metric="cosine")
        nearest.fit(found.features[theirs], found.labels[theirs])
        shares.append(nearest.score(found.features[mine], found.labels[mine]))
    return float(np.mean(shares))


def draw(axes: Axes, found: SavedFeatures, title: str) -> None:
    """Draw the features of both clients by t-SNE: a colour for each class, a sign for each."""
    points, colors = np.array(arranged(found.features)), colormaps["tab10"]
    for sign, client in zip(SIGNS, np.unique(found.clients), strict=False):
        for label in np.unique(found.labels):
            of = (found.clients == client) & (found.labels == label)
            x, y = points[of].T
            axes.scatter(x, y, s=POINT, color=colors(int(label)), marker=sign, linewidths=0)
    axes.set(title=title, xticks=[], yticks=[])


if __name__ == "__main__":
    main()
