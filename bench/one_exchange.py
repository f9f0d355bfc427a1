"""``analytic`` on embeddings beside a memory-mapped file: seconds, and memory but for the file's.

    python bench/one_exchange.py --rows 1000000 --width 768 --clients 100 [--wire float64]

The rows are correlated columns of ten classes, written once into ``--folder``. The time is that of
the whole command: its start, the choice of a plan, the exchange, and 2,000 test rows for each
client's model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

CLASSES, TEST_ROWS, AT_ONCE = 10, 2000, 50_000
RECIPE = """
data = {{ name = "npy", path = "{folder}", read = "lazy", normalize = "none" }}
partition = {{ name = "iid" }}
clients = {{ num_clients = {clients} }}
model = {{ name = "logistic" }}
method = {{ name = "analytic", wire = "{wire}", expand = 0 }}
train = {{ num_rounds = 1 }}
evaluate = {{ on = "test" }}
"""


def write_rows(folder: Path, rows: int, width: int) -> None:
    """Write x.npy, y.npy and test rows, piece by piece."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((width, width), dtype=np.float32) / np.float32(width**0.5)
    means = rng.standard_normal((CLASSES, width), dtype=np.float32) * np.float32(0.1)
    for part, count in {"": rows, "_test": TEST_ROWS}.items():
        y = rng.integers(0, CLASSES, count)
        np.save(folder / f"y{part}.npy", y)
        shape = (count, width)
        x = np.lib.format.open_memmap(folder / f"x{part}.npy", "w+", np.float32, shape)
        for start in range(0, count, AT_ONCE):
            noise = rng.standard_normal((min(AT_ONCE, count - start), width), dtype=np.float32)
            x[start : start + AT_ONCE] = noise @ mixing + means[y[start : start + AT_ONCE]]


def anonymous(process: psutil.Process) -> int:
    """Return the bytes of a process and its children that are no pages of a file."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            memory = member.memory_info()
            total += memory.rss - memory.shared
        except psutil.Error:  # it has ended meanwhile
            continue
    return total


def main() -> None:
    """Write rows, run the command, and print what it took."""
    asked = argparse.ArgumentParser(description=__doc__)
    for name, default in {"rows": 1_000_000, "width": 768, "clients": 100}.items():
        asked.add_argument(f"--{name}", type=int, default=default)
    asked.add_argument("--wire", default="float32")
    asked.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = asked.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        write_rows(folder, given.rows, given.width)
        values = {"folder": folder, "clients": given.clients, "wire": given.wire}
        (folder / "recipe.toml").write_text(RECIPE.format(**values))
        words = ["run", str(folder / "recipe.toml"), "--out", str(folder / "run"), "--quiet"]
        begin, most = time.perf_counter(), 0
        with subprocess.Popen([sys.executable, "-m", "fedgist.cli", *words]) as command:
            while command.poll() is None:
                most = max(most, anonymous(psutil.Process(command.pid)))
                time.sleep(0.05)
        seconds = time.perf_counter() - begin
        if command.returncode:
            sys.exit(command.returncode)
        (line,) = map(json.loads, (folder / "run" / "rounds.jsonl").read_text().splitlines())
    print(f"{given.rows} rows of {given.width} numbers, {given.clients} clients, {given.wire}")
    print(f"whole command {seconds:.1f} s, the exchange {line['time/train_s']:.1f} s")
    print(f"memory of all processes, without the mapped file: {most / 1e6:.0f} MB")
    print(f"accuracy {100 * line['eval/client/accuracy_mean']:.2f} %")


if __name__ == "__main__":
    main()
