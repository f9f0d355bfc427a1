"""Memory of clients whose models are large: 20 clients with a ResNet18 each and Adam's moments.

    python bench/large_models.py

Each client trains its own model, and keeps it and the moments for the whole run. Compared are
fedgist, with a limit on the memory of stacks that does not hold what absent clients keep, and one
process a client, two of which train at a time. Memory is that of all processes, with what they
share counted once, and without and with the pages of files, which the system writes out and frees
when it is short of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier, Semaphore
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F  # noqa: N812

import fedgist
from fedgist.data.dataset import Dataset
from fedgist.models import MODELS

CLIENTS, ROWS, BATCH, ROUNDS = 20, 64, 32, 2
SHAPE, CLASSES = (3, 32, 32), 10
LIMIT = 3_000_000_000  # bytes; what all clients keep takes 2.7 GB
TOGETHER = 2
SAMPLED_S = 0.1
WAYS = ("fedgist", "processes")


def main() -> None:
    """Run each way in a process of its own, and print seconds and memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    way = parser.parse_args().way
    if way == "fedgist":
        _by_fedgist()
    elif way == "processes":
        _by_processes()
    else:
        for each in WAYS:
            seconds, own, all_of_it = _measured(each)
            print(
                f"{each}: {seconds:.0f} s in all, at most {own / 1e9:.2f} GB, with pages of files "
                f"{all_of_it / 1e9:.2f} GB"
            )


def _images(count: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=draw)


def _by_fedgist() -> None:
    count, tests = CLIENTS * ROWS, 200
    y, y_test = torch.arange(count) % CLASSES, torch.arange(tests) % CLASSES
    data = Dataset("random", _images(count), y, _images(tests), y_test, CLASSES, scale=255.0)
    training = {
        "num_rounds": ROUNDS,
        "local_epochs": 1,
        "batch_size": BATCH,
        "optimizer": "adam",
        "optimizer_memory": "run",
    }
    recipe = {
        "model": {"name": "resnet18"},
        "method": {"name": "local"},
        "clients": {"num_clients": CLIENTS, "init": "own"},
        "evaluate": {"every": ROUNDS},
        "engine": {"memory_limit": LIMIT, "workers": TOGETHER},
        "train": training,
    }
    with tempfile.TemporaryDirectory() as folder:
        fedgist.run(recipe, data=data, out=f"{folder}/run", progress=False)


def _by_processes() -> None:
    fork = multiprocessing.get_context("fork")  # what torch's import takes is shared
    turns, done = fork.Semaphore(TOGETHER), fork.Barrier(CLIENTS)
    clients = [fork.Process(target=_client, args=(k, turns, done)) for k in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def _client(number: int, turns: Semaphore, done: Barrier) -> None:
    torch.set_num_threads(1)
    x, y = _images(ROWS).float() / 255, torch.arange(ROWS) % CLASSES
    torch.manual_seed(number)
    model = MODELS["resnet18"](SHAPE, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(ROUNDS):
        with turns:
            for rows in torch.randperm(ROWS).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            optimizer.zero_grad()
        done.wait()


def _held(root: psutil.Process) -> tuple[int, int]:
    """Return the bytes that a process and those below it hold, without and with pages of files."""
    sums = dict.fromkeys(("Pss_Anon", "Pss_Shmem", "Pss_File"), 0)
    with contextlib.suppress(psutil.Error):
        for member in [root, *root.children(recursive=True)]:
            with contextlib.suppress(OSError):  # it has ended
                for line in Path(f"/proc/{member.pid}/smaps_rollup").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name in sums:
                        sums[name] += 1024 * int(value.split()[0])
    own = sums["Pss_Anon"] + sums["Pss_Shmem"]
    return own, own + sums["Pss_File"]


def _measured(way: str) -> tuple[float, int, int]:
    """Return seconds, and the most bytes of all processes without and with pages of files."""
    begin, own, whole = time.perf_counter(), 0, 0
    with subprocess.Popen([sys.executable, __file__, "--way", way]) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            private, shared = _held(root)
            own, whole = max(own, private), max(whole, shared)
            time.sleep(SAMPLED_S)
    if process.returncode:
        sys.exit(f"{way} failed")
    return time.perf_counter() - begin, own, whole


if __name__ == "__main__":
    main()
