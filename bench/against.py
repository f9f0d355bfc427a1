"""Compare with another checkout: rounds in turns, and start-up, in one run.

Machines are noisy: only ratios taken in one interleaved run mean something. How clients are stacked
is timed once, by this checkout, and both do their rounds by that plan: otherwise a plan that came
out differently would be measured, and not the code. With ``--own-plans`` each has the plan that it
chooses itself, with kernels that the other may not have. For example::

    git worktree add ../before HEAD~20
    python bench/against.py ../before --repeats 8
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
WORKLOADS = ("W1", "W2", "W3")
START = """
import fedgist
plans = {"mlp": {"cohort_size": 10}}
fedgist.run({"train": {"num_rounds": 1}, "engine": {"workers": 1, "plans": plans}})
"""
PLANS = """
import json, sys
from workloads import WORKLOADS, plans_of
print(json.dumps(plans_of(WORKLOADS[sys.argv[1]])))
"""
CHILD = """
import json, sys
from workloads import WORKLOADS, fedgist_rounds
from bench import turn
engine = {"plans": json.loads(sys.argv[2])}
with fedgist_rounds(WORKLOADS[sys.argv[1]], engine=engine) as round_of:
    for line in sys.stdin:
        print(min(turn(round_of)), flush=True)
"""


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment in which a checkout's own package and benchmark are imported."""
    paths = f"{checkout / 'src'}{os.pathsep}{checkout / 'bench'}"
    return {**os.environ, "PYTHONPATH": paths}


def plans_of(name: str, checkout: Path) -> str:
    """Return the plans of a workload as JSON, timed by a checkout."""
    words = [sys.executable, "-c", PLANS, name]
    done = subprocess.run(
        words, env=environment(checkout), check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def rounds(
    name: str, checkouts: Sequence[Path], repeats: int, *, own_plans: bool
) -> list[list[float]]:
    """Return the best seconds per round in each turn, for each checkout, by its plan."""
    plans = [plans_of(name, path if own_plans else HERE) for path in checkouts]
    for path, plan in zip(checkouts, plans, strict=True):
        print(f"{name:6s} {path.name}: plans {plan}")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, name, plan],
            env=environment(path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for path, plan in zip(checkouts, plans, strict=True)
    ]
    seconds: list[list[float]] = [[] for _ in children]
    for repeat in range(repeats + 1):
        for child, values in zip(children, seconds, strict=True):
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("turn\n")
            child.stdin.flush()
            took = float(child.stdout.readline())
            if repeat:  # the first turn warms up
                values.append(took)
    for child in children:
        child.communicate()
    return seconds


def starts(checkouts: Sequence[Path], repeats: int) -> list[list[float]]:
    """Return the seconds of a whole process that runs one round, for each checkout."""
    seconds: list[list[float]] = [[] for _ in checkouts]
    for _ in range(repeats):
        for path, values in zip(checkouts, seconds, strict=True):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", START], env=environment(path), check=True)
            values.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Compare the two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--only", nargs="*", default=[*WORKLOADS, "start"])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--own-plans", action="store_true", help="each times its own plans")
    args = parser.parse_args()
    checkouts = (args.other.resolve(), HERE)
    for name in args.only:
        measure = starts(checkouts, args.repeats) if name == "start" else None
        before, now = measure or rounds(name, checkouts, args.repeats, own_plans=args.own_plans)
        best, median = min(before) / min(now), statistics.median(before) / statistics.median(now)
        seconds = f"{min(before):.4f} s -> {min(now):.4f} s"
        print(f"{name:6s} best {seconds}: {best:.3f} times as fast; median {median:.3f}")


if __name__ == "__main__":
    main()
