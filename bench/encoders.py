"""What FLESD costs: a step of its distillation against a bare loop, and memory with many rows."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedgist
from fedgist.data.dataset import Dataset
from fedgist.methods.flesd import Ensemble, SimilarityDistillation
from fedgist.models import MODELS
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.runs.prepare import prepare_run
from fedgist.runs.round import context

PUBLIC, CLIENTS, WIDTH = 10_000, 6, 128
ROWS, STEPS, BATCH, QUEUE = 64, 10, 128, 2048
LEARNING = "encoders: a step of FLESD's distillation, bare loop / ours"
PEAK = f"encoders: peak memory with {PUBLIC} public rows and {CLIENTS} clients, MB"


def encoders(repeats: int) -> dict[str, float]:
    """Compare distillations with bare loops, and look at the memory of a whole run."""
    torch.manual_seed(0)
    sent = functional.normalize(torch.randn(CLIENTS, PUBLIC, WIDTH), dim=2)
    ours, bare = _distillation(sent), _bare_loop(sent)
    best = {ours: math.inf, bare: math.inf}
    for repeat in range(repeats + 1):
        for work in (bare, ours):
            took = _seconds(work)
            best[work] = min(best[work], took) if repeat else math.inf
    command = [sys.executable, __file__]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {LEARNING: best[bare] / best[ours], PEAK: float(json.loads(out.splitlines()[-1]))}


def _seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _images(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)


def _recipe(**train: Any) -> dict[str, Any]:
    return {
        "objective": {"name": "simclr"},
        "partition": {"name": "iid"},
        "clients": {"num_clients": CLIENTS},
        "model": {"name": "conv4"},
        "method": {"name": "flesd", "distillation": {"epochs": 1}},
        "train": train,
        "evaluate": {"probe": "knn"},
        "engine": {"workers": 1},
    }


def _data() -> Dataset:
    x, y = _images(CLIENTS * ROWS), torch.arange(CLIENTS * ROWS) % 10
    return Dataset("images", x, y, x[:100], y[:100], 10, 255.0)


def _distillation(sent: Tensor) -> Callable[[], None]:
    """Return a function that does some steps of a distillation."""
    recipe = _recipe(batch_size=32)
    given = Overrides(data=_data(), public=_images(PUBLIC).numpy())
    world, _, engine = prepare_run(resolve(make(recipe), given))  # with its kernels
    engine.close()
    ctx = context(world.server, 1, "distill-0")
    settings = SimilarityDistillation(epochs=1, batch_size=BATCH, queue=QUEUE)
    ensemble = Ensemble(sent, torch.ones(CLIENTS), torch.zeros(0, 0))
    start = world.server.task.starts["conv4"]
    student = settings.begin(start, "projection", ctx)

    def work() -> None:
        now = student
        for lesson in settings.lessons(student, range(STEPS), ctx):
            now = settings.step(now, ensemble, start, "projection", lesson)

    return work


def _bare_loop(sent: Tensor) -> Callable[[], None]:
    """Return a function that does the same with plain modules."""
    x = _images(PUBLIC)

    def encoder() -> nn.Module:
        body = list(MODELS["conv4"]((3, 32, 32), WIDTH).children())[:-1]
        return nn.Sequential(*body, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    net, follower = encoder(), encoder()
    anchors = functional.normalize(torch.randn(QUEUE, WIDTH), dim=1)
    places = torch.randperm(PUBLIC)[:QUEUE]

    def work() -> None:
        nonlocal anchors, places
        optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
        for _ in range(STEPS):
            rows = torch.randperm(PUBLIC)[:BATCH]
            batch = x[rows].float().div(255.0)
            m = torch.zeros(BATCH, QUEUE)
            for r in sent:
                m += torch.exp((r[rows] @ r[places].T - 1.0) / 0.1)
            own = rows.unsqueeze(1) == places
            m = m.masked_fill(own, 0.0)
            target = m / m.sum(1, keepdim=True)
            q = functional.normalize(net(batch), dim=1) @ anchors.T / 0.1
            log_q = functional.log_softmax(q.masked_fill(own, -1e9), 1)
            loss = functional.kl_div(log_q, target, reduction="batchmean")
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            with torch.no_grad():
                for late, now in zip(follower.parameters(), net.parameters(), strict=True):
                    late.lerp_(now, 0.001)
                newest = functional.normalize(follower(batch), dim=1)
            anchors = torch.cat([anchors, newest])[-QUEUE:]
            places = torch.cat([places, rows])[-QUEUE:]

    return work


def _whole_run() -> float:
    """Do a round with many public rows; return the most memory that the process had, in MB."""
    recipe = _recipe(num_rounds=1, batch_size=32)
    fedgist.run(recipe, data=_data(), public=np.asarray(_images(PUBLIC)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    print(json.dumps(_whole_run()))
