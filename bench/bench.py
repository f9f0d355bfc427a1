"""Time and memory of a round against bare PyTorch loops, interleaved in one run.

    python bench/bench.py [--out bench.json] [--repeats 5] [--only W1 W3]

A ratio is the best round of the fastest bare loop over fedgist's best round: how many times as fast
fedgist is. Memory is the peak of all processes of a run, shared pages counted once (on Linux, the
sum of their proportional set sizes).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from cluster import LIMITS_OF_CLUSTER, cluster

from fedgist.engines.worker_pool import default_workers
from fedgist.methods.common.conjugate_head import log_posterior, map_head

sys.path.insert(0, str(Path(__file__).parent))
from encoders import LEARNING, PEAK, encoders
from layers import layers
from moments import moments
from neighbour import NEIGHBOUR_LIMITS, neighbour
from network import NETWORK_LIMITS, federation
from pools import DISTILLING, MEMORY, ROUND, START, WHOLE, pools
from privacy import CHEAP, NOISE_LIMITS, noise, privacy
from relay import LATER, relay
from reports import reports
from roofline import COPIES, roofline
from server_share import LIMITS_OF_SERVER, server
from small_tables import SMALL_LIMITS, small_tables
from starts import FRESH, HELP, OTHER_METHOD, REMEMBERED, starts
from turns import compared, turn
from workloads import (
    TWO_ROWS,
    TWO_ROWS_LARGE,
    W1,
    W1_DROPOUT,
    W2,
    W3,
    W3_LARGE,
    WORKLOADS,
    Workload,
    bare_rounds,
    fedgist_rounds,
)

from lazy import LAZY_PEAK, RATIO, lazy
from methods import methods
from secure import SECURE_LIMITS, secure

TARGETS = {
    "W1.ratio": 8.0,
    "W2.ratio": 3.2,
    "W3.ratio": 6.0,
    DISTILLING: 1.3,
    WHOLE: 1.0,
    LEARNING: 1.3,
    RATIO: 0.9,
}
LIMITS = {
    "W1.wire_ratio": 1.3,
    "W2.wire_ratio": 1.3,
    "W1.memory_ratio": 2.0,
    FRESH: 4.0,
    REMEMBERED: 2.5,
    OTHER_METHOD: 2.5,
    HELP: 0.5,
    "W3_large.time_ratio": 1.3,
    "W3_large.memory_ratio": 1.3,
    "population.time_ratio": 1.3,
    COPIES: 2.0,
    "population.memory_ratio": 1.3,
    f"{TWO_ROWS_LARGE.name}: start s": 20.0,
    "compare: 1000 runs x 100 rounds, median s": 5.0,
    "report: 50 runs, median s": 10.0,
    "report: 50 runs, MB": 5.0,
    **{f"privacy: {what}, ratio": 1.1 for what in CHEAP},
    "privacy: head, share of a round": 0.1,
    **NOISE_LIMITS,
    "relay: ratio": 1.1,
    f"relay: memory grown in {LATER} rounds, MB": 10.0,
    START: 5.0,
    ROUND: 1.3,
    MEMORY: 100.0,
    PEAK: 2147.0,  # two GiB
    LAZY_PEAK: 2147.0,  # two GiB
    **NEIGHBOUR_LIMITS,
    **SMALL_LIMITS,
    **NETWORK_LIMITS,
    **LIMITS_OF_SERVER,
    **LIMITS_OF_CLUSTER,
    **SECURE_LIMITS,
}


def main() -> None:
    """Run the parts asked for, print their figures, and write these to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        _rounds_for_memory(*args.memory_of)
        return
    figures: dict[str, Any] = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "repeats": args.repeats,
    }
    for part in args.only:
        figures |= PARTS[part](args.repeats)
    for key, value in figures.items():
        goal = goal_of(key, value)
        print(
            f"{key:44s} {value:.3f}{goal}"
            if isinstance(value, float)
            else f"{key:44s} {value}{goal}"
        )
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
        print(f"written to {args.out}")


def goal_of(key: str, value: Any) -> str:
    """Return what a figure should be, and whether it is; nothing for a figure without a goal."""
    if key in TARGETS:
        return f"  (at least {TARGETS[key]}: {'pass' if value >= TARGETS[key] else 'MISS'})"
    if key in LIMITS:
        return f"  (at most {LIMITS[key]}: {'pass' if value <= LIMITS[key] else 'MISS'})"
    return ""


