"""Small data sets of every target, for tests of tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedgist.core import random
from fedgist.core.objectives.next_word import SPECIAL
from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset
from fedgist.data.vocabulary import Vocabulary

ROWS, TEST, FEATURES, OUTPUTS, SIDE, LENGTH, WORDS = 48, 18, 5, 3, 8, 6, 14


def _with_clients(x: Any, y: Any, **about: Any) -> Dataset:
    owner = torch.arange(ROWS) % 3
    names = ("a", "b", "c")
    return Dataset(
        "small",
        x[:ROWS],
        y[:ROWS],
        x[ROWS:],
        y[ROWS:],
        about.pop("num_classes", OUTPUTS),
        clients=owner,
        clients_test=torch.arange(TEST) % 3,
        client_names=names,
        **about,
    )


def _columns(key: Any) -> Any:
    return random.normal(random.fold(key, "x"), (ROWS + TEST, FEATURES))


def numbers(seed: int = 0) -> Dataset:
    """Numbers that are nearly linear in the inputs, in units far from 0 and 1."""
    key = random.key(seed)
    x = _columns(key)
    weight = random.normal(random.fold(key, "weight"), (FEATURES, OUTPUTS))
    noise = random.normal(random.fold(key, "noise"), (ROWS + TEST, OUTPUTS))
    scale = torch.tensor([1.0, 10.0, 100.0])
    y = (x @ weight + 0.1 * noise) * scale + 5 * scale
    return _with_clients(x, y, target="numbers", classes=("u", "v", "w"))


def labels(seed: int = 0) -> Dataset:
    """Labels that are linear in the inputs."""
    key = random.key(seed)
    x = _columns(key)
    weight = random.normal(random.fold(key, "weight"), (FEATURES, OUTPUTS))
    return _with_clients(x, (x @ weight > 0.3).float(), target="labels", classes=("p", "q", "r"))


def pixels(seed: int = 0) -> Dataset:
    """Images whose bright pixels are class 1, and very bright ones class 2."""
    x = random.uniform(random.key(seed), (ROWS + TEST, 1, SIDE, SIDE))
    y = ((x > 0.5).long() + (x > 0.8).long()).squeeze(1).to(torch.int16)
    return _with_clients(x, y, target="pixels", classes=("dark", "bright", "glowing"))


def classes(seed: int = 0) -> Dataset:
    """One class for each row."""
    key = random.key(seed)
    y = torch.arange(ROWS + TEST) % OUTPUTS
    means = 2 * random.normal(random.fold(key, "means"), (OUTPUTS, FEATURES))
    return _with_clients(_columns(key) + means[y], y)


def _texts(seed: int) -> Any:
    drawn = random.integers(random.key(seed), (ROWS + TEST, LENGTH), WORDS - len(SPECIAL))
    return (drawn + len(SPECIAL)).to(torch.int32)


WORD_LIST = (*SPECIAL, *(f"w{i}" for i in range(WORDS - len(SPECIAL))))


def text_classes(seed: int = 0) -> Dataset:
    """Texts whose class is the remainder of their first word's number."""
    x = _texts(seed)
    about = {"vocabulary": Vocabulary(WORD_LIST), "classes": ("x", "y", "z")}
    return _with_clients(x, x[:, 0].long() % OUTPUTS, **about)


def words(seed: int = 0) -> Dataset:
    """Texts, and the next word at each place."""
    x = _texts(seed)
    about: dict[str, Any] = {"vocabulary": Vocabulary(WORD_LIST), "classes": WORD_LIST}
    target: Target = "words"
    return _with_clients(x, x.roll(-1, 1), num_classes=WORDS, target=target, **about)


#: By objective: the data, and a small model.
TASKS: dict[str, tuple[Callable[..., Dataset], dict[str, Any]]] = {
    "classes": (classes, {"name": "mlp", "hidden": [6]}),
    "text_classes": (text_classes, {"name": "text_mean", "embedding": 4, "hidden": 6}),
    "regression": (numbers, {"name": "mlp", "hidden": [6]}),
    "multilabel": (labels, {"name": "mlp", "hidden": [6]}),
    "segmentation": (pixels, {"name": "unet", "channels": 2, "levels": 1}),
    "next_word": (words, {"name": "word_lstm", "embedding": 4, "hidden": 3}),
}


def recipe_of(objective: str, **sections: Any) -> dict[str, Any]:
    """Return a recipe of one round on a small task, with plans, so that nothing is measured."""
    model = TASKS[objective][1]
    found: dict[str, Any] = {
        "objective": {"name": objective},
        "model": dict(model),
        "partition": {"name": "natural"},
        "train": {"num_rounds": 1, "lr": 0.01, "batch_size": 8},
        "engine": {"workers": 1, "plans": {model["name"]: {"cohort_size": 3}}},
        "seed": 1,
    }
    return found | sections


#: What a federation states of each objective.
STATED: dict[str, dict[str, Any]] = {
    "regression": {
        "objective": {"name": "regression", "mean": [5.0, 50.0, 500.0], "std": [2.0, 20.0, 200.0]}
    },
    "multilabel": {"objective": {"name": "multilabel"}},
    "segmentation": {"objective": {"name": "segmentation"}},
}


def federated(objective: str, method: dict[str, Any], data: Dataset) -> dict[str, Any]:
    """Return a recipe of a federation whose three sites have the clients' rows."""
    found = recipe_of(objective, method=method) | STATED[objective]
    del found["partition"], found["engine"]
    found["data"] = {"classes": list(data.classes), "normalize": "none"}
    found["federation"] = {"least_sites": 3, "least_replies": 3}
    found["facts"] = {"input_shape": list(data.input_shape)}
    return found
