"""A user's objects that replace parts of a recipe; the record calls these parts ``given``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fedgist.core.method import Method
from fedgist.core.nets.adapters import Adapters
from fedgist.core.objectives.own_metric import OwnMetric
from fedgist.data.dataset import Dataset
from fedgist.errors import RecipeError
from fedgist.recipe.data_section import Data
from fedgist.recipe.objective_loading import recorded_objective
from fedgist.recipe.schema import ModelSection, Partitioning, Recipe
from fedgist.recipe.section import GIVEN

RowsOfClients = Sequence[object] | Mapping[str, object]  # each client's rows, in order or by name
TestSets = Mapping[str, tuple[object, object]]  # x and y by name
Build = Callable[[], nn.Module]
OF_MODULES = ("project", "frozen", "adapters")  # keys of [model] that are read for a user's modules
ALL_SOURCES = set(Data.model_fields) - {"name"}  # keys of [data] that are read beside any data


@dataclass(frozen=True)
class ClientGroup:
    """Clients of one architecture: their model's builder, and their numbers or their share of all.

    ``head`` names the linear layer that is the head. None means the last linear layer. ``note`` is
    a message for the user about the model's initial weights. ``frozen`` says that the body is a
    constant, with ``adapters`` or without.
    """

    build: Build
    share: float = 1.0
    clients: tuple[int, ...] | None = None
    head: str | None = None
    note: str = ""
    frozen: bool = False
    adapters: Adapters | None = None


@dataclass(frozen=True)
class Overrides:
    """A user's own objects, which replace parts of a recipe."""

    data: Dataset | None = None
    clients: RowsOfClients | None = None  # each client's training rows
    clients_test: RowsOfClients | None = None
    groups: Mapping[str, ClientGroup] | None = None
    method: Method | None = None
    objective: object | None = None
    metrics: Mapping[str, OwnMetric | None] = field(default_factory=dict)  # by recorded names
    test_sets: TestSets | None = None  # further test sets of the server
    public: object | None = None  # rows that all may see
    root: Path | None = None  # where data sets are


def apply_overrides(recipe: Recipe, given: Overrides, stated: Mapping[str, Any] | None) -> Recipe:
    """Return the recipe with ``given`` as the name of each part that an object replaces.

    ``stated`` is the recipe's own table if it was given together with the objects. Then a key in
    the table that nothing reads is an error. Unread keys of a recipe file are dropped with a note.
    """
    update: dict[str, Any] = {}
    unread: list[tuple[str, str]] = []
    texts = recipe.model_dump(exclude_unset=True) if stated is None else stated
    if given.data is not None:
        kept = {key: getattr(recipe.data, key) for key in ALL_SOURCES}
        if recipe.data.name == GIVEN:  # its options were checked
            kept |= {"name": GIVEN, **recipe.data.options}
        unread += [(f"data.{k}", "data") for k in texts.get("data", {}) if k not in kept]
        update["data"] = Data(**{**kept, "name": GIVEN})
    if given.clients is not None:
        unread += [(f"partition.{key}", "clients") for key in texts.get("partition", {})]
        update["partition"] = Partitioning(name=GIVEN)
        _check_count(recipe, len(given.clients))
    if given.groups is not None:
        unread += [(f"model.{k}", "model") for k in texts.get("model") or {} if k not in OF_MODULES]
        unread += [("clients.architectures", "model")] * bool(recipe.clients.architectures)
        kept = {key: getattr(recipe.model, key) for key in OF_MODULES} if recipe.model else {}
        update["model"] = ModelSection(name=GIVEN, **kept)
        update["clients.architectures"] = {}
    objective, keys = _objective(given, texts.get("objective", {}))
    update, unread = update | objective, unread + keys
    if unread and stated is not None:
        key, argument = unread[0]
        raise RecipeError(
            f"{key} is given in the recipe, and {argument}= as well: give only one of the two"
        )
    notes = [f"{key} of the recipe is dropped: {argument}= is given" for key, argument in unread]
    return recipe.changed(update).noting([*recipe.dropped, *notes])


def _objective(
    given: Overrides, texts: Mapping[str, object]
) -> tuple[dict[str, object], list[tuple[str, str]]]:
    """Return the changes that an objective or metrics make, and the keys that they replace."""
    if given.objective is not None:
        replaced = [(f"objective.{key}", "objective") for key in texts]
        return {"objective": recorded_objective(given.objective)}, replaced
    if not given.metrics:
        return {}, []
    replaced = [("objective.metrics", "metrics")] * ("metrics" in texts)
    return {"objective.metrics": tuple(given.metrics)}, replaced


def _check_count(recipe: Recipe, count: int) -> None:
    wanted = recipe.clients.num_clients
    if "num_clients" in recipe.clients.model_fields_set and wanted != count:
        raise RecipeError(f"clients.num_clients = {wanted}, but clients= lists the rows of {count}")
