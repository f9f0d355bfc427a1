"""What pools cost: a distillation against a bare loop, and many stateless clients against few."""

from __future__ import annotations

import atexit
import copy
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

import fedgist
from fedgist.data.dataset import Dataset
from fedgist.methods.common import codistillation
from fedgist.methods.common.averaging import Weights
from fedgist.methods.common.codistillation import Distillation
from fedgist.models import MODELS
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.recipe.schema import Recipe
from fedgist.runs.prepare import prepare_run
from fedgist.runs.round import ServerRun, context

FEW, MANY = 315, 34_000
ROWS, ROUNDS = 4, 60
STEPS, BATCH = 8, 128
CLIENTS, EACH, LOCAL = {"small": 8, "large": 4}, 100, 20  # a round's, their images, and a batch
DISTILLING = "pools: a step of a distillation, bare loop / ours"
WHOLE = "pools: a round with its distillation, bare loop / ours"
START = f"pools: {MANY} clients, s to start"
ROUND = f"pools: a round of {MANY} clients / of {FEW}"
MEMORY = f"pools: memory of {MANY} clients with {ROWS} rows, MB more than of {FEW}"
SIZES = {"small": ([16, 32, 32], [64, 128]), "large": ([32, 64, 64], [128, 256])}


def pools(repeats: int) -> dict[str, float]:
    """Compare distillations with bare loops, and federations of many clients with those of few."""
    few, many = (_federation_alone(count) for count in (FEW, MANY))
    return {
        DISTILLING: _faster(_distillation(), _bare_loop(), repeats),
        WHOLE: _faster(_round(), _bare_round(), repeats),
        START: many["start"],
        ROUND: many["round"] / few["round"],
        MEMORY: many["memory"] - few["memory"],
    }


def _faster(ours: Callable[[], None], bare: Callable[[], None], repeats: int) -> float:
    """Return how many times as fast ours is: the best of some, after one of each."""
    best = {ours: math.inf, bare: math.inf}
    for repeat in range(repeats + 1):
        for work in (bare, ours):
            took = _seconds(work)
            best[work] = min(best[work], took) if repeat else math.inf
    return best[bare] / best[ours]


def _seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _images() -> torch.Tensor:
    return torch.randint(0, 256, (2000, 3, 32, 32), dtype=torch.uint8)


def _distillation() -> Callable[[], None]:
    """Return a function that does a stage of a distillation, both ways."""
    world, _, engine = prepare_run(resolve(*_of_images(2, {})))  # with its kernels
    engine.close()
    ctx = context(world.server, 1, "distill-0")
    settings = Distillation(STEPS, BATCH, temperature=0.5, regularization=0.1)
    frozen = {name: Weights(net.state()) for name, net in world.server.task.starts.items()}
    students = codistillation.begin(frozen, ctx)

    def work() -> None:
        codistillation.learn(students, frozen, settings, ctx)

    return work


def _of_images(
    num_clients: int, per_round: Mapping[str, int], **sections: Any
) -> tuple[Recipe, Overrides]:
    x = _images()
    data = Dataset("images", x, torch.arange(len(x)) % 100, x[:100], torch.arange(100), 100, 255.0)
    tables: dict[str, dict[str, Any]] = {
        name: {"model": "codist_cnn", "channels": channels, "hidden": hidden}
        for name, (channels, hidden) in SIZES.items()
    }
    for name, count in per_round.items():
        tables[name]["per_round"] = count
    recipe: dict[str, Any] = {
        "clients": {"num_clients": num_clients, "pools": tables},
        "partition": {"name": "iid"},
        "method": {"name": "merged_codist"},
        "evaluate": {"on": "global", "every": 1000},
    }
    return make(recipe | sections), Overrides(data=data, public=x.numpy())


def _round() -> Callable[[], None]:
    """Return a function that does a round: clients of both pools, then a distillation."""
    recipe, given = _of_images(
        len(_images()) // EACH,
        CLIENTS,
        train={"num_rounds": 1000, "optimizer": "sgd", "lr": 0.1, "batch_size": LOCAL},
        method={"name": "merged_codist", "distillation": {"steps": STEPS, "batch_size": BATCH}},
    )
    world, server, engine = prepare_run(resolve(recipe, given))
    federation = ServerRun(world.server, engine, server)
    atexit.register(federation.engine.close)

    def work() -> None:
        federation.advance()

    return work