def times(work: Workload, repeats: int) -> dict[str, float]:
    """Return seconds per round of every contender, taken in turns, and their ratios."""
    threads = torch.get_num_threads()
    kinds = [(False, 1), (False, threads)] + (
        [(True, 1), (True, threads)] if work.optimizer == "adam" else []
    )
    bare = {
        f"bare, {'fused, ' if f else ''}{n} threads": bare_rounds(work, fused=f, threads=n)
        for f, n in kinds
    }
    single_worker = fedgist_rounds(work, workers=1)
    all_workers = fedgist_rounds(work)
    with single_worker as with_one, all_workers as with_all:
        contenders = {
            f"fedgist, {default_workers('cpu')} workers": with_all,
            "fedgist, 1 worker": with_one,
            **bare,
        }
        return compared(work.name.replace(" with dropouts", "_dropout"), contenders, repeats)


def head() -> dict[str, float]:
    """Compare FedLog's exact head with 1000 steps of Adam, for 100 classes and 101 features."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(50_000) % 100
    z = torch.relu(
        torch.randn(100, 100, generator=draw)[y] + torch.randn(50_000, 100, generator=draw)
    )
    phi = torch.cat([torch.ones(50_000, 1), z], dim=1).double()
    s = torch.zeros(100, 101, dtype=torch.float64).index_add_(0, y, phi)
    begin = time.perf_counter()
    exact = map_head(s, 1.0)
    middle = time.perf_counter()
    by_adam = torch.randn(100, 101, generator=draw).double().requires_grad_()
    adam = torch.optim.Adam([by_adam], lr=1e-2, maximize=True)
    for _ in range(1000):
        (by_adam.grad,) = torch.autograd.grad(log_posterior(by_adam, s, 1.0) / len(y), by_adam)
        adam.step()
    end = time.perf_counter()
    gain = (log_posterior(exact, s, 1.0) - log_posterior(by_adam, s, 1.0)) / len(y)
    return {
        "head: exact s": middle - begin,
        "head: 1000 Adam steps s": end - middle,
        "head: objective gained a row": float(gain),
    }


def wire(repeats: int) -> dict[str, float]:
    """Compare the loop-back, every client a site, with the local engine unstacked, one worker."""
    figures: dict[str, float] = {}
    for work in (W1, W2, W3):
        model = str(work.model["name"])
        alone = {"plans": {model: {"cohort_size": 1, "stack": False}}}
        contenders = ("local", alone), ("loopback", {"name": "loopback"})
        with contextlib.ExitStack() as stack:
            rounds = {
                name: stack.enter_context(fedgist_rounds(work, 1, engine))
                for name, engine in contenders
            }
            best = dict.fromkeys(rounds, math.inf)
            for repeat in range(repeats + 1):
                for name, round_of in rounds.items():
                    took = min(turn(round_of))
                    best[name] = min(best[name], took) if repeat else math.inf
        figures[f"{work.name}: local unstacked, best s"] = best["local"]
        figures[f"{work.name}: loop-back, best s"] = best["loopback"]
        figures[f"{work.name}.wire_ratio"] = best["loopback"] / best["local"]
    return figures


def large(repeats: int) -> dict[str, float]:
    """Compare W3 with ten times the clients, of which as many train in each round.

    Compared are the time, and the memory beyond the data.
    """
    seconds: dict[str, list[float]] = {W3.name: [], W3_LARGE.name: []}
    with fedgist_rounds(W3) as few, fedgist_rounds(W3_LARGE) as many:
        for repeat in range(repeats + 1):
            for name, round_of in ((W3.name, few), (W3_LARGE.name, many)):
                took = turn(round_of)
                if repeat:
                    seconds[name].extend(took)
    beyond = {}
    for work in (W3, W3_LARGE):
        data = work.data()
        beyond[work.name] = peak("fedgist", work.name) - data.x.numel() - 8 * data.y.numel()
    return {
        "W3_large.time_ratio": statistics.median(seconds[W3_LARGE.name])
        / statistics.median(seconds[W3.name]),
        "W3_large.memory_ratio": beyond[W3_LARGE.name] / beyond[W3.name],
    }


def population(repeats: int) -> dict[str, float]:
    """Compare 100,000 clients of two rows, all in each round, with 1,000: seconds and memory."""
    figures: dict[str, float] = {}
    each: dict[str, list[float]] = {}
    for work in (TWO_ROWS, TWO_ROWS_LARGE):
        plan = {"plans": {"mlp": {"cohort_size": 50}}}
        begin = time.perf_counter()
        with fedgist_rounds(work, engine=plan) as round_of:
            figures[f"{work.name}: start s"] = time.perf_counter() - begin
            round_of()  # warms up
            count = repeats if work is TWO_ROWS_LARGE else 20 * repeats
            each[work.name] = [round_of() / work.clients for _ in range(count)]
        figures[f"{work.name}: a client and round, median us"] = 1e6 * statistics.median(
            each[work.name]
        )
        figures[f"{work.name}: peak MB"] = peak("fedgist", work.name) / 1e6
    few, many = TWO_ROWS.name, TWO_ROWS_LARGE.name
    medians = [statistics.median(each[name]) for name in (many, few)]
    more = figures[f"{many}: peak MB"] - figures[f"{few}: peak MB"]
    return figures | {
        "population.time_ratio": medians[0] / medians[1],
        "population.kB a client more": 1e3 * more / (TWO_ROWS_LARGE.clients - TWO_ROWS.clients),
        "population.memory_ratio": figures[f"{many}: peak MB"]
        / (TWO_ROWS_LARGE.clients / TWO_ROWS.clients * figures[f"{few}: peak MB"]),
    }


def memory() -> dict[str, float]:
    """Return the peak memory of W1 with fedgist and with the bare loop."""
    fedgist_bytes, bare_bytes = peak("fedgist", W1.name), peak("bare", W1.name)
    return {
        "W1: fedgist, peak MB": fedgist_bytes / 1e6,
        "W1: bare, peak MB": bare_bytes / 1e6,
        "W1.memory_ratio": fedgist_bytes / bare_bytes,
    }


def peak(kind: str, workload: str) -> int:
    """Run three rounds in a new process; return the peak bytes that all its processes hold."""
    command = [sys.executable, __file__, "--memory-of", kind, workload]
    most = 0
    with subprocess.Popen(command) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            held = 0
            for member in [root, *_children(root)]:
                try:
                    held += member.memory_full_info().pss
                except (psutil.Error, AttributeError):
                    continue
            most = max(most, held)
            time.sleep(0.02)
    if process.returncode:
        sys.exit(f"measuring the memory of {kind} {workload} failed")
    return most


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.Error:
        return []


def _rounds_for_memory(kind: str, workload: str) -> None:
    work = WORKLOADS[workload]
    if kind == "bare":
        round_of = bare_rounds(work, fused=False, threads=torch.get_num_threads())
        for _ in range(3):
            round_of()
        return
    with fedgist_rounds(work) as round_of:
        for _ in range(3):
            round_of()


def shares() -> dict[str, float]:
    """Return the shares of start-up and evaluation in 10 rounds of FedLog's MNIST recipe.

    The images are random, as their content does not change the time.
    """
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder, "random.npz")
        draw = np.random.default_rng(0)
        images = {
            name: draw.integers(0, 256, (n, 28, 28), dtype=np.uint8)
            for name, n in (("x", 3000), ("x_test", 10000))
        }
        labels = {"y": np.arange(3000) % 10, "y_test": np.arange(10000) % 10}
        np.savez(arrays, **images, **labels)  # type: ignore[arg-type]  # numpy's stubs take a flag among the arrays
        changes = {"train.num_rounds": 10, "data.name": "npz", "data.path": arrays}
        settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        command = [
            sys.executable,
            "-m",
            "fedgist.cli",
            "run",
            "fedlog/mnist",
            "--quiet",
            "--out",
            f"{folder}/run",
            *settings,
        ]
        begin = time.perf_counter()
        subprocess.run(command, check=True)
        whole = time.perf_counter() - begin
        lines = [
            json.loads(line)
            for line in Path(folder, "run", "rounds.jsonl").read_text().splitlines()
        ]
    rounds = sum(line["time/round_s"] for line in lines)
    training = sum(line["time/train_s"] for line in lines)
    return {
        "10 rounds of FedLog's MNIST: whole s": whole,
        "10 rounds of FedLog's MNIST: share of start-up": (whole - rounds) / whole,
        "10 rounds of FedLog's MNIST: share of evaluation": (rounds - training) / whole,
    }


PARTS: dict[str, Callable[[int], dict[str, float]]] = {
    **{work.name: functools.partial(times, work) for work in (W1, W1_DROPOUT, W2, W3)},
    "wire": wire,
    "large": large,
    "population": population,
    "layers": layers,
    "roofline": roofline,
    "memory": lambda _: memory(),
    "shares": lambda _: shares(),
    "starts": starts,
    "head": lambda _: head(),
    "methods": methods,
    "moments": moments,
    "neighbour": neighbour,
    "server": server,
    "tables": small_tables,
    "reports": reports,
    "privacy": privacy,
    "noise": noise,
    "relay": relay,
    "pools": pools,
    "encoders": encoders,
    "lazy": lazy,
    "federation": federation,
    "cluster": cluster,
    "secure": secure,
}


if __name__ == "__main__":
    main()
