"""Send rounds to trackers, each round once: from run directories, or as runs go."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from fedgist.errors import first_line, printable
from fedgist.report.tracking.own_logger import OwnLogger
from fedgist.report.tracking.tracker import RoundLog, TrackedRun, Tracker, scalars, tracked_run
from fedgist.runs.files.record import Line
from fedgist.runs.finished.finished_run import FinishedRun


@dataclass
class _OpenRun:
    """A run in a tracker, and the last round that it has there."""

    log: RoundLog
    last: int
    ended: bool = False


@dataclass
class Sender:
    """Sends the rounds of runs to one tracker, each round once."""

    tracker: Tracker
    runs: dict[str, _OpenRun] = field(default_factory=dict)  # by id

    def send(self, run: TrackedRun, lines: Iterable[Line]) -> int:
        """Send the rounds that the tracker does not have; return their number."""
        if run.id not in self.runs:
            log = self.tracker.open(run)
            self.runs[run.id] = _OpenRun(log, log.last)
        opened = self.runs[run.id]
        new = [] if opened.ended else [line for line in lines if line["round"] > opened.last]
        for line in new:
            opened.log.add(line["round"], scalars(line))
            opened.last = line["round"]
        return len(new)

    def send_files(self, run: FinishedRun) -> int:
        """Send the new rounds of a run directory, and its end; return the number of rounds."""
        if not run.rounds:
            return 0
        described = tracked_run(run.recipe, run.folder, run.rounds[0], mark=run.mark)
        number = self.send(described, run.rounds)
        if run.finished:
            self.end(described.id, finished=True)
        return number

    def end(self, run_id: str, *, finished: bool) -> None:
        """Finish a run, if any of its rounds were sent."""
        opened = self.runs.get(run_id)
        if opened and not opened.ended:
            opened.ended = True
            opened.log.end(finished=finished)

    def close(self) -> None:
        """Finish all runs; those that have not ended are unfinished, and no longer followed."""
        for run_id in self.runs:
            self.end(run_id, finished=False)


class LiveSender:
    """Sends the rounds of runs in progress to trackers.

    No error of a tracker stops a run. A tracker that fails is left out from then on, with one
    warning, which names the command that sends what is missing.
    """

    def __init__(
        self, trackers: Mapping[str, Tracker], place: Path | None, warn: Callable[[str], object]
    ) -> None:
        """Send to trackers by name; ``place`` is the folder of the runs."""
        self.senders = {name: Sender(tracker) for name, tracker in trackers.items()}
        self.place, self.warn = place, warn

    def send(self, run: TrackedRun, lines: Iterable[Line]) -> None:
        """Send the new rounds of a run."""
        lines = list(lines)
        for name, sender in list(self.senders.items()):
            with _Leaving(self, name):
                sender.send(run, lines)

    def end(self, run_id: str, *, finished: bool) -> None:
        """Finish a run."""
        for name, sender in list(self.senders.items()):
            with _Leaving(self, name):
                sender.end(run_id, finished=finished)

    def close(self) -> None:
        """Finish all runs; those that have not ended are unfinished."""
        for name, sender in list(self.senders.items()):
            with _Leaving(self, name):
                sender.close()

    def leave_out(self, name: str, error: Exception) -> None:
        """Send nothing more to a tracker, and warn."""
        failed = self.senders.pop(name)  # to end its runs would mean to wait for it again
        shown = re.sub("//[^/@]*@", "//...@", name)  # without a password in an address
        text = f"tracking with {shown} failed, and the run goes on without it: {first_line(error)}"
        if self.place is not None and not isinstance(failed.tracker, OwnLogger):
            command = shlex.join(["fedgist", "watch", str(self.place), "--track", shown])
            text += f"; send what is missing with: {command}"
        self.warn(printable(text))


@dataclass(frozen=True)
class _Leaving:
    """Inside this context, an error of a tracker leaves it out."""

    live: LiveSender
    name: str

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.live.leave_out(self.name, error)
        return isinstance(error, Exception)
