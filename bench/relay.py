"""What a relay costs: rounds of representation sharing with many clients against few."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import psutil
from workloads import Workload, fedgist_rounds

FEW, MANY = 10, 1000
SMALL = Workload("relay", FEW, FEW, 24, (1, 28, 28), {"name": "lenet5"}, "adam", 1e-3, 32, 1)
LARGE = replace(SMALL, clients=MANY, sampled=MANY)
METHOD = {"name": "repshare"}
# stacked alike, so that nothing differs but what the relay does
PLAN = {"plans": {"lenet5": {"cohort_size": FEW, "stack": True}}}
SHORT = replace(SMALL, clients=200, sampled=200, rows=8)
WARM, LATER = 5, 40  # rounds after which memory is looked at, and looked at again


def relay(repeats: int) -> dict[str, float]:
    """Compare the time of a client's round, and look whether memory grows over rounds."""
    with contextlib.ExitStack() as stack:
        rounds = {
            work.clients: stack.enter_context(fedgist_rounds(work, 1, PLAN, method=METHOD))
            for work in (SMALL, LARGE)
        }
        best = dict.fromkeys(rounds, math.inf)
        for repeat in range(repeats + 1):
            for clients, round_of in rounds.items():
                turns = max(1, MANY // clients // 10)
                took = min(round_of() for _ in range(turns)) / clients
                best[clients] = min(best[clients], took) if repeat else math.inf
    figures = {f"relay: {n} clients, s a client": value for n, value in best.items()}
    figures["relay: ratio"] = best[MANY] / best[FEW]
    figures[f"relay: memory grown in {LATER} rounds, MB"] = _grown() / 1e6
    return figures


def _grown() -> int:
    """Return how many bytes the process grows by in later rounds."""
    process, seen = psutil.Process(), []
    with fedgist_rounds(SHORT, 1, PLAN, method=METHOD) as round_of:
        for count in (WARM, LATER):
            for _ in range(count):
                round_of()
            seen.append(process.memory_info().rss)
    return seen[1] - seen[0]
