"""A user's objects that replace parts of a recipe; the record calls these parts ``given``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedgist.errors import RecipeError
from fedgist.recipe.data_section import Data
from fedgist.recipe.reading import Recipe
from fedgist.recipe.schema import ModelSection, Partitioning
from fedgist.recipe.section import GIVEN
from fedgist.world.world import Overrides

ALL_SOURCES = set(Data.model_fields) - {"name"}  # keys of [data] that are read beside any data


def apply_overrides(recipe: Recipe, given: Overrides, asked: Mapping[str, Any] | None) -> Recipe:
    """Return the recipe with ``given`` as the name of each part that an object replaces.

    ``asked`` is the recipe's own text, if it was given together with the objects: then a key of it
    that nothing reads is an error. Such keys of a file are dropped, and said.
    """
    update: dict[str, Any] = {}
    unread: list[tuple[str, str]] = []
    texts = recipe.model_dump(exclude_unset=True) if asked is None else asked
    if given.data is not None:
        kept = {key: getattr(recipe.data, key) for key in ALL_SOURCES}
        unread += [(f"data.{k}", "data") for k in texts.get("data", {}) if k not in kept]
        update["data"] = Data(name=GIVEN, **kept)
    if given.clients is not None:
        unread += [(f"partition.{key}", "clients") for key in texts.get("partition", {})]
        update["partition"] = Partitioning(name=GIVEN)
        _check_count(recipe, len(given.clients))
    if given.groups is not None:
        unread += [(f"model.{key}", "model") for key in texts.get("model") or {}]
        unread += [("clients.architectures", "model")] * bool(recipe.clients.architectures)
        update["model"] = ModelSection(name=GIVEN)
        update["clients"] = recipe.clients.model_copy(update={"architectures": {}})
    if unread and asked is not None:
        key, argument = unread[0]
        raise RecipeError(
            f"{key} is given in the recipe, and {argument}= as well: give only one of the two"
        )
    notes = [f"{key} of the recipe is dropped: {argument}= is given" for key, argument in unread]
    return recipe.model_copy(update=update).noting([*recipe.dropped, *notes])


def _check_count(recipe: Recipe, count: int) -> None:
    wanted = recipe.clients.num_clients
    if "num_clients" in recipe.clients.model_fields_set and wanted != count:
        raise RecipeError(f"clients.num_clients = {wanted}, but clients= lists the rows of {count}")
