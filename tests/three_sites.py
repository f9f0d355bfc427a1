"""Three sites with rows of the bundled digits, as files of their own, and recipes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import fedgist
from fedgist.core import random
from fedgist.data.dataset import Dataset
from fedgist.data.partition import Partition, partition
from fedgist.data.sources.digits import digits
from fedgist.recipe.reading import Recipe, make

NAMES = ("berlin", "lyon", "ulm")
SEED = 5
MEAN, STD = 0.305136, 0.376158
CLASSES = [str(number) for number in range(10)]
ARCHITECTURES = {
    "a": {"model": "mlp", "hidden": [24], "clients": ["berlin"]},
    "b": {"model": "mlp", "hidden": [40, 24], "clients": ["lyon"]},
    "c": {"model": "mlp", "hidden": [16, 32, 24], "clients": ["ulm"]},
}
POOLS = {
    "small": {"model": "mlp", "hidden": [16]},
    "large": {"model": "mlp", "hidden": [64, 32], "clients": ["berlin", "lyon"]},
}
FACTS = {"input_shape": [64]}


def rows_of_sites() -> tuple[Dataset, Partition]:
    """Return the digits as 64 numbers from 0 to 1, and the rows of each site."""
    images = digits()
    x, x_test = (part.float().flatten(1) / 16 for part in (images.x, images.x_test))
    classes = tuple(CLASSES)
    data = Dataset("digits", x, images.y, x_test, images.y_test, 10, classes=classes)
    return data, partition(data, "dirichlet", len(NAMES), random.key(SEED, "partition"), alpha=1.0)


def write_rows(folder: Path) -> None:
    """Write each site's rows into a file NAME.npz."""
    data, parts = rows_of_sites()
    for number, name in enumerate(NAMES):
        train, test = parts.train[number], parts.test[number]
        np.savez(
            folder / f"{name}.npz",
            x=data.x[train].numpy(),
            y=data.y[train].numpy(),
            x_test=data.x_test[test].numpy(),
            y_test=data.y_test[test].numpy(),
        )


def recipe(method: str, rounds: int = 3, **sections: Any) -> dict[str, Any]:
    """Return a federation's recipe: architectures where heads are shared, else one model."""
    raw: dict[str, Any] = {
        "seed": SEED,
        "data": {"classes": CLASSES, "mean": [MEAN], "std": [STD]},
        "facts": FACTS,
        "method": {"name": method},
        "train": {
            "num_rounds": rounds,
            "local_epochs": 1,
            "batch_size": 16,
            "lr": 0.05,
            "optimizer": "sgd",
        },
        "engine": {"workers": 1, "server_threads": 1},
    }
    for key, value in sections.items():
        raw[key] = {**raw[key], **value} if isinstance(raw.get(key), dict) else value
    return raw


def parsed(raw: dict[str, Any]) -> Recipe:
    """Return a recipe that was read from nested dictionaries."""
    return make(raw)


def simulated(raw: dict[str, Any], **given: Any) -> fedgist.Result:
    """Return the run of the same recipe and rows by the local engine."""
    data, parts = rows_of_sites()
    kept = {key: value for key, value in raw.items() if key not in {"facts", "federation"}}
    return fedgist.run(
        kept,
        data=data,
        clients={name: parts.train[i] for i, name in enumerate(NAMES)},
        clients_test={name: parts.test[i] for i, name in enumerate(NAMES)},
        **given,
    )
