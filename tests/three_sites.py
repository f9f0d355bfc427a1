"""Three sites with rows of the bundled digits, as files of their own, and recipes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

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


def rows_of_sites(*, images: bool = False) -> tuple[Dataset, Partition]:
    """Return the digits as 64 numbers from 0 to 1, or as images of bytes, and each site's rows."""
    digit = digits()
    if images:
        x, x_test = 15 * digit.x, 15 * digit.x_test
    else:
        x, x_test = (part.float().flatten(1) / 16 for part in (digit.x, digit.x_test))
    scale, classes = 255.0 if images else 1.0, tuple(CLASSES)
    data = Dataset("digits", x, digit.y, x_test, digit.y_test, 10, scale=scale, classes=classes)
    return data, partition(data, "dirichlet", len(NAMES), random.key(SEED, "partition"), alpha=1.0)


def public_rows(*, images: bool = False) -> torch.Tensor:
    """Return rows that all may see: some of nobody's test rows, changed a little."""
    data, _ = rows_of_sites(images=images)
    return data.x_test[:64].flip(-1)


def write_site(folder: Path, name: str, data: Dataset, train: Any, test: Any) -> None:
    """Write some training rows and test rows of data into a site's file NAME.npz."""
    np.savez(
        folder / f"{name}.npz",
        x=data.x[train].numpy(),
        y=data.y[train].numpy(),
        x_test=data.x_test[test].numpy(),
        y_test=data.y_test[test].numpy(),
    )


def write_rows(folder: Path, *, images: bool = False) -> None:
    """Write each site's rows into a file NAME.npz, and public rows into public.npz."""
    data, parts = rows_of_sites(images=images)
    for number, name in enumerate(NAMES):
        write_site(folder, name, data, parts.train[number], parts.test[number])
    public = public_rows(images=images)
    labels = np.arange(len(public)) % 10
    few, some = public[:10].numpy(), labels[:10]
    np.savez(folder / "public.npz", x=public.numpy(), y=labels, x_test=few, y_test=some)


def recipe(name: str, rounds: int = 3, **sections: Any) -> dict[str, Any]:
    """Return a federation's recipe: architectures where heads are shared, else one model."""
    raw: dict[str, Any] = {
        "seed": SEED,
        "data": {"classes": CLASSES, "mean": [MEAN], "std": [STD]},
        "facts": FACTS,
        "method": {"name": name},
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
        both = isinstance(raw.get(key), dict) and isinstance(value, dict)
        raw[key] = {**raw[key], **value} if both else value
    return raw


def parsed(raw: dict[str, Any]) -> Recipe:
    """Return a recipe that was read from nested dictionaries."""
    return make(raw)


def simulated(raw: dict[str, Any], *, images: bool = False, **given: Any) -> fedgist.Result:
    """Return the run of the same recipe and rows by the local engine."""
    data, parts = rows_of_sites(images=images)
    kept = {key: value for key, value in raw.items() if key not in {"facts", "federation"}}
    if "public" in raw["data"]:
        kept["data"] = {key: value for key, value in raw["data"].items() if key != "public"}
        given["public"] = public_rows(images=images)
    return fedgist.run(
        kept,
        data=data,
        clients={name: parts.train[i] for i, name in enumerate(NAMES)},
        clients_test={name: parts.test[i] for i, name in enumerate(NAMES)},
        **given,
    )


HETEROGENEOUS = {"clients": {"architectures": ARCHITECTURES}}
SAME: dict[str, Any] = {"model": {"name": "mlp", "hidden": [24]}}
PUBLIC: dict[str, Any] = {"data": {"public": {"name": "npz", "path": "public.npz"}}}
SIMCLR: dict[str, Any] = {
    "objective": {"name": "simclr"},
    "facts": {"input_shape": [1, 8, 8], "element": "uint8", "scale": 255.0},
    "data": {"augment": ["crop"], **PUBLIC["data"]},
}
POOLED: dict[str, Any] = {"clients": {"pools": POOLS}, **PUBLIC}
#: What each method needs in a recipe; all others get one model.
SECTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("fedlog", "fedproto", "repshare", "local", "fd", "fml"), HETEROGENEOUS),
    **dict.fromkeys(("fedgh", "fedtgp", "fedgen", "fedkd"), HETEROGENEOUS),
    **dict.fromkeys(("periodic_codist", "merged_codist"), POOLED),
    "fedmd": HETEROGENEOUS | PUBLIC,
    "feddf": HETEROGENEOUS | PUBLIC | {"method": {"distillation": {"steps": 4}}},
    "flesd": SIMCLR,
}


def recipe_of(method: str, rounds: int = 2) -> dict[str, Any]:
    """Return the recipe of a method's federation, in which all sites take part in all rounds."""
    return recipe(
        method,
        rounds=rounds,
        federation={"least_sites": 3, "least_replies": 3},
        **SECTIONS.get(method, SAME),
    )
