"""A round of five methods at their papers' sizes, against bare loops of the same methods.

FedLog, FedProto and FedPer: FedLog's MNIST setting, 50 clients x 60 images, 5 epochs in batches of
10. Representation sharing: its MNIST setting, 5 clients x 240 images, batches of 32. MergedCodist:
its CIFAR setting, 20 clients of each pool x 100 images, batches of 20, and 32 steps of distillation
on 128 public images. Nothing is cut. Rounds are timed without evaluation.

That the bare loops reach the methods' accuracy is shown by tests/methods/test_bare_loops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from bare_methods import (
    Bare,
    Clients,
    Codistillation,
    Rows,
    bare_fedlog,
    bare_fedper,
    bare_fedproto,
    bare_merged_codist,
    bare_repshare,
    shift_batch,
    shift_each,
)
from paper_sizes import CODISTILLATION_CIFAR, FEDLOG_MNIST, REPSHARE_MNIST, PaperSize
from torch import nn
from turns import compared
from workloads import NEVER, rounds_of

from fedgist.engines.worker_pool import default_workers
from fedgist.models import MODELS
from fedgist.runs.prepare import prepare_run

SIZES = {
    "fedlog": FEDLOG_MNIST,
    "fedproto": FEDLOG_MNIST,
    "fedper": FEDLOG_MNIST,
    "repshare": REPSHARE_MNIST,
    "merged_codist": CODISTILLATION_CIFAR,
}
# as in the bare loop: the recipe's FedPer keeps two layers at the clients
CHANGES = {"fedper": ("method.local_layers=1",)}
UNEVALUATED = (f"train.num_rounds={NEVER}", f"evaluate.every={NEVER}")
LARGE = {"channels": [32, 64, 64], "hidden": [128, 256]}
SERVER = Codistillation(
    alpha=0.5,
    server_lr=3e-3,
    steps=32,
    batch_size=128,
    lr=1e-3,
    temperature=0.5,
    regularization=0.3,
    mixup=2,
    augment=shift_batch,
    augment_public=shift_each,
)


def methods(repeats: int) -> dict[str, float]:
    """Compare a round of each method with a round of its bare loop, in turns."""
    figures: dict[str, float] = {}
    for method, size in SIZES.items():
        figures |= _compared(method, size, repeats)
    return figures


def _compared(method: str, size: PaperSize, repeats: int) -> dict[str, float]:
    threads, made = torch.get_num_threads(), LOOPS[method](size)
    kinds = [(fused, count) for fused in (False, True) for count in sorted({1, threads})]
    bare = {
        f"bare, {'fused, ' if fused else ''}{count} threads": made(fused, count).do_round
        for fused, count in kinds
    }
    changes = (*UNEVALUATED, *CHANGES.get(method, ()))
    with rounds_of(*prepare_run(size.setup(method, *changes))) as round_of:
        ours = {f"fedgist, {default_workers('cpu')} workers": round_of}
        return compared(method, {**ours, **bare}, repeats)


Made = Callable[[bool, int], Bare]  # with Adam's fused form or another, and some threads


def _fedlogs(loop: Callable[[Clients], Bare]) -> Callable[[PaperSize], Made]:
    def made(size: PaperSize) -> Made:
        build = _builder(size, "fedlog_mnist")
        clients = Clients(_rows(size, 50, 60), build, 10, batch_size=10, epochs=5, lr=1e-3)
        return lambda fused, threads: loop(replace(clients, fused=fused, threads=threads))

    return made


def _sharing(size: PaperSize) -> Made:
    build = _builder(size, "lenet5")
    clients = Clients(_rows(size, 5, 240), build, 10, batch_size=32, epochs=1, lr=1e-3)
    return lambda fused, threads: bare_repshare(replace(clients, fused=fused, threads=threads))


def _codistilled(size: PaperSize) -> Made:
    rows, public = _rows(size, 315, 100), torch.randn(13_500, *size.shape)
    small, large = _builder(size, "codist_cnn"), _builder(size, "codist_cnn", **LARGE)
    pools = [
        Clients(own, build, 100, batch_size=20, epochs=1, lr=0.03)
        for own, build in ((rows, small), (rows[:31], large))
    ]

    def made(fused: bool, threads: int) -> Bare:  # noqa: FBT001  # a kind of loop, not a switch
        timed = [replace(pool, fused=fused, threads=threads) for pool in pools]
        return bare_merged_codist(timed, 20, public, SERVER)

    return made


LOOPS: dict[str, Callable[[PaperSize], Made]] = {
    "fedlog": _fedlogs(bare_fedlog),
    "fedproto": _fedlogs(bare_fedproto),
    "fedper": _fedlogs(bare_fedper),
    "repshare": _sharing,
    "merged_codist": _codistilled,
}


def _rows(size: PaperSize, clients: int, each: int) -> list[Rows]:
    """Return random rows of each client."""
    y = torch.arange(each) % size.classes
    return [(torch.randn(each, *size.shape), y) for _ in range(clients)]


def _builder(size: PaperSize, model: str, **options: Any) -> Callable[[], nn.Sequential]:
    def build() -> nn.Sequential:
        module = MODELS[model](size.shape, size.classes, **options)
        assert isinstance(module, nn.Sequential)
        return module

    return build
