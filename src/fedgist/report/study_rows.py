"""A study as values: its rows, and what was measured of each."""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.core.metrics import Metric
from fedgist.report.run_files import RunFiles
from fedgist.report.run_groups import Settings
from fedgist.report.stats import Comparison, Estimate


@dataclass(frozen=True)
class Target:
    """What it took to reach an accuracy: rounds and bytes, and how many seeds reached it.

    For a seed that never did, the round of its highest accuracy counts (the papers' rule): such a
    row is marked.
    """

    reached: int
    rounds: Estimate
    up: Estimate
    down: Estimate
    both: Estimate

    @property
    def by_all(self) -> bool:
        """Whether every seed reached it."""
        return self.reached == self.rounds.count


@dataclass(frozen=True)
class Paper:
    """What the paper printed: accuracy and, if given, its error (fractions); bits to its target."""

    source: str
    accuracy: tuple[float, ...] | None
    bits: float | None
    departs: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """Runs that differ in nothing but the seed."""

    label: str
    method: str
    settings: Settings
    runs: tuple[RunFiles, ...]
    final: Estimate | None
    last10: Estimate | None
    best: Estimate | None
    up: Estimate | None
    down: Estimate | None
    versus: Comparison | None = None
    target: Target | None = None
    paper: Paper | None = None
    epsilon: float | None = None  # the most that a seed spent

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return [run.seed for run in self.runs]

    @property
    def rounds(self) -> tuple[int, int]:
        """The fewest and the most rounds done."""
        done = [run.done for run in self.runs]
        return min(done), max(done)

    @property
    def unfinished(self) -> int:
        """The number of runs whose planned rounds are not all done."""
        return sum(not run.finished for run in self.runs)


@dataclass(frozen=True)
class Study:
    """The rows, what they are measured by, and notes on what the numbers do not show."""

    rows: tuple[Row, ...]
    metric: str  # a column of the record
    measure: Metric  # what that column measures
    reference: str | None
    target_accuracy: float | None  # a fraction
    notes: tuple[str, ...]
    two_sided: bool = False  # the tests against the reference
