"""How many clients to stack, and how their convolutions run: measured on the machine at hand, once.

On a CPU stacked linear layers win and stacked convolutions often lose; on a GPU stacking is the point. Nobody can tell
beforehand, so a few steps of the real work are timed before round 1, under a lock (runs that time at once mislead each
other), and remembered for the next run. The choice moves the last bits of results, so a run keeps its plan for life.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock
from platformdirs import user_cache_path

Convolutions = Literal["each", "stacked"]
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PATIENCE_S = 6.0  # stop trying larger stacks after this long
GAIN = 0.98  # a larger stack must be this much faster to be worth its memory


@dataclass(frozen=True)
class Plan:
    """K clients a stack, the layout of convolutions, and whether the model can be stacked at all (``stack``)."""

    cohort_size: int
    convolutions: Convolutions = "stacked"
    stack: bool = True
    note: str = ""


Measure = Callable[[Plan], float]  # seconds per client and step


def choose(measure: Measure, most: int, *, has_convolutions: bool, fixed: int | None = None) -> Plan:
    """Return the fastest plan with at most ``most`` clients a stack (or exactly ``fixed``).

    A model that fails or warns when stacked gets the plan that runs it client by client; the note says why.
    """
    layouts: tuple[Convolutions, ...] = ("each", "stacked") if has_convolutions else ("stacked",)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where a layer has no batching rule and is looped over
            measure(Plan(min(2, most), layouts[0]))
    except Exception as error:  # noqa: BLE001  # a user's model may fail in any way
        measure(Plan(1, stack=False))  # if it fails alone too, this is the error to show
        return Plan(1, stack=False, note=f"runs client by client: {str(error).splitlines()[0][:200]}")
    best, fastest = Plan(1, layouts[0]), math.inf
    deadline = time.perf_counter() + PATIENCE_S
    for plan in _candidates(layouts, most, fixed):
        if time.perf_counter() > deadline and math.isfinite(fastest):
            break
        seconds = measure(plan)
        if seconds < fastest * GAIN:
            best, fastest = plan, seconds
    return best


def _candidates(layouts: tuple[Convolutions, ...], most: int, fixed: int | None) -> Iterator[Plan]:
    sizes = [fixed] if fixed else [k for k in SIZES if k < most] + [most]
    for size in sorted(sizes, key=lambda k: abs(math.log(k / 16))):  # likely ones first, in case patience ends
        for layout in layouts:
            yield Plan(size, layout)


def remembered(description: Mapping[str, Any], make: Callable[[], Plan]) -> Plan:
    """Return the plan kept for this machine and ``description``, or make one and keep it, one process at a time."""
    text = json.dumps({**_machine(), **description}, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = user_cache_path("fedgist") / "plans"
    path = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        lock.acquire()
    except OSError:  # no cache to be had: measure every time
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
    return {"torch": torch.__version__, "machine": [platform.node(), platform.machine()], "cores": os.cpu_count()}
