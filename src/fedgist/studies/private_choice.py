"""Searches under privacy: which recipes can be searched, and how the best trial is chosen.

A search runs trials on private rows, each within its own budget, and chooses one by validation
rows, which are private as well. The choice is by *report noisy max* (Dwork and Roth 2014, section
3.3): the number of correct validation rows of each trial gets Laplace noise, and only the place of
the greatest is released.

The noise has scale 1 / epsilon (claim 3.9), however many trials there are. Let one validation row
be added. It is held out by one client, so each count grows by 0 or 1. Fix the noise of all trials
but i, and let r be the least noise with which trial i wins. If the row is added, the other counts
grow by at most 1 and that of i does not fall: noise of r + 1 is enough. If it is taken away, that
of i falls by at most 1 and the others do not grow: noise of r + 1 is enough again. The chance that
Laplace noise is above r + 1 is at least exp(-epsilon) times the chance that it is above r. This
needs that all counts move in one direction: else r + 2 were needed, and a scale of 2 / epsilon.

Which rows are held out is taken as given: the row that comes or goes moves no other.

Counts depend on models, too, which are results of private runs: what that costs is the budget of
the trials. For bodies that learn without noise it is a promise on their condition
(``privacy_budget.CONDITION``).
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

from fedgist.errors import RecipeError
from fedgist.recipe.reading import Recipe
from fedgist.runs.composition import PUBLIC_NOISE, compositions
from fedgist.runs.record import CLIENTS, read_lines


class Choice(TypedDict):
    """A choice that was made: among which trials, which one, and what it cost."""

    among: list[int]
    trial: int
    epsilon: float


HOW = (
    "privacy: trials are drawn at random and none is stopped early, for a choice by scores would "
    "cost epsilon"
)
NOT_COVERED = (
    "scores of single trials, shown above or in {out}, are not part of this promise, and a run of "
    "best.toml adds to it"
)


def check_search(recipe: Recipe) -> None:
    """Raise RecipeError if a search over this recipe would choose by more than it can pay for."""
    unit, epsilon = recipe.privacy.unit, recipe.tune.epsilon
    if unit == "none":
        if epsilon is not None:
            raise RecipeError(
                f"tune.epsilon = {epsilon:g}: nothing reads it: privacy.unit is 'none'"
            )
        return
    rows = "the best trial is chosen by counts of correct validation rows"
    problems = {
        "privacy.unit = 'client': a search is not protected for clients: one client more or less "
        "changes a count of correct rows by all the rows that it holds out; choose settings on "
        "public rows, or use 'record'": unit == "client",
        f"objective.name = {recipe.objective.name!r}: {rows}, which needs "
        "'classes'": recipe.objective.name != "classes",
        f"data.held_out = {recipe.data.held_out}: {rows} at the clients: use "
        "data.validation": recipe.data.held_out > 0,
        f"evaluate.on = 'global': {rows} at the clients: use 'client' or 'test'": recipe.evaluate.on
        == "global",
        f"privacy.share_measurements = false: {rows}, which would stay with the "
        "clients": not recipe.privacy.share_measurements,
        f"privacy.unit = {unit!r}: a search chooses by validation rows, which costs epsilon beside "
        "that of its trials: state it as tune.epsilon (--set tune.epsilon=0.5)": epsilon is None,
    }
    if problem := next((problem for problem, found in problems.items() if found), ""):
        raise RecipeError(problem)


def mean_correct_rows(runs: Sequence[Path]) -> float:
    """Return how many validation rows are predicted correctly, mean over the runs of a trial."""
    return sum(map(correct_rows, runs)) / len(runs)


def correct_rows(folder: Path) -> int:
    """Return how many validation rows the clients' last models of a run predict correctly."""
    lines = [line for line in read_lines(folder / CLIENTS) if line.get("split") == "validation"]
    last = max((line["round"] for line in lines), default=0)
    scored = [line for line in lines if line["round"] == last and line["accuracy"] is not None]
    if not scored:
        raise RecipeError(f"{folder} has no scores on validation rows")
    return sum(round(line["rows"] * line["accuracy"]) for line in scored)


def noisy_max(counts: Sequence[float], epsilon: float, bits: Callable[[int], int]) -> int:
    """Return the place of the greatest count, each with Laplace noise of scale 1 / ``epsilon``.

    ``bits`` returns 64 random bits for a place. Counts may be means over several runs, of which
    each moves by at most 1, all in one direction, when a row comes or goes.
    """
    noisy = [count + laplace(bits(place)) / epsilon for place, count in enumerate(counts)]
    return max(range(len(noisy)), key=noisy.__getitem__)


def laplace(bits: int) -> float:
    """Return a number with Laplace's distribution of scale 1, made of 64 random bits.

    It is one bit's sign, and an exponential number of the 53 highest bits.
    """
    uniform = ((bits >> 11) + 1) * 2.0**-53  # above 0, at most 1
    return math.log(uniform) if bits & 1 else -math.log(uniform)


def source_of_bits(recipe: Recipe, choice: int) -> Callable[[int], int]:
    """Return where the noise of a search's choice comes from: the operating system, or the seed."""
    if recipe.privacy.noise == "system":
        return lambda _place: secrets.randbits(64)

    def of_seed(place: int) -> int:
        text = f"{recipe.seed}/choice/{choice}/{place}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

    return of_seed


def promise(runs: Sequence[Recipe], choices: Sequence[Choice]) -> str:
    """Return what a search spent: that of its runs composed, plus the epsilon of each choice."""
    (found,) = compositions(runs)
    paid = " + ".join(f"{choice['epsilon']:g}" for choice in choices)
    total = found.epsilon + sum(choice["epsilon"] for choice in choices)
    return (
        f"{found.described()}; the choice among them costs tune.epsilon = {paid}; in all epsilon "
        f"{total:.4g}, delta {found.delta:.4g}{PUBLIC_NOISE if found.simulated else ''}"
    )
