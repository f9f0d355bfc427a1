"""Whole commands of FedLog on a table, as hospitals have: 20 sites of 500 rows and 30 columns."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from starts import fedgist_in

SITES, ROWS, COLUMNS, TEST = 20, 500, 30, 1000
RECIPE = f"""
[data]
name = "npz"

[model]
name = "mlp"

[clients]
num_clients = {SITES}

[partition]
name = "iid"

[method]
name = "fedlog"

[evaluate]
every = 10
"""
WORK = {
    "100 rounds of 10 steps": {"num_rounds": 100, "batch_size": 50, "local_epochs": 1},
    "20 rounds of 250 steps": {"num_rounds": 20, "batch_size": 10, "local_epochs": 5},
}
SMALL_LIMITS = {f"table: {name}, whole command, median s": 5.0 for name in WORK}


def small_tables(repeats: int) -> dict[str, float]:
    """Return the median seconds of each command, start included, with a remembered plan."""
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        draw = np.random.default_rng(0)
        x = draw.normal(size=(SITES * ROWS, COLUMNS)).astype(np.float32)
        y = (x @ draw.normal(size=COLUMNS) > 0).astype(np.int64)
        np.savez(place / "table.npz", x=x, y=y, x_test=x[:TEST], y_test=y[:TEST])
        (place / "recipe.toml").write_text(RECIPE, "utf-8")
        for turn in range(repeats + 1):  # the first chooses the plans
            for name, about in WORK.items():
                shutil.rmtree(place / "run", ignore_errors=True)
                changes = [f"train.{key}={value}" for key, value in about.items()]
                changes.append(f"data.path={place / 'table.npz'}")
                words = [word for change in changes for word in ("--set", change)]
                begin = time.perf_counter()
                command = "run", str(place / "recipe.toml"), "--quiet", "--out", str(place / "run")
                fedgist_in(
                    Path(os.environ.get("XDG_CACHE_HOME", place / "cache")), *command, *words
                )
                if turn:
                    key = f"table: {name}, whole command, median s"
                    seconds.setdefault(key, []).append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}
