"""Clients that never train, and are scored with what a method gives a newcomer."""

from __future__ import annotations

from collections.abc import Sequence

from fedgist.core import random
from fedgist.core.method import Task
from fedgist.errors import RecipeError
from fedgist.recipe.resolve import Setup
from fedgist.world.client_lists import numbers_of

KEY = "clients.held_out"


def newcomers_of(setup: Setup, count: int, names: Sequence[str]) -> frozenset[int]:
    """Return the clients that a recipe holds out: those it lists, or a share drawn from the seed.

    Raises
    ------
    RecipeError
        If nobody were left to train, or the method or the privacy of a run has no newcomers.
    """
    stated, recipe = setup.recipe.clients.held_out, setup.recipe
    if not stated:
        return frozenset()
    if setup.method.merges_clients:
        raise RecipeError(
            f"{KEY}: method {recipe.method.name} trains on the rows of all clients together"
        )
    if recipe.privacy.unit != "none":
        raise RecipeError(f"{KEY}: privacy divides by the expected number of all clients")
    if isinstance(stated, float):
        size, key = round(stated * count), random.key(recipe.seed, "held out")
        if size in {0, count}:
            raise RecipeError(f"{KEY} = {stated:g} holds out {size} of {count} clients")
        return frozenset(random.choice(key, count, size))
    chosen = frozenset(numbers_of(stated, names, KEY))
    if strange := [client for client in sorted(chosen) if client >= count]:
        raise RecipeError(f"{KEY}: client {strange[0]} does not exist, there are {count}")
    if len(chosen) == count:
        raise RecipeError(f"{KEY} names all {count} clients: nobody would train")
    return chosen


def notes_on(task: Task) -> list[str]:
    """Return a note on how many clients are newcomers."""
    if not task.newcomers:
        return []
    some = f"{len(task.newcomers)} of {task.num_clients} clients"
    return [f"{some} never train and are scored as newcomers ({KEY}): eval/newcomer"]