def _bare_round() -> Callable[[], None]:
    """Return a function that does the same with plain modules, client after client."""
    rows = _images()[:EACH].float().div(255.0), torch.arange(EACH)
    start = {
        name: MODELS["codist_cnn"]((3, 32, 32), 100, channels=channels, hidden=hidden)
        for name, (channels, hidden) in SIZES.items()
    }
    distil = _bare_loop()

    def work() -> None:
        for name, count in CLIENTS.items():
            learned = [_learned(start[name], *rows) for _ in range(count)]
            means = zip(*(net.parameters() for net in learned), strict=True)
            servers = torch.optim.Adam(start[name].parameters(), 1e-3)
            for own, of_clients in zip(start[name].parameters(), means, strict=True):
                own.grad = own.detach() - torch.stack(list(of_clients)).mean(0).detach()
            servers.step()
        distil()

    return work


def _learned(start: nn.Module, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """Return a model after an epoch on a client's rows."""
    net = copy.deepcopy(start)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for at in torch.split(torch.randperm(len(y)), LOCAL):
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(net(x[at]), y[at]))
        optimizer.step()
    return net


def _bare_loop() -> Callable[[], None]:
    """Return a function that distils with plain modules, each frozen one once a batch."""
    x = _images()
    nets: list[tuple[nn.Module, nn.Module]] = []
    for channels, hidden in SIZES.values():
        made = [
            MODELS["codist_cnn"]((3, 32, 32), 100, channels=channels, hidden=hidden)
            for _ in range(2)
        ]
        nets.append((made[0], made[1]))

    def work() -> None:
        optimizers = [torch.optim.Adam(net.parameters(), 1e-3, fused=True) for _, net in nets]
        for _ in range(STEPS):
            batch = x[torch.randperm(len(x))[:BATCH]].float().div(255.0)
            with torch.no_grad():
                logits = [frozen(batch) for frozen, _ in nets]
            for i, (_, student) in enumerate(nets):
                soft = torch.softmax(logits[1 - i] / 0.5, 1)
                target = 0.9 * soft + 0.1 * torch.softmax(logits[i], 1)
                log_q = functional.log_softmax(student(batch), 1)
                loss = functional.kl_div(log_q, target, reduction="batchmean")
                optimizers[i].zero_grad()
                torch.autograd.backward(loss)
                optimizers[i].step()

    return work


def _federation_alone(clients: int) -> dict[str, float]:
    """Run a federation in a process of its own, whose memory is nobody else's."""
    command = [sys.executable, __file__, str(clients)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def _federation(clients: int) -> dict[str, float]:

    x = torch.randn(clients * ROWS, 20)
    y = x[:, :10].argmax(1)
    sizes = {"small": [16], "large": [32]}
    tables: dict[str, dict[str, Any]] = {
        name: {"model": "mlp", "hidden": hidden, "per_round": 20} for name, hidden in sizes.items()
    }
    tables["large"]["clients"] = clients // 10
    recipe = {
        "partition": {"name": "iid"},
        "clients": {"num_clients": clients, "pools": tables},
        "train": {"num_rounds": ROUNDS, "optimizer": "sgd", "lr": 0.1, "batch_size": 4},
        "evaluate": {"on": "global", "every": 10},
        "method": {"name": "merged_codist", "distillation": {"steps": 4}},
        "engine": {"plans": {name: {"cohort_size": 10} for name in sizes}},
    }
    marks: list[float] = []
    data = (x.numpy(), y.numpy(), x[:1000].numpy(), y[:1000].numpy())
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        fedgist.run(
            recipe,
            data=data,
            public=x[:500].numpy(),
            out=f"{out}/run",
            callback=lambda _: marks.append(time.perf_counter()),
        )
    rounds = [after - before for before, after in itertools.pairwise(marks)]
    return {
        "start": marks[0] - begin,
        "round": statistics.median(rounds),
        "memory": psutil.Process().memory_info().rss / 1e6,
    }


if __name__ == "__main__":
    print(json.dumps(_federation(int(sys.argv[1]))))
