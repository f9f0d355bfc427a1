"""Search space: the recipe keys that a search varies, and their values."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from fedgist.errors import InputError, RecipeError, first_line, one_of
from fedgist.recipe.reading import role_of

FIXED = (
    "privacy.unit",
    "privacy.epsilon",
    "privacy.delta",
    "privacy.noise",
    "data.validation",
    "data.held_out",
    "evaluate.",
    "train.num_rounds",
)  # keys that are not hyper-parameters, besides those with a role
EXACT = 1e-9  # relative: two numbers that are as near differ by rounding
RANGE_KEYS = ("low", "high", "log", "step", "choices")

Range = dict[str, Any]


def read_space(path: Path) -> dict[str, Range]:
    """Return a file's ranges by key: each has ``choices``, or ``low``, ``high`` and ``log``."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: {first_line(error)}") from error
    space = dict(_ranges(path, tables, ""))
    if not space:
        example = '["train.lr"] and below it low = 1e-4, high = 1e-1, log = true'
        raise RecipeError(f"{path} names no key to search; write for example {example}")
    for key, values in space.items():
        if role_of(key) is not None or key.startswith(FIXED):
            raise RecipeError(f"{path}: {key} cannot be searched: it is not a hyper-parameter")
        if problem := _problem(values):
            raise RecipeError(f"{path}: {key}: {problem}")
    return space


def _ranges(path: Path, tables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Range]]:
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if not isinstance(value, Mapping):
            raise RecipeError(
                f"{path}: {key} = {value!r}: expected a table with low and high, or choices"
            )
        if {"low", "high", "choices"} & value.keys():
            yield key, dict(value)
        else:
            yield from _ranges(path, value, f"{key}.")


def _problem(values: Range) -> str | None:
    """Return what is wrong with a range, or None."""
    try:
        for key in values:
            one_of(key, RANGE_KEYS, "range key")
    except InputError as error:
        return str(error)
    return _problem_of_choices(values) if "choices" in values else _problem_of_bounds(values)


def _problem_of_choices(values: Range) -> str | None:
    choices = values["choices"]
    if len(values) > 1:
        return "give either choices, or low and high"
    if not isinstance(choices, list) or not choices:
        return f"choices = {choices!r}: expected a list"
    odd = [c for c in choices if isinstance(c, float) and not math.isfinite(c)]
    return f"choices: {odd[0]!r} is not finite" if odd else None


def _problem_of_bounds(values: Range) -> str | None:
    low, high, log = values.get("low"), values.get("high"), values.get("log", False)
    if not _is_number(low) or not _is_number(high) or values["low"] > values["high"]:
        return f"low = {low!r}, high = {high!r}: expected two numbers, the lower one first"
    if not isinstance(log, bool):
        return f"log = {log!r}: expected true or false"
    if log and (values["low"] <= 0 or "step" in values):
        return "log = true needs low > 0 and no step"
    step = values.get("step", 1)
    if not _is_number(step) or step <= 0:
        return f"step = {step!r}: expected a number above 0"
    whole = isinstance(low, int) and isinstance(high, int)
    return f"step = {step!r}: expected a whole number" if whole and step != int(step) else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def extremes(space: Mapping[str, Range]) -> Iterator[dict[str, Any]]:
    """Yield parameters to check before a search: all lowest, all highest, then each choice."""
    for end in ("low", "high"):
        yield {
            key: values["choices"][0] if "choices" in values else values[end]
            for key, values in space.items()
        }
    for key, values in space.items():
        for choice in values.get("choices", ()):
            yield {key: choice}


def own_values(settings: Mapping[str, object], space: Mapping[str, Range]) -> dict[str, object]:
    """Return a recipe's values of the keys in a space, moved to the nearest value in range.

    Keys at their defaults and values that are no choice are left out: the sampler draws them.
    """
    stated = {key: _at(settings, key.split(".")) for key in space}
    nearest = {key: _nearest(value, space[key]) for key, value in stated.items()}
    return {key: value for key, value in nearest.items() if value is not None}


def notes_on_moved(settings: Mapping[str, object], space: Mapping[str, Range]) -> list[str]:
    """Return a note on each value of a recipe that the first trial cannot have."""
    stated = {key: _at(settings, key.split(".")) for key in space}
    had = own_values(settings, space)
    notes = []
    for key, value in stated.items():
        if value is None or had.get(key) == value:
            continue
        if key in had:
            notes.append(f"{key} = {value} is not in its range: the first trial has {had[key]}")
        else:
            notes.append(f"{key} = {value} is none of its choices: the first trial draws one")
    return notes


def _at(settings: object, path: list[str]) -> object:
    for name in path:
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


def _nearest(value: object, values: Range) -> object:
    if "choices" in values:
        return value if value in values["choices"] else None
    if not _is_number(value):
        return None
    low, high, step = values["low"], values["high"], values.get("step")
    whole = isinstance(low, int) and isinstance(high, int)
    near = min(max(value, low), high)
    if whole or step:
        step = step or 1
        # so many steps, but for rounding: 0.3 - 0.1 is a little less than two steps of 0.1
        most = math.floor((high - low) / step * (1 + EXACT))
        near = low + step * min(round((near - low) / step), most)
    return value if math.isclose(near, value, rel_tol=EXACT) else near
