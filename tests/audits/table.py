"""How much an attacker finds: the table of docs/privacy.md, ``python -m audits.table``.

With ``--noise system`` noise and draws are the operating system's, and no two tables are the same.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats
from torch import Tensor

from audits import seams
from audits.seams import Trials
from audits.whole_runs import fedlog_runs
from fedgist.core import random
from fedgist.core.privacy import PrivacyUnit
from fedgist.world.accounting import ReleaseSchedule, multiplier

EPSILON, DELTA = 1.0, 0.01
DRAWS = 100_000  # with the canary, and as many without
AT_ONCE = 20_000  # bounds memory
TAIL = 0.005  # of each of two rates: together they hold with 99 %
THRESHOLDS = 400


@dataclass(frozen=True)
class Audit:
    """Releases that are looked at, and the same ones as they are accounted for."""

    method: str
    unit: PrivacyUnit
    released: str
    seen: Callable[[Trials], Tensor]
    schedule: ReleaseSchedule

    def found(self, less: float = 1.0, draws: int = DRAWS, *, system: bool = False) -> float:
        """A lower bound of epsilon, where the noise is multiplied by ``less``."""
        noise = less * multiplier(self.schedule, EPSILON, DELTA)
        first, second = (
            np.concatenate(list(self._pieces(noise, draws, present=present, system=system)))
            for present in (False, True)
        )
        return lower_bound(first, second)

    def _pieces(
        self, noise: float, draws: int, *, present: bool, system: bool
    ) -> Iterator[np.ndarray]:
        for start in range(0, draws, AT_ONCE):
            key = random.key(0, self.method, self.released, int(present), start)
            count = min(AT_ONCE, draws - start)
            yield self.seen(Trials(key, count, noise, present, system)).numpy()

    def row(self, draws: int = DRAWS, *, system: bool = False) -> str:
        """A line of the table."""
        found, weak = (self.found(less, draws, system=system) for less in (1.0, 0.5))
        method = f"{self.method}, system" if system else self.method
        facts = f"| {method} | {self.unit} | {self.released} | {EPSILON:g} ({DELTA:g}) "
        return facts + f"| {found:.2f} | {weak:.2f} | 2 x {draws:,} |"


AUDITS = [
    Audit("FedLog", "record", "2 sums", seams.fedlog, ReleaseSchedule((0, 1, 1))),
    Audit("Analytic", "record", "1 joint sum", seams.analytic, ReleaseSchedule((0, 1))),
    Audit("FedAvg", "client", "1 sum", seams.fedavg, ReleaseSchedule((0, 1))),
    Audit(
        "FedAvg, Poisson sampling",
        "client",
        "2 sums, of clients drawn with chance 0.25",
        functools.partial(seams.fedavg, rate=0.25, rounds=2),
        ReleaseSchedule((0, 1, 1), chance=0.25),
    ),
    Audit(
        "Representation sharing",
        "record",
        "3 sums of one client",
        seams.repshare,
        ReleaseSchedule((0, 3)),
    ),
    Audit(
        "DP-SGD",
        "record",
        "4 steps, of rows drawn with chance 0.25",
        functools.partial(seams.dp_sgd, rate=0.25),
        ReleaseSchedule((0, 0), (0, 4), rate=0.25),
    ),
    Audit(
        "FedLog with DP-SGD",
        "record",
        "2 steps, of rows drawn with chance 0.5, and 1 sum",
        functools.partial(seams.dp_sgd, rate=0.5, releases=1),
        ReleaseSchedule((0, 1), (0, 2), rate=0.5),
    ),
]


def lower_bound(
    without: np.ndarray, present: np.ndarray, delta: float = DELTA, tail: float = TAIL
) -> float:
    """A lower bound of epsilon from the evidence of draws of both kinds.

    It holds with confidence 1 - 2 ``tail``, which is 99 % by default.

    The attacker says which of two it was, by a threshold, and (right - delta) / wrong is at most
    e^epsilon, for right and wrong said of either (Kairouz, Oh, Viswanath 2015, theorem 2.1). Which
    and where the threshold is, is chosen on one half of the draws and judged on the other.
    """
    half, shares = len(without) // 2, np.linspace(0, 1, THRESHOLDS + 2)[1:-1]
    ends = np.quantile(np.concatenate([without[:half], present[:half]]), shares)
    guesses = []
    for sign in (1.0, -1.0):
        right, wrong = (present, without) if sign > 0 else (without, present)
        first, second = (
            _bounds(sign * right[part], sign * wrong[part], sign * ends, delta, tail)
            for part in (slice(half), slice(half, None))
        )
        guesses.append((first.max(), second[first.argmax()]))
    return float(max(guesses)[1])


def _bounds(
    right: np.ndarray, wrong: np.ndarray, ends: np.ndarray, delta: float, tail: float
) -> np.ndarray:
    """The bound of each threshold (Clopper and Pearson 1934, for both rates)."""
    hits, misses = ((values[None] > ends[:, None]).sum(1) for values in (right, wrong))
    low = stats.beta.ppf(tail, hits, len(right) - hits + 1)
    high = stats.beta.ppf(1 - tail, misses + 1, len(wrong) - misses)
    low, high = np.nan_to_num(low, nan=0.0), np.nan_to_num(high, nan=1.0)
    found: np.ndarray = np.log(np.maximum(low - delta, math.exp(-50.0)) / high)
    return found


def row_of_runs(draws: int) -> str:
    """A line of the table: whole runs of FedLog, of one round, with noise of the system."""
    runs = (fedlog_runs(EPSILON, DELTA, draws, less) for less in (1.0, 0.5))
    found, weak = (lower_bound(first.numpy(), second.numpy()) for first, second in runs)
    facts = f"| FedLog, system, whole runs | record | 1 sum | {EPSILON:g} ({DELTA:g}) "
    return facts + f"| {found:.2f} | {weak:.2f} | 2 x {draws:,} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--noise", choices=["seed", "system"], default="seed")
    parser.add_argument("--whole-runs", action="store_true", help="those of the system alone")
    asked = parser.parse_args()
    if asked.whole_runs:
        print(row_of_runs(asked.draws))
        return
    for audit in AUDITS:
        print(audit.row(asked.draws, system=asked.noise == "system"), flush=True)


if __name__ == "__main__":
    main()
