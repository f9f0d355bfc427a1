"""One of many runs: its recipe, its folder, and what happens to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedgist.errors import shown
from fedgist.recipe.reading import Recipe, flat
from fedgist.runs.record import Line


@dataclass(frozen=True)
class Job:
    """One run to be done: what it is called, its recipe, its folder."""

    name: str
    recipe: Recipe = field(repr=False)
    folder: Path


@dataclass(frozen=True)
class Event:
    """What happened to a job: it began, did a round (``line``), noted something (``text``), ended.

    Of a failed job ``text`` is the reason.
    """

    kind: Literal["began", "round", "note", "done", "stopped", "failed"]
    line: Line | None = None
    text: str = ""


Listener = Callable[[Job, Event], bool]  # returns True to have the job stop after its round


def jobs_of_seeds(name: str, recipe: Recipe, seeds: int, out: Path) -> list[Job]:
    """Return a job for each of so many seeds, from the recipe's on, each in a folder of its own."""
    return [
        Job(
            f"{name} seed {seed}",
            recipe.model_copy(update={"seed": seed}),
            out / f"seed-{seed}",
        )
        for seed in range(recipe.seed, recipe.seed + seeds)
    ]


def difference(wanted: Recipe, kept: Recipe) -> str | None:
    """Return the first setting in which two recipes differ, with both values; None without any.

    What the wanted one leaves open is as it was found.
    """
    new, old = flat(wanted.settings()), flat(kept.settings())
    for key in dict.fromkeys([*new, *old]):
        if new.get(key) != old.get(key) and key not in wanted.left_open:
            return f"{key} = {shown(old.get(key))}, not {shown(new.get(key))}"
    return None
