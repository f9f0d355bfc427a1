"""Execution plans: the number of stacked clients and the kernels of layers, measured once.

On a CPU, stacking makes linear layers faster and convolutions often slower. On a GPU, stacking
makes both faster. The best plan cannot be predicted, so a few steps of the real work are timed
before round 1. A lock prevents two runs from measuring at the same time. The plan is stored for the
next run. A plan changes the last bits of results, so a run keeps its plan to the end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock
from platformdirs import user_cache_path
from pydantic import Field

from fedgist.core.compiled.kernel_library import Kernel
from fedgist.errors import first_line

Convolutions = Literal["each", "stacked"]
LIKELY = 16  # sizes near this one are tried first, in case the time runs out
PATIENCE_S = 6.0  # stop trying larger stacks after this long
GAIN = 0.98  # a less likely size must be this much faster


@dataclass(frozen=True)
class Plan:
    """An execution plan: clients per stack, layout of convolutions, and whether to stack at all."""

    cohort_size: Annotated[int, Field(ge=1)]
    """Number of clients trained together as one stack."""
    convolutions: Convolutions = "stacked"
    """``each`` runs convolutions client by client. ``stacked`` runs them for all clients at once.
    """
    stack: bool = True
    """Whether the model can be stacked. If not, clients are trained one by one."""
    note: str = ""
    """Why the model is not stacked."""
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    """Kernels of single convolutions, by layer. ``compiled`` is what ``fedgist compile`` builds.

    Layers that are not named run as ``convolutions`` says.
    """


Measure = Callable[[Plan], float]  # seconds per client and step
Stored = Mapping[str, Any]  # what JSON can hold


def sizes(clients: int, cores: int, most: int) -> list[int]:
    """Return stack sizes, at most ``most``, that give each core the same number of stacks."""
    candidates, stacks = {1}, 1
    while (size := math.ceil(clients / (cores * stacks))) > 1:
        candidates.add(min(size, most))
        stacks += max(1, stacks // 2)
    return sorted(candidates)


def why_alone(try_out: Measure, convolutions: Convolutions) -> str:
    """Return why a model cannot be stacked, or nothing if it can be.

    ``try_out`` does a step by a plan. A model that fails or warns in a stack is not stacked.
    """
    try:
        with warnings.catch_warnings():
            # torch warns if a layer has no batching rule and runs in a loop
            warnings.simplefilter("error")
            try_out(Plan(2, convolutions))
    except Exception as error:  # noqa: BLE001  # a user's model may fail in any way
        try_out(Plan(1, stack=False))  # if it also fails unstacked, the user sees this error
        return f"runs client by client: {first_line(error)[:200]}"
    return ""


def choose(
    measure: Measure,
    sizes: Sequence[int],
    layouts: Sequence[Convolutions] = ("stacked",),
    kernels: Mapping[str, Kernel] | None = None,
) -> Plan:
    """Return the fastest execution plan with one of these sizes and layouts.

    If there are ``kernels``, all plans have them, unless the first size is faster without. With
    kernels, all plans have the faster layout of the first size.
    """
    best, fastest = Plan(1, layouts[0]), math.inf
    deadline = time.perf_counter() + PATIENCE_S
    by_likelihood = sorted(sizes, key=lambda k: abs(math.log(k / LIKELY)))
    sets: list[Mapping[str, Kernel]] = [kernels, {}] if kernels else [{}]
    plans = (
        Plan(size, layout, kernels=chosen)
        for size in by_likelihood
        for layout in layouts
        for chosen in sets
    )
    for plan in plans:
        if time.perf_counter() > deadline and math.isfinite(fastest):
            break
        if plan.cohort_size != by_likelihood[0] and not _like(plan, best):
            continue
        seconds = measure(plan)
        if seconds < fastest * GAIN:
            best, fastest = plan, seconds
    return best


def _like(plan: Plan, best: Plan) -> bool:
    """Return whether a plan has the kernels of the best one, and its layout if it has some."""
    same_layout = not best.kernels or plan.convolutions == best.convolutions
    return plan.kernels == best.kernels and same_layout


def remembered(description: Mapping[str, object], make: Callable[[], Stored]) -> Stored:
    """Return what this machine has stored for ``description``, or make it and store it."""
    text = json.dumps({**_machine(), **description}, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = user_cache_path("fedgist") / "plans"
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        lock.acquire()
    except OSError:  # the cache cannot be written: measure every time
        return make()
    try:
        if (values := _read(path)) is None:
            values = make()
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(values), encoding="utf-8")
            part.replace(path)
        return values
    finally:
        lock.release()


def _read(path: Path) -> Stored | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _machine() -> dict[str, object]:
    return {
        "torch": metadata.version("torch"),
        "machine": [platform.node(), platform.machine()],
        "cores": os.cpu_count(),
    }
