"""A tracker that keeps what it is given, and can fail in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedgist.report.tracking.tracker import RoundLog, TrackedRun


@dataclass
class KeptRun:
    """The rounds of one run; ``ended`` is what its end said."""

    run: TrackedRun
    fails_in: int | None
    last: int = -1
    rounds: list[int] = field(default_factory=list)
    values: list[Mapping[str, float]] = field(default_factory=list)
    ended: bool | None = None

    def add(self, number: int, values: Mapping[str, float]) -> None:
        if number == self.fails_in:
            raise OSError("the server is gone")
        self.rounds.append(number)
        self.values.append(values)

    def end(self, *, finished: bool) -> None:
        self.ended = finished


@dataclass
class KeptRounds:
    """A tracker in memory, which recognizes a run by its id."""

    fails_in: int | None = None
    needs_folder: bool = False
    logs: dict[str, KeptRun] = field(default_factory=dict)

    @property
    def runs(self) -> list[TrackedRun]:
        return [log.run for log in self.logs.values()]

    @property
    def only(self) -> KeptRun:
        """Its only run."""
        (log,) = self.logs.values()
        return log

    def open(self, run: TrackedRun) -> RoundLog:
        log = self.logs.setdefault(run.id, KeptRun(run, self.fails_in))
        log.last = log.rounds[-1] if log.rounds else -1
        return log
