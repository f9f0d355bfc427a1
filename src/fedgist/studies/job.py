"""A job, one run of a study, and the events that happen to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from fedgist.errors import shown
from fedgist.recipe.reading import Recipe, flat
from fedgist.runs.files.record import Line
from fedgist.runs.files.run_directory import name_of_seed


@dataclass(frozen=True)
class Job:
    """One run of a study: its name, its recipe and its run directory.

    ``command`` makes the run; it is written into the run's archived file.
    """

    name: str
    recipe: Recipe = field(repr=False)
    folder: Path
    command: str = ""


@dataclass(frozen=True)
class Event:
    """An event of a job: its start, a finished round (``line``), a note (``text``) or its end.

    If the job failed, ``text`` is the reason.
    """

    kind: Literal["began", "round", "note", "done", "stopped", "failed"]
    line: Line | None = None
    text: str = ""


ENDS = {"done", "stopped", "failed"}  # kinds of events after which nothing follows


class Running(Protocol):
    """A job that runs somewhere."""

    @property
    def job(self) -> Job:
        """The job."""

    def next_event(self) -> Event:
        """Wait for the next event and return it."""

    def stop(self) -> None:
        """Ask it once to save and stop."""

    def kill(self) -> None:
        """Kill it at once."""

    def join(self) -> None:
        """Wait for its end, after its last event."""


class Places(Protocol):
    """Where jobs run: processes of this machine, or of a cluster."""

    def begin(self, job: Job, *, anew: bool) -> Running:
        """Begin or resume a job, or do it again from its start."""

    def wait(self, running: Sequence[Running]) -> Sequence[Running]:
        """Wait until some jobs have an event, and return these."""

    def close(self) -> None:
        """Leave the place, after every job has ended or was killed."""


Listener = Callable[[Job, Event], bool]  # returns True to stop the job after its round


def jobs_of_seeds(name: str, recipe: Recipe, seeds: int, out: Path) -> list[Job]:
    """Return one job per seed and division, each in a folder of its own.

    Seeds are counted from the recipe's; divisions are all that ``data.folds`` and ``data.repeats``
    make.
    """
    count = recipe.data.divisions
    draws = itertools.product(range(recipe.seed, recipe.seed + seeds), range(count))
    if count == 1:
        return [
            Job(f"{name} seed {seed}", recipe.changed({"seed": seed}), out / name_of_seed(seed))
            for seed, _ in draws
        ]
    return [
        Job(
            f"{name} seed {seed} division {division}",
            recipe.changed({"seed": seed, "data.division": division}),
            out / name_of_seed(seed, division),
        )
        for seed, division in draws
    ]


def difference(wanted: Recipe, kept: Recipe) -> str | None:
    """Return the first setting that differs between two recipes, with both values, or None.

    Settings that the wanted recipe leaves open are not compared. A hyper-parameter that only one
    recipe states may be the method's default.
    """
    new, old = flat(wanted.settings()), flat(kept.settings())
    for key in dict.fromkeys([*new, *old]):
        if new.get(key) == old.get(key) or key in wanted.left_open:
            continue
        if key.startswith("method.") and _same_method(wanted, kept):
            continue
        return f"{key} = {shown(old.get(key))}, not {shown(new.get(key))}"
    return None


def _same_method(wanted: Recipe, kept: Recipe) -> bool:
    from fedgist.recipe.method_loading import build_method  # it loads torch

    new, old = wanted.method, kept.method
    return new.name == old.name and (
        build_method(new.name, new.options) == build_method(old.name, old.options)
    )
