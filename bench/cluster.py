"""A Ray cluster of this machine against the local engine: whole rounds, and memory of the driver.

FedLog with an MLP 64-24-10 on random images of 8 x 8, all clients in each round and in each test,
which belongs to a round. Both engines have the same cores, one worker or actor each, and the same
shards, so that they compute the same numbers. They take turns in one process.
"""

from __future__ import annotations

import statistics
import time

import psutil
from workloads import Workload, fedgist_rounds

from fedgist.engines.worker_pool import default_workers

COUNTS = (100, 1_000, 10_000, 100_000)
ROWS = 4
LIMITS_OF_CLUSTER = {f"cluster: {count} clients, ratio of medians": 1.15 for count in COUNTS[1:]}
METHOD, EVALUATION = {"name": "fedlog"}, {"every": 1}


def cluster(repeats: int) -> dict[str, float]:
    """Return seconds of a round with each engine, their ratio, and the memory of the driver."""
    figures: dict[str, float] = {}
    for count in COUNTS:
        figures |= of_clients(count, repeats)
    return figures


def of_clients(count: int, repeats: int) -> dict[str, float]:
    """Return the figures for a number of clients."""
    key, cores = f"cluster: {count} clients", default_workers("cpu")
    work = Workload(
        f"{count} clients of {ROWS} rows",
        *(count, count, ROWS, (1, 8, 8)),
        {"name": "mlp", "hidden": [24]},
        *("adam", 1e-3, 10, 1),
    )
    plans = {"plans": {"mlp": {"cohort_size": 50}}, "shards": cores}
    rays = {"name": "ray", **plans}
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    own = psutil.Process()
    begin = time.perf_counter()
    # the local engine forks before Ray starts its threads
    with fedgist_rounds(work, engine=plans, method=METHOD, evaluate=EVALUATION) as here:
        here()
        middle = time.perf_counter()
        with fedgist_rounds(work, engine=rays, method=METHOD, evaluate=EVALUATION) as there:
            there()  # warms up
            started = time.perf_counter() - middle
            before = own.memory_info().rss
            for _ in range(repeats):
                seconds["local"].append(here())
                seconds["ray"].append(there())
            grown = own.memory_info().rss - before
            held = before
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        f"{key}, local, to round 1 s": middle - begin,
        f"{key}, ray, to round 1 s": started,
        f"{key}, local, median s": medians["local"],
        f"{key}, ray, median s": medians["ray"],
        f"{key}, ratio of medians": medians["ray"] / medians["local"],
        f"{key}, memory of the driver, MB": held / 1e6,
        f"{key}, grown in {repeats} rounds of both, MB": grown / 1e6,
    }
