"""Logistic regression of all rows, its penalty by cross-validation, beside one exchange.

    python bench/pooled_regression.py RECIPE [--set KEY=VALUE ...] [--folds 5] [--seeds 3]

Each seed's line has the accuracy of ``analytic`` by its defaults in this recipe, and that of
scikit-learn's regression over the same features of the same rows: accuracy on the test rows, or
mean of the clients' accuracies if ``evaluate.on`` is ``client``. C is one of 13 values from 1e-4 to
1e2, chosen by folds of the training rows (one fold with ``--folds 1``); test rows only report.
Features are divided by their deviations.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, StratifiedShuffleSplit
from torch import Tensor

import fedgist
from fedgist.cli.recipe_files import find_recipe
from fedgist.data.examples import Examples
from fedgist.recipe.reading import Recipe, read
from fedgist.runs.files.columns import MEAN

AT_ONCE = 256  # rows
STEPS = 2_000
GRID = np.logspace(-4, 2, 13)


def features(examples: Examples, result: fedgist.Result) -> Tensor:
    """Return the features (rows, m) of examples by the run's only body."""
    (start,) = result.server_run.side.task.starts.values()
    pieces = []
    with torch.no_grad():
        for rows in torch.split(torch.arange(len(examples)), AT_ONCE):
            batch = examples.batch(rows.unsqueeze(0))
            pieces.append(start.features(batch.x[0]))
    return torch.cat(pieces)


def accuracies(recipe: Recipe, folds: int) -> tuple[float, float, float]:
    """Return the accuracy of one exchange, that of pooled regression, and its C."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fedgist.run(recipe)
    column = f"eval/client/accuracy{MEAN}"
    parts, people = result.world.partition, result.world.population
    train = torch.cat([parts.train[client] for client in range(len(parts.train))]).sort().values
    x, y = features(people.examples, result)[train], people.examples.y[train]
    deviation = x.std(0)
    scale = torch.where(deviation > 0, deviation, 1.0)
    shuffle = {"random_state": recipe.seed}
    split = (
        StratifiedShuffleSplit(1, test_size=0.2, **shuffle)
        if folds == 1
        else StratifiedKFold(folds, shuffle=True, **shuffle)
    )
    search = GridSearchCV(LogisticRegression(max_iter=STEPS), {"C": GRID}, cv=split)
    search.fit((x / scale).numpy(), y.numpy())
    right = search.predict((features(people.test_examples, result) / scale).numpy())
    right = torch.as_tensor(right) == people.test_examples.y
    of_clients = recipe.evaluate.on == "client"
    tests = (
        [parts.test[client] for client in range(len(parts.test))] if of_clients else [slice(None)]
    )
    pooled = np.mean([float(right[rows].double().mean()) for rows in tests])
    return result.rounds[-1][column], float(pooled), search.best_params_["C"]


def main() -> None:
    """Print a line for each seed, and the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    found = []
    for seed in range(given.seeds):
        settings = ["method.name=analytic", *given.set, f"seed={seed}"]
        found.append(accuracies(read(find_recipe(given.recipe), settings), given.folds))
        once, pooled, strength = found[-1]
        print(
            f"seed {seed}: one exchange {once:.4f}, pooled {pooled:.4f} (C = {strength:g})",
            flush=True,
        )
    once, pooled, _ = np.mean(found, axis=0)
    print(f"mean: one exchange {once:.4f}, pooled {pooled:.4f}")


if __name__ == "__main__":
    main()
