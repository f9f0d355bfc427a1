"""Objectives by name: those of fedgist, and a user's own ``package.module:Class``."""

from __future__ import annotations

import dataclasses

from fedgist.core.objectives.own_objective import TaskLoss, checked_objective
from fedgist.core.objectives.target import LABELS_OF, Target
from fedgist.errors import RecipeError, first_line
from fedgist.options import check_options
from fedgist.recipe.own_code import load_own
from fedgist.recipe.schema import ObjectiveSection

KEY = "objective.name"


def own_objective(section: ObjectiveSection, given: object = None) -> TaskLoss | None:
    """Return a user's own objective: the given object, or the named class; None for fedgist's.

    Raises
    ------
    RecipeError
        If it cannot be imported or made, or lacks a part.
    """
    if given is not None:
        return checked_objective(given)
    if ":" not in section.name:
        return None
    cls = load_own(KEY, section.name)
    if not isinstance(cls, type):
        raise RecipeError(f"{KEY} = {section.name!r} is no class")
    options = check_options(cls, section.options, section.name, "objective")
    try:
        made: object = cls(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{KEY} = {section.name!r}: {first_line(error)}") from error
    return checked_objective(made)


def labels_read(section: ObjectiveSection, own: TaskLoss | None) -> Target:
    """Return the form of the labels that the recipe's objective reads."""
    return LABELS_OF[section.name] if own is None else own.labels


def recorded_objective(given: object) -> ObjectiveSection:
    """Return the section that records an objective object: its class, and its fields."""
    cls = type(given)
    fields = dataclasses.fields(given) if dataclasses.is_dataclass(given) else ()
    options = {f.name: getattr(given, f.name) for f in fields if f.init}
    return ObjectiveSection(name=f"{cls.__module__}:{cls.__qualname__}", **options)
