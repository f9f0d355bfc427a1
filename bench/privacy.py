"""What privacy costs: rounds with clipping and noise against rounds without, interleaved."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from workloads import W1, fedgist_rounds

from fedgist.core.conjugate_head import map_head

ROUNDS = 1000  # among which a budget is divided: more than are timed
BUDGET = {"epsilon": 1.0, "delta": 0.01, "clip": 10.0}
RECORD, CLIENT = {"unit": "record", **BUDGET}, {"unit": "client", **BUDGET}
STEPS = {"bodies": "dp_sgd", "sampling_rate": 10 / 60, "gradient_clip": 1.0}
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedlog": ("fedlog", {}),
    "fedlog, records, central": ("fedlog", RECORD),
    "fedlog, records, local": ("fedlog", {**RECORD, "where": "local"}),
    "fedavg": ("fedavg", {}),
    "fedavg, clients, central": ("fedavg", CLIENT),
    "fedavg, clients, local": ("fedavg", {**CLIENT, "where": "local"}),
    "fedlog, private steps": ("fedlog", {**RECORD, **STEPS}),
}
CHEAP = [n for n in CONTENDERS if "," in n and "steps" not in n]  # at most a tenth of a round


def privacy(repeats: int) -> dict[str, float]:
    """Compare rounds of W1 with privacy and without; the exact head is timed beside them."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with contextlib.ExitStack() as stack:
        rounds = {
            name: stack.enter_context(_rounds(method, section))
            for name, (method, section) in CONTENDERS.items()
        }
        for repeat in range(repeats + 1):
            for name, round_of in rounds.items():
                took = round_of()
                if repeat:  # the first round of each warms up
                    seconds[name].append(took)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    figures = {f"privacy: {name}, median s": value for name, value in medians.items()}
    for name, value in medians.items():
        plain = name.partition(",")[0]
        if name != plain:
            figures[f"privacy: {name}, ratio"] = value / medians[plain]
    figures["privacy: head, share of a round"] = _head_s() / medians["fedlog"]
    return figures


def _rounds(
    method: str, section: dict[str, Any]
) -> contextlib.AbstractContextManager[Callable[[], float]]:
    train = {
        "num_rounds": ROUNDS,
        "local_epochs": W1.epochs,
        "batch_size": W1.batch_size,
        "optimizer": W1.optimizer,
        "lr": W1.lr,
    }
    return fedgist_rounds(W1, method={"name": method}, privacy=section, train=train)


def _head_s() -> float:
    """Return the seconds of the exact head of the workload's classes and features."""
    s = torch.rand(10, 51, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    s[:, 0] = 300.0
    begin = time.perf_counter()
    map_head(s, 1.0)
    return time.perf_counter() - begin
