"""What a server's distillation costs beside busy neighbours: threads that wait must not spin.

Each run is a process of its own, with two threads at the server, alone or beside one endless loop
on each core. CPU seconds are those of the process and its workers.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

TRAIN, TEST = 900, 100  # images
RECIPE = """
[data]
name = "npz"
path = "random.npz"
normalize = "none"

[clients]
num_clients = 4
pools.small.model = "codist_cnn"
pools.large.model = "codist_cnn"

[method]
name = "merged_codist"
distillation = { steps = 60, batch_size = 32 }

[data.public]
rows = 500

[train]
num_rounds = 3
batch_size = 32
optimizer = "sgd"

[evaluate]
on = "global"
every = 3

[engine]
workers = 1
"""
TORCHS = {"GOMP_SPINCOUNT": "300000"}  # how threads wait if fedgist's commands say nothing
CPU = "neighbour: CPU seconds of a distillation beside busy neighbours / alone"
WALL = "neighbour: seconds of a distillation alone / with threads that spin as torch's do"
NEIGHBOUR_LIMITS = {CPU: 1.5, WALL: 1.1}


def neighbour(repeats: int) -> dict[str, float]:
    """Return how much more a distillation costs beside neighbours, and alone, by medians."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        draw = np.random.default_rng(0)
        x, x_test = (draw.random((n, 3, 32, 32), dtype=np.float32) for n in (TRAIN, TEST))
        y, y_test = np.arange(TRAIN) % 10, np.arange(TEST) % 10
        np.savez(place / "random.npz", x=x, y=y, x_test=x_test, y_test=y_test)
        (place / "recipe.toml").write_text(RECIPE, "utf-8")
        _run(place, {})  # which chooses the plan
        for _ in range(repeats):
            seconds.setdefault("alone", []).append(_run(place, {}))
            seconds.setdefault("torch's", []).append(_run(place, TORCHS))
            with _busy(os.cpu_count() or 1):
                seconds.setdefault("busy", []).append(_run(place, {}))
    cpu, wall = (
        {name: statistics.median(pair[i] for pair in pairs) for name, pairs in seconds.items()}
        for i in (0, 1)
    )
    return {CPU: cpu["busy"] / cpu["alone"], WALL: wall["alone"] / wall["torch's"]}


def _run(place: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Return the CPU seconds and the seconds of a run."""
    shutil.rmtree(place / "run", ignore_errors=True)
    words = [sys.executable, "-m", "fedgist.cli", "run", "recipe.toml", "--quiet", "--out", "run"]
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    before, begin = _cpu_seconds(), time.perf_counter()
    subprocess.run(words, cwd=place, check=True, env=kept | environment)
    return _cpu_seconds() - before, time.perf_counter() - begin


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def _busy(cores: int) -> Iterator[None]:
    """Let an endless loop run on each core."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()
