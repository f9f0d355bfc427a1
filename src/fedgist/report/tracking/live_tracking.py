"""An observer that sends each round of a run to trackers, after its line is recorded."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fedgist.report.tracking.sending import LiveSender
from fedgist.report.tracking.tracker import TrackedRun, Tracker, tracked_run
from fedgist.runs.files.record import ROUNDS, Line, read_usable_lines
from fedgist.runs.round import Observer
from fedgist.world.server_context import ServerContext


@contextlib.contextmanager
def tracking(
    shown: Observer,
    trackers: Mapping[str, Tracker],
    place: Path | None,
    warn: Callable[[str], object] | None = None,
) -> Iterator[Observer]:
    """Yield an observer that passes everything on to ``shown``, and rounds also to trackers.

    Runs may follow each other. ``place`` is the folder of all of them. ``warn`` is called if a
    tracker fails, by default ``shown.note``.
    """
    if not trackers:
        yield shown
        return
    live = LiveSender(trackers, place, warn or shown.note)
    observer = _Tracked(shown, live)
    try:
        yield observer
        observer.end()
    finally:
        live.close()


class _Tracked(Observer):
    """Passes everything on to an observer, and each recorded round to trackers."""

    def __init__(self, shown: Observer, live: LiveSender) -> None:
        self.shown, self.live = shown, live
        self.describe: Callable[[Line], TrackedRun]
        self.earlier: Sequence[Line] = ()
        self.run: TrackedRun | None = None

    def began(self, server: ServerContext, folder: str, done: int) -> None:
        """Pass the start on; the run before this one has finished."""
        self.end()
        self.shown.began(server, folder, done)
        recipe = tomllib.loads(server.recipe.to_toml())  # as it is read from the run directory
        place = Path(folder) if folder else None
        self.earlier = read_usable_lines(place / ROUNDS).lines if place and done else ()
        self.describe = lambda first: tracked_run(recipe, place, first, resumed_after=done or -1)

    def finished_round(self, line: Line) -> None:
        """Pass the round on, then send it; the first time with the rounds of a resumed run."""
        self.shown.finished_round(line)
        lines = [line]
        if self.run is None:
            lines = [*self.earlier, line]
            self.run = self.describe(lines[0])
        self.live.send(self.run, lines)

    def chose(self, text: str) -> None:
        """Pass a text on the chosen round on."""
        self.shown.chose(text)

    def working(self, text: str) -> None:
        """Pass the progress within a long round on."""
        self.shown.working(text)

    def note(self, text: str) -> None:
        """Pass a note on."""
        self.shown.note(text)

    def end(self) -> None:
        """Finish the run, if there is one."""
        if self.run is not None:
            self.live.end(self.run.id, finished=True)
        self.run = None
