"""Execution plans: the number of stacked clients and the layout of layers, measured once.

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
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock
from platformdirs import user_cache_path
from pydantic import Field

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


Measure = Callable[[Plan], float]  # seconds per client and step


def sizes(clients: int, cores: int, most: int) -> list[int]:
    """Return stack sizes, at most ``most``, that give each core the same number of stacks."""
    candidates, stacks = {1}, 1
    while (size := math.ceil(clients / (cores * stacks))) > 1:
        candidates.add(min(size, most))
        stacks += max(1, stacks // 2)
    return sorted(candidates)


def choose(
    measure: Measure, sizes: Sequence[int], *, try_out: Measure, has_convolutions: bool
) -> Plan:
    """Return the fastest execution plan with one of these sizes.

    A model that fails or warns when it is tried stacked gets a plan without stacking, and the note
    gives the reason.
    """
    layouts: tuple[Convolutions, ...] = ("each", "stacked") if has_convolutions else ("stacked",)
    try:
        with warnings.catch_warnings():
            # torch warns if a layer has no batching rule and runs in a loop
            warnings.simplefilter("error")
            try_out(Plan(min(2, max(sizes)), layouts[0]))
    except Exception as error:  # noqa: BLE001  # a user's model may fail in any way
        try_out(Plan(1, stack=False))  # if it also fails unstacked, the user sees this error
        return Plan(1, stack=False, note=f"runs client by client: {first_line(error)[:200]}")
    best, fastest = Plan(1, layouts[0]), math.inf
    deadline = time.perf_counter() + PATIENCE_S
    by_likelihood = sorted(sizes, key=lambda k: abs(math.log(k / LIKELY)))
    for plan in (Plan(size, layout) for size in by_likelihood for layout in layouts):
        if time.perf_counter() > deadline and math.isfinite(fastest):
            break
        seconds = measure(plan)
        if seconds < fastest * GAIN:
            best, fastest = plan, seconds
    return best


def remembered(description: Mapping[str, Any], make: Callable[[], Plan]) -> Plan:
    """Return this machine's stored plan for ``description``, or make a plan and store it."""
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
        if (plan := _read(path)) is None:
            plan = make()
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(asdict(plan)), encoding="utf-8")
            part.replace(path)
        return plan
    finally:
        lock.release()


def _read(path: Path) -> Plan | None:
    try:
        return Plan(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _machine() -> dict[str, object]:
    return {
        "torch": metadata.version("torch"),
        "machine": [platform.node(), platform.machine()],
        "cores": os.cpu_count(),
    }
