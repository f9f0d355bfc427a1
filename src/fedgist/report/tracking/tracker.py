"""What a tracker is: it opens runs, and takes the numbers of each round."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from fedgist.errors import ReportError
from fedgist.recipe.reading import flat
from fedgist.runs.files.record import Line


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run before its rounds.

    ``id`` is a digest of the run's folder and of its first round. A resumed run keeps its id, and a
    run that replaces another one in the same folder has a new id. ``resumed_after`` is the last
    round of the record when the run was resumed; -1 if the run is new, or was read from its files.
    """

    id: str
    name: str  # method and seed
    data: str
    settings: Mapping[str, object]  # by dotted key, such as train.lr
    folder: Path | None  # None if the run is kept in memory only
    resumed_after: int = -1


class RoundLog(Protocol):
    """One run in a tracker."""

    @property
    def last(self) -> int:
        """The last round that the tracker had when the run was opened; -1 if it had none."""

    def add(self, number: int, values: Mapping[str, float]) -> None:
        """Add the recorded numbers of a round, by column."""

    def end(self, *, finished: bool) -> None:
        """Finish writing; ``finished`` says whether the run is complete."""


class Tracker(Protocol):
    """A destination of runs.

    A tracker checks its package and its target when it is made, before any run starts, and raises
    ReportError. ``needs_folder`` says that it can only track runs with a run directory.
    """

    @property
    def needs_folder(self) -> bool:
        """Whether runs that are kept in memory only cannot be tracked."""

    def open(self, run: TrackedRun) -> RoundLog:
        """Return the existing log of the run, which is recognized by its id, or a new one."""


def tracked_run(
    recipe: Mapping[str, object],
    folder: Path | None,
    first_line: Line,
    *,
    mark: str = "",
    resumed_after: int = -1,
) -> TrackedRun:
    """Describe a run for trackers; ``mark`` is added to its name."""
    settings = {k: v for k, v in flat(recipe).items() if not k.startswith("paper.")}
    method = f"{settings.get('method.name', 'fedgist')} {mark}".rstrip()
    place = b"" if folder is None else os.fsencode(folder.resolve())
    first = json.dumps(scalars(first_line), sort_keys=True).encode()
    return TrackedRun(
        id=hashlib.sha256(place + b"\0" + first).hexdigest(),
        name=f"{method} seed {settings.get('seed', 0)}",
        data=str(settings.get("data.name", "fedgist")),
        settings=settings,
        folder=folder,
        resumed_after=resumed_after,
    )


def scalars(line: Line) -> dict[str, float]:
    """Return the numbers of a round by column; values that are not finite are recorded as null.

    >>> scalars({"round": 3, "eval/client/accuracy_mean": 0.5, "train/loss": float("nan")})
    {'eval/client/accuracy_mean': 0.5}
    """
    return {
        key: float(value)
        for key, value in line.items()
        if key != "round" and isinstance(value, int | float) and math.isfinite(value)
    }


def switch_off_reports(variable: str, value: str) -> None:
    """Switch off what a package reports to its makers, unless the user has set the variable."""
    os.environ.setdefault(variable, value)


def needed(module: str, package: str) -> ModuleType:
    """Import a module of a tracker's package; raise ReportError if the package is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReportError(f"tracking needs {package}: pip install 'fedgist[track]'") from error
