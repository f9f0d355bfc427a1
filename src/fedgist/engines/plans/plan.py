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
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from platformdirs import user_cache_path

from fedgist.core.bounds import PositiveInt
from fedgist.core.nets.compiled.kernel_library import Compiled
from fedgist.errors import cut, first_line

Convolutions = Literal["each", "stacked"]
LIKELY = 16  # the size near this one is tried first
PATIENCE_S = 1.5  # stop trying other sizes after this long
GAIN = 0.98  # what is tried later must be this much faster
WORSE = 1.1  # a size that is so much slower ends the search in its direction


@dataclass(frozen=True)
class Plan:
    """An execution plan: clients per stack, layout of convolutions, and whether to stack at all."""

    cohort_size: PositiveInt
    """Number of clients trained together as one stack."""
    convolutions: Convolutions = "stacked"
    """``each`` runs convolutions client by client. ``stacked`` runs them for all clients at once.
    """
    stack: bool = True
    """Whether the model can be stacked. If not, clients are trained one by one."""
    note: str = ""
    """Why the model is not stacked."""
    kernels: Mapping[str, Compiled] = field(default_factory=dict)
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


def why_alone(try_out: Callable[[Plan], object], convolutions: Convolutions) -> str:
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
        return f"runs client by client: {cut(first_line(error), 200)}"
    return ""


def choose(
    measure: Measure,
    sizes: Sequence[int],
    layouts: Sequence[Convolutions] = ("stacked",),
    kernels: Mapping[str, Compiled] | None = None,
) -> Plan:
    """Return the fastest execution plan with one of these sizes and layouts.

    The way to compute is chosen with a likely size: with the ``kernels``, if there are any and
    torch's are not clearly faster, else by one of the layouts. Then larger and smaller sizes are
    tried, until these are slower or the time runs out.
    """
    deadline = time.perf_counter() + PATIENCE_S
    likely = min(sizes, key=lambda k: abs(math.log(k / LIKELY)))
    ways = [Plan(likely, layout) for layout in layouts]
    if kernels:
        ways.insert(0, replace(ways[0], kernels=kernels))
    best, fastest = ways[0], measure(ways[0])
    for plan in ways[1:]:
        if kernels and best == ways[0] and plan != ways[1]:
            break  # the kernels are faster than the better of torch's layouts
        seconds = measure(plan)
        if seconds < (fastest / WORSE if best.kernels else fastest * GAIN):
            best, fastest = plan, seconds
    larger, smaller = ([k for k in sizes if k > likely], [k for k in sizes if k < likely])
    for direction in (larger, smaller[::-1]):
        for size in direction:
            if time.perf_counter() > deadline:
                return best
            seconds = measure(replace(best, cohort_size=size))
            if seconds > fastest * WORSE:
                break
            if seconds < fastest * GAIN:
                best, fastest = replace(best, cohort_size=size), seconds
    return best


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
