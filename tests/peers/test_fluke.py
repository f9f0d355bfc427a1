"""Methods against the curves of Fluke 0.8.1, another library, in a setting that draws nothing.

The curves and their source are in ``fluke-0.8.1.json``. Every client trains on all its rows in one
batch, by SGD, from one start. So no shuffling, sampling or drawn start is left, and two right
implementations differ by rounding.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedgist
from fedgist.data.dataset import Dataset

RECORDED: dict[str, dict[str, list[float]]] = json.loads(
    Path(__file__).with_name("fluke-0.8.1.json").read_text("utf-8")
)["curves"]
ROUNDS, TRAINED = 15, 600
SIZES = (40, 60, 80, 100, 120, 150)  # rows of the clients, of which the last finds fewer
CLOSE = 1e-6  # in loss; measured 1.5e-7 at most
#: Settings in which the methods are those of Fluke: its clients keep one layer, and it takes the
#: plain mean of prototypes and predicts by logits.
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "fedavg": {},
        "fedprox": {"mu": 0.5},
        "fedper": {"local_layers": 1},
        "fedrep": {"local_layers": 1, "head_epochs": 2},
        "lg_fedavg": {"global_layers": 1},
        "fedproto": {"lam": 1.0, "aggregate": "plain", "inference": "logits"},
        "scaffold": {},
        "ditto": {"lam": 0.5},
        "moon": {"mu": 1.0, "temperature": 0.5},
    }
)


@cache
def data() -> Dataset:
    """scikit-learn's digits in a drawn order: the first 600 are training rows."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    rows = ((x / 16).astype(np.float32).reshape(-1, 1, 8, 8) - 0.3) / 0.38
    arrays = [torch.from_numpy(a[order]) for a in (rows, y)]
    (x_train, y_train), (x_test, y_test) = (
        [a[part] for a in arrays] for part in (slice(TRAINED), slice(TRAINED, None))
    )
    return Dataset("digits", x_train, y_train, x_test, y_test, 10)


def clients() -> tuple[list[Tensor], list[Tensor]]:
    """Rows of six clients: four classes each, and all test rows of these classes."""
    y, y_test = data().y.numpy(), data().y_test.numpy()
    draw, free = np.random.default_rng(3), set(range(TRAINED))
    rows, tests = [], []
    for number, size in enumerate(SIZES):
        classes = [(2 * number + i) % 10 for i in range(4)]
        chosen = draw.permutation([i for i in sorted(free) if y[i] in classes])[:size]
        free -= set(chosen.tolist())
        rows.append(torch.from_numpy(np.sort(chosen)))
        tests.append(torch.from_numpy(np.flatnonzero(np.isin(y_test, classes))))
    return rows, tests


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def curves(method: str, options: Mapping[str, Any]) -> dict[str, list[float]]:
    """Mean test loss and accuracy over the clients after each round."""
    rows, tests = clients()
    recipe = {
        "method": {"name": method, **options},
        "data": {"normalize": "none"},
        "train": {
            "num_rounds": ROUNDS,
            "local_epochs": 2,
            "batch_size": max(SIZES),
            "lr": 0.1,
            "optimizer": "sgd",
        },
        "engine": {"workers": 1, "cohort_size": len(SIZES)},
    }
    run = fedgist.run(recipe, data=data(), clients=rows, clients_test=tests, model=net())
    return {
        name: [line[f"eval/client/{name}_mean"] for line in run.rounds]
        for name in ("loss", "accuracy")
    }


def apart(one_curve: list[float], another: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one_curve, another, strict=True))


@pytest.mark.parametrize("method", OPTIONS)
def test_a_method_has_the_curves_of_another_library(method: str) -> None:
    computed = curves(method, OPTIONS[method])
    assert apart(computed["loss"], RECORDED[method]["loss"]) <= CLOSE
    # the same number of right rows, to the last one
    assert apart(computed["accuracy"], RECORDED[method]["accuracy"]) <= 1e-12


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedprox", {"mu": 0.499}),
        ("fedrep", {"local_layers": 1, "head_epochs": 1}),
        ("scaffold", {"server_lr": 0.999}),
        ("ditto", {"lam": 0.499}),
        ("moon", {"mu": 0.99, "temperature": 0.5}),
        ("fedproto", {**OPTIONS["fedproto"], "aggregate": "weighted"}),
    ],
)
def test_a_slightly_other_method_has_other_curves(method: str, options: dict[str, Any]) -> None:
    # so that the tolerance can tell a wrong formula
    assert apart(curves(method, options)["loss"], RECORDED[method]["loss"]) > 20 * CLOSE


def test_the_recorded_curves_differ_from_each_other() -> None:
    assert RECORDED.keys() == OPTIONS.keys()
    for first, second in itertools.combinations(RECORDED.values(), 2):
        assert all(len(values) == ROUNDS for values in first.values())
        assert apart(first["loss"], second["loss"]) > 1000 * CLOSE
