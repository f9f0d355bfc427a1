"""A logger of one's own: two functions, which ``fedgist.run`` calls as a run goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fedgist.report.tracking.tracker import RoundLog, TrackedRun


class Logger(Protocol):
    """Two functions that take the settings and the rounds of a run.

    An exception of a logger does not stop the run: it becomes a warning, and the logger is not
    called again.

    Examples
    --------
    >>> import fedgist
    >>> class Printed:
    ...     def start(self, settings):
    ...         print("lr", settings["train.lr"])
    ...
    ...     def log(self, number, values):
    ...         print("round", number, sorted(values)[:2])
    >>> few = {"train": {"num_rounds": 1}, "engine": {"workers": 1, "cohort_size": 5}}
    >>> result = fedgist.run(few, track=Printed())
    lr 0.001
    round 1 ['clients/asked', 'clients/replied']
    """

    def start(self, settings: Mapping[str, object]) -> None:
        """Take all settings of the run by dotted key, such as ``train.lr``.

        It is called once per run, before its first round is logged.
        """

    def log(self, number: int, values: Mapping[str, float]) -> None:
        """Take the recorded numbers of round ``number`` by column of ``rounds.jsonl``.

        A resumed run logs only its new rounds.
        """


@dataclass(frozen=True)
class OwnLogger:
    """A tracker that hands runs to a logger."""

    logger: Logger
    needs_folder: bool = False

    def open(self, run: TrackedRun) -> RoundLog:
        """Start the logger; rounds before a resumed run's continuation are not logged again."""
        self.logger.start(run.settings)
        return _LoggedRun(self.logger, run.resumed_after)


@dataclass(frozen=True)
class _LoggedRun:
    """One run in a logger."""

    logger: Logger
    last: int

    def add(self, number: int, values: Mapping[str, float]) -> None:
        self.logger.log(number, values)

    def end(self, *, finished: bool) -> None:
        """Do nothing: ``fedgist.run`` returns or raises."""
