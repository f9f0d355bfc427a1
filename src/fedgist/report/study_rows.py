"""Data classes of a study: its rows and their measurements."""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.core.metrics import Metric
from fedgist.report.run_groups import Settings
from fedgist.report.stats import Comparison, Estimate
from fedgist.runs.columns import measured
from fedgist.runs.finished.finished_run import FinishedRun


@dataclass(frozen=True)
class Target:
    """Rounds and bytes until an accuracy was reached, and the number of seeds that reached it.

    For a seed that never reached it, the round of its highest accuracy counts (the papers' rule);
    such a row is marked.
    """

    reached: int
    rounds: Estimate
    up: Estimate
    down: Estimate
    both: Estimate

    @property
    def by_all(self) -> bool:
        """Whether every seed reached the target."""
        return self.reached == self.rounds.count


@dataclass(frozen=True)
class Paper:
    """The paper's numbers: accuracy with error, if given (fractions); bits to its target."""

    source: str
    accuracy: tuple[float, ...] | None
    bits: float | None
    departs: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A row of a study: runs that differ only in the seed."""

    label: str
    method: str
    settings: Settings
    runs: tuple[FinishedRun, ...]
    metric: str  # a column of the record
    measure: Metric  # what that column measures
    final: Estimate | None
    last10: Estimate | None
    best: Estimate | None
    up: Estimate | None
    down: Estimate | None
    versus: Comparison | None = None
    target: Target | None = None
    paper: Paper | None = None
    epsilon: float | None = None  # the largest budget spent by a seed

    def curves(self, column: str = "") -> dict[int, dict[int, float]]:
        """Return each seed's values of a column by round; the default is the row's metric."""
        columns = {run.seed: run.column(column or self.metric) for run in self.runs}
        return {
            seed: dict(zip(rounds, values, strict=True))
            for seed, (rounds, values) in columns.items()
            if rounds
        }

    def finals(self, column: str = "") -> dict[int, float]:
        """Return each seed's result: the last value of a column, up to the kept round."""
        lasts = {run.seed: run.last(column or self.metric) for run in self.runs}
        return {seed: value for seed, value in lasts.items() if value is not None}

    def at(self, number: int, column: str = "") -> dict[int, float]:
        """Return each seed's value of a column in a round."""
        curves = self.curves(column).items()
        return {seed: curve[number] for seed, curve in curves if number in curve}

    def bests(self, column: str = "") -> dict[int, float]:
        """Return each seed's best value of a column, which is chosen afterwards: no result."""
        measure = measured(column, self.runs[0].metrics) if column else self.measure
        choose = min if measure.better == "lower" else max
        return {seed: choose(curve.values()) for seed, curve in self.curves(column).items()}

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs, in order."""
        return [run.seed for run in self.runs]

    @property
    def rounds(self) -> tuple[int, int]:
        """Smallest and largest number of completed rounds."""
        done = [run.done for run in self.runs]
        return min(done), max(done)

    @property
    def is_old(self) -> bool:
        """Whether a run lacks a correction that changes its numbers."""
        return any(run.before for run in self.runs)

    @property
    def unfinished(self) -> int:
        """Number of unfinished runs."""
        return sum(not run.finished for run in self.runs)


@dataclass(frozen=True)
class Study:
    """A study: its rows, their metric, and notes on what the numbers do not show."""

    rows: tuple[Row, ...]
    metric: str  # a column of the record
    measure: Metric  # what that column measures
    reference: str | None
    target_accuracy: float | None  # a fraction
    notes: tuple[str, ...]
    two_sided: bool = False  # the tests against the reference
