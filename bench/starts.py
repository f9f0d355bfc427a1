"""How long a run takes until round 1 begins, with a remembered plan and without, and `--help`."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedgist.core.nets.compiled.kernel_library import library, library_path

TRAIN, TEST = 60_000, 10_000  # images, as MNIST has
FRESH = "start: `fedgist run` to round 1, plan timed, median s"
REMEMBERED = "start: `fedgist run` to round 1, plan remembered, median s"
OTHER_METHOD = "start: the same with a second method, median s"
HELP = "start: `fedgist --help`, median s"


def starts(repeats: int) -> dict[str, float]:
    """Run FedLog's MNIST recipe for a round, with random images, in processes of their own."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _write_images(place / "random.npz")
        for _ in range(repeats):
            cache = place / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            _take_kernels(cache)
            for name, method in (
                (FRESH, "fedlog"),
                (REMEMBERED, "fedlog"),
                (OTHER_METHOD, "fedavg"),
            ):
                seconds.setdefault(name, []).append(_start(place, cache, method))
            begin = time.perf_counter()
            fedgist_in(cache, "--help")
            seconds.setdefault(HELP, []).append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _start(place: Path, cache: Path, method: str) -> float:
    """Return the seconds of a run of one round, without those of the round."""
    out = place / "run"
    shutil.rmtree(out, ignore_errors=True)
    changes = {
        "train.num_rounds": 1,
        "data.name": "npz",
        "data.path": place / "random.npz",
        "method.name": method,
    }
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    begin = time.perf_counter()
    fedgist_in(cache, "run", "fedlog/mnist", "--quiet", "--out", str(out), *settings)
    whole = time.perf_counter() - begin
    line = json.loads((out / "rounds.jsonl").read_text("utf-8").splitlines()[0])
    return whole - float(line["time/round_s"])


def fedgist_in(cache: Path, *words: str) -> None:
    """Run one of fedgist's commands with this user's cache."""
    command = [sys.executable, "-m", "fedgist.cli", *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def _take_kernels(cache: Path) -> None:
    """Put the compiled kernels, if they are built, into a new cache without plans."""
    folder = cache / "fedgist" / "kernels"
    folder.mkdir(parents=True)
    if library() is not None:
        shutil.copy(library_path(), folder)


def _write_images(path: Path) -> None:
    draw = np.random.default_rng(0)
    images = {
        name: draw.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        for name, n in (("x", TRAIN), ("x_test", TEST))
    }
    labels = {"y": np.arange(TRAIN) % 10, "y_test": np.arange(TEST) % 10}
    np.savez(path, **images, **labels)  # type: ignore[arg-type]  # numpy's stubs take a flag among the arrays
