"""FLESD's distillation on a GPU, in the paper's sizes: a step against a bare loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_setting import Measured, Setting, in_turns, ratios, summary
from torch import Tensor, nn
from torch.nn import functional

from fedgist.data.dataset import Dataset
from fedgist.methods.common.server_training import STAGE, STEPS_AT_ONCE
from fedgist.methods.flesd import Ensemble, SimilarityDistillation
from fedgist.models import MODELS
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.runs.round import context
from fedgist.testing.small_worlds import world_of

REPEATS = 5
CHANGES = ["resized_crop", "flip", "color_jitter", "grayscale"]
TEMPERATURE = 0.1


@dataclass(frozen=True)
class Sizes:
    """Numbers of a distillation: public rows, clients that sent theirs, anchors.

    ``hidden`` is the width of the encoder's features, ``out`` that of what is compared.
    """

    model: str
    hidden: int
    public: int
    clients: int
    batch: int
    queue: int
    out: int = 128


#: Section 5.1 of the paper: a sixth of CIFAR-10 is public, five clients send.
PAPER = Sizes("resnet18", 512, 50_000 // 6, 5, 128, 2048)
TINY = Sizes("conv4", 64, 40, 2, 8, 16)


def flesd(setting: Setting) -> Measured:
    """Yield seconds per step and memory: ours, a bare loop, and ours with augmented images."""
    sizes, device = (TINY if setting.quick else PAPER), setting.device
    makers: dict[str, Callable[[], Callable[[], None]]] = {
        "fedgist": lambda: distillation_stage(sizes, device, augmented=False),
        "bare, fused": lambda: _stage(bare_step(sizes, device, fused=True)),
        "bare": lambda: _stage(bare_step(sizes, device, fused=False)),
        "fedgist, augmented images": lambda: distillation_stage(sizes, device, augmented=True),
    }
    turns: dict[str, Callable[[], list[float]]] = {}
    for name, make_stage in makers.items():
        before = setting.held()
        stage = make_stage()
        setting.held()
        stage()
        yield {"peak_mb": {name: setting.peak_mb(before)}}
        turns[name] = _turn(stage, setting)
    for seconds in in_turns(turns, 1 if setting.quick else REPEATS, setting):
        compared = {name: values for name, values in seconds.items() if "augmented" not in name}
        yield {"seconds": summary(seconds), **ratios(compared)}


def _stage(step: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does as many steps as a stage has, without a wait between them."""

    def stage() -> None:
        for _ in range(STEPS_AT_ONCE):
            step()

    return stage


def _turn(stage: Callable[[], None], setting: Setting) -> Callable[[], list[float]]:
    """Return a function that does a stage: the seconds of one of its steps."""
    seconds = setting.timed(stage)
    return lambda: [seconds() / STEPS_AT_ONCE]


def _images(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draw)


def _sent(sizes: Sizes, device: str) -> Tensor:
    """Return made-up representations that clients sent, (clients, rows, width)."""
    draw = torch.Generator().manual_seed(0)
    sent = torch.randn(sizes.clients, sizes.public, sizes.out, generator=draw)
    return functional.normalize(sent, dim=2).to(device)


def distillation_stage(sizes: Sizes, device: str, *, augmented: bool) -> Callable[[], None]:
    """Return a function that does the next stage of fedgist's distillation."""
    x, y = _images(60), torch.arange(60) % 10
    recipe: dict[str, Any] = {
        "data": {"public": {"augment": CHANGES}} if augmented else {},
        "objective": {"name": "simclr", "projection": sizes.out},
        "partition": {"name": "iid"},
        "clients": {"num_clients": sizes.clients},
        "model": {"name": sizes.model},
        "method": {
            "name": "flesd",
            "distillation": {"queue": sizes.queue, "batch_size": sizes.batch},
        },
        "train": {"batch_size": 8},
        "evaluate": {"probe": "knn"},
        "engine": {"workers": 1, "device": device},
    }
    data = Dataset("images", x, y, x, y, 10, 255.0)
    given = Overrides(data=data, public=_images(sizes.public).numpy())
    world = world_of(make(recipe), given)
    ctx = context(world.server, 1, f"{STAGE}-0")
    settings = SimilarityDistillation(batch_size=sizes.batch, queue=sizes.queue)
    filled = torch.ones(sizes.clients, device=device)
    ensemble = Ensemble(_sent(sizes, device), filled, torch.zeros(0, 0, device=device))
    start = world.server.task.starts[sizes.model]
    now, number = settings.begin(start, "projection", ctx), 0

    def stage() -> None:
        nonlocal now, number
        at = replace(ctx, stage=f"{STAGE}-{number}")
        now = settings.learn(now, ensemble, start, "projection", at)
        number += 1

    return stage


def _encoder(sizes: Sizes, device: str) -> nn.Module:
    body = list(MODELS[sizes.model]((3, 32, 32), sizes.out).children())[:-1]
    projection = nn.Linear(sizes.hidden, sizes.hidden), nn.ReLU()
    last = nn.Linear(sizes.hidden, sizes.out)
    return nn.Sequential(*body, *projection, last).to(device)


def bare_step(sizes: Sizes, device: str, *, fused: bool) -> Callable[[], None]:
    """Return a function that does a step with plain modules, all of its data on the device."""
    x, sent = _images(sizes.public).to(device), _sent(sizes, device)
    net, follower = _encoder(sizes, device), _encoder(sizes, device).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=fused or None)
    anchors = functional.normalize(torch.randn(sizes.queue, sizes.out, device=device), dim=1)
    places = torch.randperm(sizes.public, device=device)[: sizes.queue]

    def step() -> None:
        nonlocal anchors, places
        rows = torch.randperm(sizes.public, device=device)[: sizes.batch]
        batch = x[rows].float().div_(255.0)
        with torch.no_grad():
            newest = functional.normalize(follower(batch), dim=1)
            anchors = torch.cat([anchors, newest])[-sizes.queue :]
            places = torch.cat([places, rows])[-sizes.queue :]
            hidden = rows.unsqueeze(1) == places
            hidden[:, -sizes.batch :] = False
            target = _target(sent, rows, places).masked_fill_(hidden, 0.0)
            target /= target.sum(1, keepdim=True)
        q = functional.normalize(net(batch), dim=1) @ anchors.mT / TEMPERATURE
        log_q = functional.log_softmax(q.masked_fill(hidden, -1e9), 1)
        optimizer.zero_grad()
        torch.autograd.backward(functional.kl_div(log_q, target, reduction="batchmean"))
        optimizer.step()
        with torch.no_grad():
            late: list[Tensor] = list(follower.parameters())
            torch._foreach_lerp_(late, list(net.parameters()), 0.001)  # one kernel for all

    return step


def _target(sent: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Return the summed similarities of rows to anchors, (rows, anchors)."""
    total = torch.zeros(len(rows), len(places), device=sent.device)
    for r in sent:
        total += torch.exp((r[rows] @ r[places].mT - 1.0) / TEMPERATURE)
    return total
