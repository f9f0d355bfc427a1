"""Small worlds for tests of methods and engines.

Blobs of numbers, uneven clients, two architectures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fedgist.core import random
from fedgist.core.method import Method
from fedgist.data.dataset import Dataset
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.stacking_plan import Plan
from fedgist.federation.recipe import make
from fedgist.federation.record import Line
from fedgist.federation.round_loop import Federation, start_server
from fedgist.federation.runner import settings
from fedgist.federation.world import Given, World, make_world
from fedgist.methods import METHODS

CLASSES = 3
#: Rows of each client: uneven, one with a single row, and no client has every class.
SIZES = (11, 1, 7, 4, 9)


def blobs(seed: int = 0, features: int = 6, classes: int = CLASSES) -> Dataset:
    """Noisy class centres; the training rows are sorted by class."""
    key = random.key(seed, "blobs")
    centers = 2 * random.normal(random.fold(key, 0), (classes, features))
    y = torch.arange(sum(SIZES)) * classes // sum(SIZES)
    y_test = torch.arange(30) % classes
    x = centers[y] + random.normal(random.fold(key, 1), (len(y), features))
    x_test = centers[y_test] + random.normal(random.fold(key, 2), (30, features))
    return Dataset(
        "blobs", x, y, x_test, y_test, classes, mean=(0.5,) * features, std=(2.0,) * features
    )


def rows() -> list[torch.Tensor]:
    """Contiguous rows of each client."""
    return list(torch.split(torch.arange(sum(SIZES)), list(SIZES)))


def world(method: str = "fedavg", *, given: dict[str, Any] | None = None, **sections: Any) -> World:
    """A world of five uneven clients."""
    raw: dict[str, Any] = {
        "clients": {"num_clients": len(SIZES), "architectures": sections.pop("architectures", {})},
        "model": {"name": "mlp", "hidden": [5]},
        "method": {"name": method, **sections.pop("options", {})},
        "train": {
            "num_rounds": 3,
            "local_epochs": 2,
            "batch_size": 4,
            "lr": 0.05,
            "optimizer": "sgd",
        },
        "engine": {"workers": 1, "checkpoint_every": 1},
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values} if isinstance(values, dict) else values
    tests = list(torch.split(torch.arange(30), 6))
    mine: dict[str, Any] = {"data": blobs(), "clients": rows(), "clients_test": tests} | (
        given or {}
    )
    return make_world(make(raw), Given(**mine))


def two_architectures(method: str) -> dict[str, Any]:
    """Two models where a method can have them (they end in features of one width)."""
    if METHODS[method].merges_clients:
        return {}
    return {
        "wide": {"model": "mlp", "hidden": [7, 5], "share": 0.4},
        "flat": {"model": "mlp", "hidden": [5], "share": 0.6},
    }


@dataclass
class Trace:
    """What a short run leaves behind."""

    rounds: list[Line]
    clients: list[Line]
    state: dict[str, torch.Tensor]


def federation(
    here: World, plan: Plan = Plan(2), engine: type[LocalEngine] = LocalEngine
) -> Federation:
    """A federation whose every architecture has one plan."""
    plans = dict.fromkeys(here.task.architectures, plan)
    made = engine(here.method, here.task, here.population, settings(here.recipe), plans)
    return Federation(here, made, start_server(here))


def trace(here: World, plan: Plan = Plan(2), rounds: int = 3) -> Trace:
    """Run some rounds."""
    fed = federation(here, plan)
    lines, details = [], []
    try:
        if fed.method.stages(fed.context("", 0)):
            lines.append(fed.do_round(0)[0])
        for _ in range(rounds):
            line, several = fed.advance()
            lines.append({k: v for k, v in line.items() if not k.startswith("time/")})
            details += several
        saved = fed.checkpoint()
        state = {f"server/{k}": v for k, v in saved.server.items()} | {
            f"clients/{k}": v.clone() for k, v in saved.clients.items()
        }
    finally:
        fed.engine.close()
    return Trace(lines, details, state)


def with_method(here: World, method: Method) -> World:
    """The same world under another method object."""
    return replace(here, method=method)
