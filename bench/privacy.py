"""What privacy costs: rounds with it against rounds without; noise of the system and the seed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from workloads import NOISE, W1, Workload, fedgist_rounds

from fedgist.methods.common.conjugate_head import map_head

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
SYSTEM = {"noise": "system"}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedlog, records, central": ("fedlog", RECORD),
    "fedlog, records, local": ("fedlog", {**RECORD, "where": "local"}),
    "fedavg, clients, central": ("fedavg", CLIENT),
    "fedavg, clients, local": ("fedavg", {**CLIENT, "where": "local"}),
    "fedlog, private steps": ("fedlog", {**RECORD, **STEPS}),
}
NOISE_LIMITS = {  # of noise of the system against noise of the seed
    f"noise: {name}, ratio": 1.1 if "records" in name else 1.3 if "clients" in name else 1.5
    for name in SOURCES
}
CHEAP = [n for n in CONTENDERS if "," in n and "steps" not in n]  # at most a tenth of a round


def privacy(repeats: int) -> dict[str, float]:
    """Compare rounds of W1 with privacy and without; the exact head is timed beside them."""
    medians = _medians({n: (W1, "auto", *about) for n, about in CONTENDERS.items()}, repeats)
    figures = {f"privacy: {name}, median s": value for name, value in medians.items()}
    for name, value in medians.items():
        plain = name.partition(",")[0]
        if name != plain:
            figures[f"privacy: {name}, ratio"] = value / medians[plain]
    figures["privacy: head, share of a round"] = _head_s() / medians["fedlog"]
    return figures


def noise(repeats: int) -> dict[str, float]:
    """Compare noise of the system with noise of the seed: 20 clients of 100,180 parameters."""
    medians: dict[str, float] = {}
    for name, (method, section) in SOURCES.items():
        pair: dict[str, Contender] = {
            f"{name}, seed": (NOISE, 1, method, section),
            f"{name}, system": (NOISE, 1, method, {**section, **SYSTEM}),
        }
        medians |= _medians(pair, repeats if "steps" in name else 8 * repeats)
    figures = {f"noise: {name}, median s": value for name, value in medians.items()}
    for name in SOURCES:
        figures[f"noise: {name}, ratio"] = medians[f"{name}, system"] / medians[f"{name}, seed"]
    return figures


Contender = tuple[Workload, int | str, str, dict[str, Any]]


def _medians(contenders: Mapping[str, Contender], repeats: int) -> dict[str, float]:
    """Return the median seconds of each contender's rounds, done in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack:
        rounds = {n: stack.enter_context(_rounds(*about)) for n, about in contenders.items()}
        for repeat in range(repeats + 1):
            for name, round_of in rounds.items():
                took = round_of()
                if repeat:  # the first round of each warms up
                    seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _rounds(
    work: Workload, workers: int | str, method: str, section: dict[str, Any]
) -> contextlib.AbstractContextManager[Callable[[], float]]:
    train = {
        "num_rounds": ROUNDS,
        "local_epochs": work.epochs,
        "batch_size": work.batch_size,
        "optimizer": work.optimizer,
        "lr": work.lr,
    }
    about = {"method": {"name": method}, "privacy": section, "train": train}
    return fedgist_rounds(work, workers, **about)


def _head_s() -> float:
    """Return the seconds of the exact head of the workload's classes and features."""
    s = torch.rand(10, 51, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    s[:, 0] = 300.0
    begin = time.perf_counter()
    map_head(s, 1.0)
    return time.perf_counter() - begin
