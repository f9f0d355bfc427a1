"""Models by name: their factories, their options, and the tables that assign them to clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from fedgist.core.bounds import NonNegativeInt, PositiveInt
from fedgist.core.tree import SEPARATOR
from fedgist.errors import RecipeError, shown
from fedgist.models import MODELS, PREFIX
from fedgist.models.encoders import encoder_of
from fedgist.options import check_options, checked, options_of
from fedgist.recipe.own_code import load_own
from fedgist.recipe.schema import ModelSection, check_named

Factory = Callable[..., nn.Module]
WORDS = "words"  # the parameter that gets the number of words of texts
ClientList = tuple[int | str, ...]  # clients by number or by name
StatedClients = Annotated[tuple[NonNegativeInt | str, ...], Field(min_length=1)]


def model_factory(name: str) -> Factory:
    """Return the function that makes the model called ``name``."""
    if name.startswith(PREFIX):
        return encoder_of(name.removeprefix(PREFIX))
    factory: Factory = load_own("model.name", name) if ":" in name else MODELS[name]
    if not callable(factory):
        raise RecipeError(f"model.name = {shown(name)} is not a function that makes a model")
    return factory


def sizes_of(factory: Factory) -> tuple[str, ...]:
    """Return the parameters that the data determine: input shape, number of classes, words."""
    names = tuple(options_of(factory)[0])
    return (*names[:2], *(name for name in names[2:] if name == WORDS))


@dataclass(frozen=True)
class NamedModel:
    """A model by name, with its checked options. ``table`` is the recipe table with its name."""

    table: str
    section: ModelSection
    factory: Factory
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ModelTable:
    """A model of some clients: a share of all clients, or the clients listed by number or name.

    With a share of 0, only the server has the model.
    """

    model: NamedModel
    share: float = 1.0
    clients: ClientList | None = None


@dataclass(frozen=True)
class PoolTable:
    """A pool of clients with one model.

    ``clients`` holds client numbers, a pattern of client names (``"*/question"``), or the number of
    clients to draw. None means all clients. ``per_round`` is the number of the pool's clients
    selected in a round. None means the fraction ``train.fraction_train`` of the pool.
    """

    model: NamedModel
    clients: ClientList | str | int | None = None
    per_round: int | None = None


def whole_model(section: ModelSection) -> ModelTable:
    """Return the model of all clients, from ``[model]``."""
    return ModelTable(_named(section, "model"))


def architecture_tables(tables: Mapping[str, Mapping[str, Any] | float]) -> dict[str, ModelTable]:
    """Return the checked tables of ``clients.architectures`` by name."""
    models = {}
    for name, value in tables.items():
        table_key = f"clients.architectures.{name}"
        table: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"share": value}
        share, clients = table.pop("share", None), table.pop("clients", None)
        if clients is None or share is not None:
            share = _share(share, clients, table_key)
        else:
            clients = checked(StatedClients, clients, f"{table_key}.clients")
        model = _model_of_table(table, name, table_key)
        models[name] = ModelTable(model, 1.0 if share is None else share, clients)
    if not any(model.share for model in models.values()):
        raise RecipeError("clients.architectures: all shares are 0, so that no client has a model")
    if len({model.clients is None for model in models.values()}) > 1:
        raise RecipeError(
            "clients.architectures: give all of them a share, or all of them a list of clients"
        )
    return models


def pool_tables(tables: Mapping[str, Mapping[str, object]]) -> dict[str, PoolTable]:
    """Return the checked tables of ``clients.pools`` by name."""
    pools = {}
    for name, value in tables.items():
        table_key, table = f"clients.pools.{name}", dict(value)
        if not name or SEPARATOR in name:
            raise RecipeError(f"{table_key}: a pool's name is not empty and has no {SEPARATOR!r}")
        clients, per_round = table.pop("clients", None), table.pop("per_round", None)
        if clients is not None:
            kinds: dict[type, object] = {list: StatedClients, tuple: StatedClients, str: str}
            kind = kinds.get(type(clients), PositiveInt)
            clients = checked(kind, clients, f"{table_key}.clients")
        if per_round is not None:
            per_round = checked(PositiveInt, per_round, f"{table_key}.per_round")
        pools[name] = PoolTable(_model_of_table(table, name, table_key), clients, per_round)
    return pools


def _model_of_table(table: Mapping[str, object], name: str, table_key: str) -> NamedModel:
    """Return the model that a table describes: by ``model``, or by the table's own ``name``."""
    options = {key: value for key, value in table.items() if key != "model"}
    named = {"name": table.get("model", name), **options}
    try:
        section: ModelSection = checked(ModelSection, named, table_key)
    except RecipeError as error:  # the key is called "model" here
        if "model" not in table:
            raise
        text = str(error).replace(f"{table_key}.name", f"{table_key}.model", 1)
        raise RecipeError(text) from error
    return _named(section, table_key)


def _named(section: ModelSection, table: str) -> NamedModel:
    check_named(table, section.name, "model=")
    factory = model_factory(section.name)
    options = check_options(factory, section.options, section.name, table, sizes_of(factory))
    return NamedModel(table, section, factory, options)


def _share(share: object, clients: object, table_key: str) -> float:
    if clients is not None:
        raise RecipeError(f"{table_key}: give share or clients, not both")
    if isinstance(share, bool) or not isinstance(share, int | float) or share < 0:
        raise RecipeError(f"{table_key}: share must be a number, at least 0, not {shown(share)}")
    return float(share)
