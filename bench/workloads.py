"""The workloads, and two ways to do their rounds: by fedgist, and by a bare PyTorch loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedgist.core.tree import Tree
from fedgist.data.dataset import Dataset
from fedgist.engines.engine import Engine
from fedgist.models import MODELS
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.runs.prepare import prepare_run
from fedgist.runs.round import ServerRun
from fedgist.world.world import World

NEVER = 10**6  # rounds between evaluations: what is timed is training


@dataclass(frozen=True)
class Workload:
    """A number of clients with random images, of which ``sampled`` train in each round."""

    name: str
    clients: int
    sampled: int
    rows: int
    shape: tuple[int, ...]
    model: dict[str, Any]
    optimizer: str
    lr: float
    batch_size: int
    epochs: int
    learnable: bool = False  # whether labels can be learned from the images

    def data(self) -> Dataset:
        """Return random images and labels, as their content does not change the time."""
        draw = torch.Generator().manual_seed(0)
        count = self.clients * self.rows

        def images(number: int) -> torch.Tensor:
            return torch.randint(0, 256, (number, *self.shape), dtype=torch.uint8, generator=draw)

        x, y = images(count), torch.randint(0, 10, (count,), generator=draw)
        if self.learnable:
            x = x // 2 + images(10)[y] // 2
        return Dataset(
            "random",
            x,
            y,
            images(1000),
            torch.randint(0, 10, (1000,), generator=draw),
            10,
            scale=255.0,
        )

    def training(self) -> dict[str, Any]:
        """Return the recipe's section of training."""
        return {
            "num_rounds": NEVER,
            "fraction_train": self.sampled / self.clients,
            "local_epochs": self.epochs,
            "batch_size": self.batch_size,
            "optimizer": self.optimizer,
            "lr": self.lr,
        }

    def module(self) -> nn.Module:
        """Return a new module of the workload's model."""
        options = {k: v for k, v in self.model.items() if k != "name"}
        return MODELS[self.model["name"]](self.shape, 10, **options)


W1 = Workload(
    "W1", 50, 50, 60, (1, 28, 28), {"name": "fedlog_mnist", "dropout": 0.0}, "adam", 1e-3, 10, 5
)
W1_DROPOUT = replace(W1, name="W1 with dropouts", model={"name": "fedlog_mnist", "dropout": 0.5})
W2 = Workload(
    "W2", 100, 100, 500, (3, 32, 32), {"name": "fedlog_cifar", "dropout": 0.0}, "adam", 5e-4, 50, 1
)
W3 = Workload("W3", 1000, 100, 20, (1, 28, 28), {"name": "mlp", "hidden": [64]}, "sgd", 0.1, 20, 1)
NOISE = Workload(
    "noise", 20, 20, 60, (1, 28, 28), {"name": "mlp", "hidden": [126]}, "adam", 1e-3, 10, 5
)
W3_LARGE = replace(W3, name="W3 with 10,000 clients", clients=10_000)
TWO_ROWS = replace(W3, name="1,000 clients", sampled=1000, rows=2, batch_size=2)
TWO_ROWS_LARGE = replace(TWO_ROWS, name="100,000 clients", clients=100_000, sampled=100_000)
WORKLOADS = {w.name: w for w in (W1, W1_DROPOUT, W2, W3, W3_LARGE, TWO_ROWS, TWO_ROWS_LARGE)}


def opened(
    work: Workload,
    workers: int | str = "auto",
    engine: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> tuple[World, Tree, Engine]:
    """Return the world of a workload, with its plans, the server's state, and the engine.

    ``sections`` are further ones of the recipe, or stand in the place of the workload's.
    """
    recipe = make(
        {
            "model": work.model,
            "method": {"name": "fedavg"},
            "clients": {"num_clients": work.clients},
            "evaluate": {"every": NEVER},
            "engine": {"workers": workers, **(engine or {})},
            "train": work.training(),
            **sections,
        }
    )
    rows = list(torch.split(torch.arange(work.clients * work.rows), work.rows))
    tests = [rows[0][:1]] * work.clients
    given = Overrides(work.data(), clients=rows, clients_test=tests)
    return prepare_run(resolve(recipe, given))


def plans_of(work: Workload) -> dict[str, Any]:
    """Return the plans of a workload as a recipe holds them, timed on this machine."""
    world, _, engine = opened(work)
    engine.close()
    plans: dict[str, Any] = world.server.recipe.model_dump(mode="json")["engine"]["plans"]
    return plans


@contextmanager
def fedgist_rounds(
    work: Workload,
    workers: int | str = "auto",
    engine: Mapping[str, Any] | None = None,
    **sections: Mapping[str, Any],
) -> Iterator[Callable[[], float]]:
    """Yield a function that does one round of FedAvg and returns its seconds.

    ``engine`` and ``sections`` are those of :func:`opened`.
    """
    with rounds_of(*opened(work, workers, engine, **sections)) as do_round:
        yield do_round


@contextmanager
def rounds_of(world: World, server: Tree, clients: Engine) -> Iterator[Callable[[], float]]:
    """Yield a function that does one round of a prepared run and returns its seconds."""
    federation = ServerRun(world.server, clients, server)

    def do_round() -> float:
        begin = time.perf_counter()
        federation.advance()
        return time.perf_counter() - begin

    try:
        yield do_round
    finally:
        federation.engine.close()


def bare_rounds(
    work: Workload, *, fused: bool, threads: int, device: str = "cpu", capturable: bool = False
) -> Callable[[], float]:
    """Return a function that does the same with one module and ``torch.optim``, without fedgist.

    Images, labels and the order of rows are on the device from the start. ``capturable`` is an
    option of torch's Adam on a GPU.
    """
    data = work.data()
    x, y = data.x.to(device).float().div_(255), data.y.to(device)
    module = work.module().to(device)
    glob = {k: v.clone() for k, v in module.state_dict().items()}

    def optimizer() -> torch.optim.Optimizer:
        if work.optimizer == "sgd":
            return torch.optim.SGD(module.parameters(), lr=work.lr, fused=fused or None)
        kind = torch.optim.Adam
        return kind(module.parameters(), lr=work.lr, fused=fused or None, capturable=capturable)

    def do_round() -> float:
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        total = {k: torch.zeros_like(v) for k, v in glob.items()}
        for client in torch.randperm(work.clients)[: work.sampled].tolist():
            module.load_state_dict(glob)
            steps = optimizer()
            for _ in range(work.epochs):
                for rows in torch.split(
                    torch.randperm(work.rows, device=device) + client * work.rows,
                    work.batch_size,
                ):
                    steps.zero_grad()
                    torch.autograd.backward(F.cross_entropy(module(x[rows]), y[rows]))
                    steps.step()
            for name, value in module.state_dict().items():
                total[name] += work.rows * value
        for name, value in total.items():
            glob[name] = value / (work.rows * work.sampled)
        return time.perf_counter() - begin

    return do_round
