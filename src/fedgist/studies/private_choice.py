"""Hyper-parameter search under differential privacy: recipe checks and choice of the best trial.

A search runs trials on private rows, each within its own privacy budget. It chooses one trial by
validation rows, which are private as well. The choice is *report noisy max* (Dwork and Roth 2014,
section 3.3): the number of correct validation rows of each trial gets Laplace noise, and only the
index of the largest noisy count is released.

The noise has scale 1 / epsilon (claim 3.9) for any number of trials. Proof: let one validation row
be added. One client holds out this row, so each count grows by 0 or 1. Fix the noise of all trials
but i, and let r be the least noise that makes trial i win. If the row is added, the other counts
grow by at most 1 and the count of i does not fall: noise of r + 1 is enough. If the row is removed,
the count of i falls by at most 1 and the others do not grow: noise of r + 1 is enough again. The
probability that Laplace noise exceeds r + 1 is at least exp(-epsilon) times the probability that it
exceeds r. The proof needs all counts to move in one direction; otherwise r + 2 and a scale of
2 / epsilon would be needed. The set of held-out rows is taken as given: adding or removing one row
does not change which other rows are held out.
Which rows are held out is taken as given: the row that comes or goes moves no other.

Counts also depend on the models, which are results of private runs; the budget of the trials covers
this. For bodies that learn without noise the guarantee is conditional on the bodies
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
from fedgist.runs.files.record import CLIENTS, read_lines


class Choice(TypedDict):
    """A recorded choice: the numbers of the candidate trials, the chosen one, and its epsilon."""

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
    """Raise RecipeError if a search over this recipe cannot be private within ``tune.epsilon``."""
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
        f"objective.metrics = {list(recipe.objective.metrics)}: {rows}: put 'accuracy' "
        "first": recipe.objective.metrics[:1] != ("accuracy",),
        f"data.held_out = {recipe.data.held_out}: {rows} at the clients: use "
        "data.validation": recipe.data.held_out > 0,
        f"evaluate.on = 'global': {rows} at the clients: use 'client' or 'test'": recipe.evaluate.on
        == "global",
        f"privacy.share_measurements = false: {rows}, which would stay with the "
        "clients": not recipe.privacy.share_measurements,
        f"privacy.unit = {unit!r}: a search chooses by validation rows, which costs epsilon beside "
        "that of its trials: state it as tune.epsilon (--set tune.epsilon=0.5)": epsilon is None,
    }
    if problem := next((problem for problem, applies in problems.items() if applies), ""):
        raise RecipeError(problem)


def mean_correct_rows(runs: Sequence[Path]) -> float:
    """Return a trial's number of correct validation rows, averaged over its runs."""
    return sum(map(correct_rows, runs)) / len(runs)


def correct_rows(folder: Path) -> int:
    """Return the number of validation rows that a run's last models predict correctly."""
    lines = [line for line in read_lines(folder / CLIENTS) if line.get("split") == "validation"]
    last = max((line["round"] for line in lines), default=0)
    scored = [line for line in lines if line["round"] == last and line["accuracy"] is not None]
    if not scored:
        raise RecipeError(f"{folder} has no scores on validation rows")
    return sum(round(line["rows"] * line["accuracy"]) for line in scored)


def noisy_max(counts: Sequence[float], epsilon: float, bits: Callable[[int], int]) -> int:
    """Return the index of the largest count after adding Laplace noise of scale 1 / ``epsilon``.

    ``bits`` returns 64 random bits for an index. Counts may be means over several runs. Adding or
    removing one row must move every count by at most 1, all in one direction.
    """
    noisy = [count + laplace(bits(place)) / epsilon for place, count in enumerate(counts)]
    return max(range(len(noisy)), key=noisy.__getitem__)


def laplace(bits: int) -> float:
    """Return a sample of the Laplace distribution with scale 1, made of 64 random bits.

    The lowest bit is the sign, and the 53 highest bits give an exponential sample.
    """
    uniform = ((bits >> 11) + 1) * 2.0**-53  # above 0, at most 1
    return math.log(uniform) if bits & 1 else -math.log(uniform)


def source_of_bits(recipe: Recipe, choice: int) -> Callable[[int], int]:
    """Return the source of random bits for a choice: the operating system, or the seed."""
    if recipe.privacy.noise == "system":
        return lambda _place: secrets.randbits(64)

    def of_seed(place: int) -> int:
        text = f"{recipe.seed}/choice/{choice}/{place}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

    return of_seed


def promise(runs: Sequence[Recipe], choices: Sequence[Choice]) -> str:
    """Return the privacy budget that a search spent: its runs composed, plus each choice."""
    (composed,) = compositions(runs)
    paid = " + ".join(f"{choice['epsilon']:g}" for choice in choices)
    total = composed.epsilon + sum(choice["epsilon"] for choice in choices)
    return (
        f"{composed.described()}; the choice among them costs tune.epsilon = {paid}; in all "
        f"epsilon {total:.4g}, delta {composed.delta:.4g}"
        f"{PUBLIC_NOISE if composed.simulated else ''}"
    )
