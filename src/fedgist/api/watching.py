"""Progress displays of ``fedgist.run``: a notebook table, a terminal bar, or a callback."""

from __future__ import annotations

import contextlib
import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedgist.errors import RecipeError
from fedgist.report.formatting import html_table, paragraph
from fedgist.report.tables.run_tables import rounds_sheet
from fedgist.report.terminal.console import console
from fedgist.report.terminal.progress import main_column, observing, title, trouble_texts
from fedgist.report.tracking.live_tracking import tracking
from fedgist.report.tracking.tracker import Tracker
from fedgist.runs.files.record import Line
from fedgist.runs.round import Observer
from fedgist.world.server_context import ServerContext

ROUNDS_SHOWN = 8
PAUSE_S = 0.2  # between two updates: a browser draws each of them


@contextlib.contextmanager
def watching(
    progress: bool | None,  # noqa: FBT001  # the argument of fedgist.run
    callback: Callable[[Line], object] | None,
    observer: Observer | None,
    notes: Sequence[str] = (),
    trackers: Mapping[str, Tracker] | None = None,
    folder: Path | None = None,
) -> Iterator[Observer]:
    """Yield the observer for the arguments; it shows ``notes`` when the run starts.

    Rounds are shown first, then sent to the trackers, and then the callback is called.

    Raises
    ------
    RecipeError
        If an argument is of the wrong type, or both ``progress`` and ``observer`` are given.
    """
    _check(progress, callback, observer)
    with (
        _showing(observer, progress=progress) as shown,
        tracking(shown, trackers or {}, folder) as tracked,
    ):
        yield _Started(tracked, notes, callback)


@contextlib.contextmanager
def _showing(observer: Observer | None, *, progress: bool | None) -> Iterator[Observer]:
    screen = console()
    if observer is not None:
        yield observer if isinstance(observer, Observer) else _Own(observer)
    elif progress is False or (progress is None and not screen.is_jupyter):
        yield Silent()
    elif screen.is_jupyter:
        yield NotebookTable()
    else:
        with observing(screen, quiet=False, as_json=False) as shown:
            yield shown


def _check(progress: object, callback: object, observer: object) -> None:
    if progress is not None and not isinstance(progress, bool):
        raise RecipeError(f"progress is {progress!r:.80}; it must be True, False or None")
    if callback is not None and not callable(callback):
        raise RecipeError(
            f"callback is a {type(callback).__name__}; it must be a function of a round's line"
        )
    for name in ("began", "finished_round", "note") if observer is not None else ():
        if not callable(getattr(observer, name, None)):
            raise RecipeError(f"observer is a {type(observer).__name__} without {name!r}")
    if progress and observer is not None:
        raise RecipeError("progress and observer are both given: choose one")


class _Own(Observer):
    """A user's object with the functions of an observer that it needs."""

    def __init__(self, given: object) -> None:
        for name in ("began", "finished_round", "working", "chose", "note"):
            if callable(function := getattr(given, name, None)):
                setattr(self, name, function)


@dataclass(frozen=True)
class _Started(Observer):
    """An observer that shows the notes first, and calls the callback after each round."""

    observer: Observer
    notes: Sequence[str]
    callback: Callable[[Line], object] | None

    def began(self, server: ServerContext, folder: str, done: int) -> None:
        """Pass the start on, and show the notes."""
        self.observer.began(server, folder, done)
        for text in self.notes:
            self.note(text)

    def finished_round(self, line: Line) -> None:
        """Pass the round on, then call the callback."""
        self.observer.finished_round(line)
        if self.callback is not None:
            self.callback(line)

    def chose(self, text: str) -> None:
        """Pass a text on the chosen round on."""
        self.observer.chose(text)

    def working(self, text: str) -> None:
        """Pass the progress within a long round on."""
        self.observer.working(text)

    def note(self, text: str) -> None:
        """Pass a note on."""
        self.observer.note(text)


class Silent(Observer):
    """Shows nothing; notes that arrive after the start become warnings."""

    def __init__(self) -> None:
        self.begun = False

    def began(self, server: ServerContext, folder: str, done: int) -> None:
        """Turn all notes from now on into warnings."""
        self.begun = True

    def note(self, text: str) -> None:
        """Warn with the note if the run has started."""
        if self.begun:
            warnings.warn(text, stacklevel=2)


@dataclass
class NotebookTable(Observer):
    """Shows a bar and the last rounds in the output of a notebook's cell, and updates them."""

    side: ServerContext | None = None
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    head: str = ""
    data: str = ""
    shown_at: float = 0.0
    handle: Any = None

    def began(self, server: ServerContext, folder: str, done: int) -> None:
        """Show the title."""
        self.side, self.head = server, title(server, folder)
        self.data = f"data: {server.data_summary}"
        self.handle = importlib.import_module("IPython.display").display(self, display_id=True)

    def finished_round(self, line: Line) -> None:
        """Show the round, unless the table was updated a moment ago."""
        self.lines.append(line)
        self.notes += trouble_texts(line)
        assert self.side is not None  # it has begun
        last = line["round"] == self.side.task.training.num_rounds
        if last or time.monotonic() - self.shown_at > PAUSE_S:
            self._show()

    def note(self, text: str) -> None:
        """Show a note below the table."""
        self.notes.append(text)
        self._show()

    def chose(self, text: str) -> None:
        """Show a text on the chosen round below the table."""
        self.note(text)

    def _show(self) -> None:
        self.shown_at = time.monotonic()
        if self.handle is not None:
            self.handle.update(self)

    def __repr__(self) -> str:
        """Return the title and the number of rounds, for a front end without HTML."""
        return f"{self.head}: {len(self.lines)} rounds"

    def _repr_html_(self) -> str:
        assert self.side is not None  # it has begun
        done = self.lines[-1]["round"] if self.lines else 0
        bar = f"<progress value='{done}' max='{self.side.task.training.num_rounds}'></progress>"
        lines = self.lines[-ROUNDS_SHOWN:]
        last = rounds_sheet("", lines, *main_column(self.side), ROUNDS_SHOWN)
        notes = "".join(paragraph(text) for text in self.notes[-ROUNDS_SHOWN:])
        table = html_table(last) if self.lines else ""
        return f"{paragraph(self.head)}{paragraph(self.data)}{bar}{table}{notes}"
