"""Models by name, a user's own too: the functions that make them, and their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedgist.errors import RecipeError, shown
from fedgist.federation.own_code import load_own
from fedgist.federation.recipe_sections import ModelSection
from fedgist.models import MODELS
from fedgist.options import check_options, checked, options_of

Factory = Callable[..., nn.Module]


def model_factory(name: str) -> Factory:
    """Return the function that makes the model called ``name``.

    Raises
    ------
    RecipeError
        If there is none, or a user's module cannot be imported.
    """
    factory: Factory = load_own("model.name", name) if ":" in name else MODELS[name]
    if not callable(factory):
        msg = f"model.name = {shown(name)} is not a function that makes a model"
        raise RecipeError(msg)
    return factory


def sizes_of(factory: Factory) -> tuple[str, ...]:
    """Return the names of a factory's first two parameters: an input's shape, and the classes."""
    return tuple(options_of(factory)[0])[:2]


def check_models(tables: Mapping[str, Mapping[str, Any] | float]) -> dict[str, tuple[float, Any]]:
    """Return each table of ``clients.architectures`` as its share and its model's section.

    Raises
    ------
    RecipeError
        If a share, a model or one of its options is not valid.
    """
    models = {}
    for name, value in tables.items():
        where = f"clients.architectures.{name}"
        table: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"share": value}
        share = table.pop("share", None)
        if isinstance(share, bool) or not isinstance(share, int | float) or share <= 0:
            msg = f"{where}: share must be a number greater than 0, not {shown(share)}"
            raise RecipeError(msg)
        section = checked(ModelSection, {"name": table.pop("model", name), **table}, where)
        factory = model_factory(section.name)
        check_options(factory, section.options, section.name, where, sizes_of(factory))
        models[name] = float(share), section
    return models
