"""Models by name: their factories, their options, and the tables that assign them to clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from fedgist.core.tree import SEPARATOR
from fedgist.errors import RecipeError, shown
from fedgist.models import MODELS
from fedgist.options import check_options, checked, options_of
from fedgist.recipe.own_code import load_own
from fedgist.recipe.schema import ModelSection
from fedgist.recipe.section import PositiveInt

Factory = Callable[..., nn.Module]
ClientNumbers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


def model_factory(name: str) -> Factory:
    """Return the function that makes the model called ``name``."""
    factory: Factory = load_own("model.name", name) if ":" in name else MODELS[name]
    if not callable(factory):
        raise RecipeError(f"model.name = {shown(name)} is not a function that makes a model")
    return factory


def sizes_of(factory: Factory) -> tuple[str, ...]:
    """Return the names of a factory's first two parameters: an input's shape, and the classes."""
    return tuple(options_of(factory)[0])[:2]


@dataclass(frozen=True)
class ModelOfSome:
    """A model that some clients have: a share of all, or those whose numbers are listed.

    With a share of 0 it is the server's alone.
    """

    section: ModelSection
    share: float = 1.0
    clients: tuple[int, ...] | None = None


def check_models(tables: Mapping[str, Mapping[str, Any] | float]) -> dict[str, ModelOfSome]:
    """Return the checked tables of ``clients.architectures`` by name."""
    models = {}
    for name, value in tables.items():
        where = f"clients.architectures.{name}"
        table: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"share": value}
        share, clients = table.pop("share", None), table.pop("clients", None)
        if clients is None or share is not None:
            share = _share(share, clients, where)
        else:
            clients = checked(ClientNumbers, clients, f"{where}.clients")
        models[name] = ModelOfSome(
            checked_model(table, name, where), 1.0 if share is None else share, clients
        )
    if models and not any(model.share for model in models.values()):
        raise RecipeError("clients.architectures: all shares are 0, so that no client has a model")
    if len({model.clients is None for model in models.values()}) > 1:
        raise RecipeError(
            "clients.architectures: give all of them a share, or all of them a list of clients"
        )
    return models


def checked_model(table: Mapping[str, object], name: str, where: str) -> ModelSection:
    """Return the model that a table describes: by ``model``, or by the table's own ``name``."""
    options = {key: value for key, value in table.items() if key != "model"}
    named = {"name": table.get("model", name), **options}
    try:
        section: ModelSection = checked(ModelSection, named, where)
    except RecipeError as error:  # the key is called "model" here
        if "model" not in table:
            raise
        raise RecipeError(str(error).replace(f"{where}.name", f"{where}.model", 1)) from error
    factory = model_factory(section.name)
    check_options(factory, section.options, section.name, where, sizes_of(factory))
    return section


@dataclass(frozen=True)
class PoolTable:
    """The checked table ``[clients.pools.NAME]``.

    ``clients`` are numbers of clients, a pattern of their names (``"*/question"``), or how many are
    drawn; None: all of them. ``per_round`` is
    how many of them are asked in a round; None: ``train.fraction_train`` of them.
    """

    section: ModelSection
    clients: tuple[int, ...] | str | int | None = None
    per_round: int | None = None


def check_pools(tables: Mapping[str, Mapping[str, object]]) -> dict[str, PoolTable]:
    """Return the checked tables of ``clients.pools`` by name."""
    pools = {}
    for name, value in tables.items():
        where, table = f"clients.pools.{name}", dict(value)
        if not name or SEPARATOR in name:
            raise RecipeError(f"{where}: a pool's name is not empty and has no {SEPARATOR!r}")
        clients, per_round = table.pop("clients", None), table.pop("per_round", None)
        if clients is not None:
            kinds: dict[type, object] = {list: ClientNumbers, tuple: ClientNumbers, str: str}
            kind = kinds.get(type(clients), PositiveInt)
            clients = checked(kind, clients, f"{where}.clients")
        if per_round is not None:
            per_round = checked(PositiveInt, per_round, f"{where}.per_round")
        pools[name] = PoolTable(checked_model(table, name, where), clients, per_round)
    return pools


def _share(share: object, clients: object, where: str) -> float:
    if clients is not None:
        raise RecipeError(f"{where}: give share or clients, not both")
    if isinstance(share, bool) or not isinstance(share, int | float) or share < 0:
        raise RecipeError(f"{where}: share must be a number, at least 0, not {shown(share)}")
    return float(share)
