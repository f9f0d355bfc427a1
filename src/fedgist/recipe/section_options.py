"""Check the options of a recipe's data source, models and method against their signatures.

A recorded key that nothing reads would be misleading. It is an error if it was given together with
the current name. If a setting changed the name (``--set model.name=lenet5``), the options of the
old name are dropped, and the recipe carries a note.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedgist.core.objectives.metrics import OBJECTIVES, PROBE
from fedgist.core.training import MOMENTUM
from fedgist.data import PARTITIONS
from fedgist.data.sources import SOURCES
from fedgist.data.sources.hub_columns import HubOptions
from fedgist.data.sources.loading import NO_OPTIONS
from fedgist.errors import RecipeError, shown
from fedgist.options import check_options, options_of
from fedgist.recipe.data_loading import data_source
from fedgist.recipe.method_loading import build_method
from fedgist.recipe.model_factories import model_factory, sizes_of
from fedgist.recipe.schema import ObjectiveSection, Recipe
from fedgist.recipe.section import GIVEN

# what objectives take beside their options
OF_THE_TASK = (
    *("num_classes", "num_words", "num_numbers", "num_labels", "chosen", "smoothing"),
    *("name", "names", "label_moments"),
)
PARTS = ("data", "num_clients", "key")  # what every partition takes beside its options
Update = tuple[dict[str, Any], list[str]]  # sections, and what is said of keys that were dropped


def with_checked_options(recipe: Recipe, changed: Collection[str] = ()) -> Recipe:
    """Return the recipe with its options checked, and without keys that no code reads.

    ``changed`` holds the dotted keys that were set in addition to the file.
    """
    update: dict[str, Any] = {}
    notes: list[str] = []
    for part in (_data, _partition, _models, _objective, _train):
        sections, dropped = part(recipe, changed)
        update |= sections
        notes += dropped
    return recipe.changed(update).noting(notes)


def check_tables(
    tables: Mapping[str, Mapping[str, Any]], aside: Collection[str], objective: str | None
) -> None:
    """Check the options in all tables ``[methods.NAME]``, also of methods that do not run.

    ``aside`` holds the names of sections in these tables, which are not options. ``objective`` is
    the name of the recipe's own objective.
    """
    for name, table in tables.items():
        options = {key: value for key, value in table.items() if key not in aside}
        build_method(name, options, f"methods.{name}")
        own = {"name": objective} if objective else {}
        section = ObjectiveSection(**{**own, **table.get("objective", {})})
        if ":" in section.name:
            continue
        given, table_key = OBJECTIVES[section.name], f"methods.{name}.objective"
        check_options(given, section.options, section.name, table_key, OF_THE_TASK)


def no_source() -> None:
    """Take no options: public rows of the training set have none."""


def _data(recipe: Recipe, changed: Collection[str]) -> Update:
    if recipe.data.name == GIVEN:
        check_options(HubOptions, recipe.data.options, "data given in Python", "data")
        return {}, []
    sections, notes = _section(
        "data", recipe.data, data_source(recipe.data.name), NO_OPTIONS, changed
    )
    check_public(recipe)
    rows = recipe.data.train_rows
    if rows is not None and "data.name" in changed and "data.train_rows" not in changed:
        notes.append(f"data.train_rows = {rows} of the recipe is kept: only so many rows are used")
    return sections, notes


def check_public(recipe: Recipe) -> None:
    """Check the options of a recipe's public rows."""
    if (public := recipe.data.public) is not None:
        source = SOURCES[public.name] if public.name else no_source
        check_options(source, public.options, public.name or "it", "data.public", NO_OPTIONS)


def _partition(recipe: Recipe, changed: Collection[str]) -> Update:
    if recipe.partition.name == GIVEN:
        return {}, []
    rule = PARTITIONS[recipe.partition.name]
    sections, notes = _section("partition", recipe.partition, rule, PARTS, changed)
    defaults, _ = options_of(rule, PARTS)
    filled = defaults | sections["partition"].options
    sections["partition"] = type(recipe.partition)(name=recipe.partition.name, **filled)
    clients = recipe.clients
    stated = "num_clients" in clients.model_fields_set and "clients.num_clients" not in changed
    if recipe.partition.name == "natural" and "partition.name" in changed and stated:
        kept = {key: getattr(clients, key) for key in clients.model_fields_set - {"num_clients"}}
        sections["clients"] = type(clients)(**kept)
        notes.append(
            f"clients.num_clients = {clients.num_clients} is dropped: the data say how many"
        )
    return sections, notes


def _models(recipe: Recipe, changed: Collection[str]) -> Update:
    model, clients = recipe.model, recipe.clients
    if clients.architectures and clients.pools:
        raise RecipeError(
            "clients.architectures and clients.pools both say the clients' models; give one"
        )
    if not (clients.architectures or clients.pools):
        if model is None or model.name == GIVEN:
            return {}, []
        factory = model_factory(model.name)
        return _section("model", model, factory, sizes_of(factory), changed)
    kind = "pools" if clients.pools else "architectures"
    table, width = f"clients.{kind}", model.project if model else None
    keys = [f"model.{key}" for key in (model.model_fields_set if model else ()) if key != "project"]
    table_changed = any(key.startswith(table) for key in changed)
    unread = [key for key in keys if key in changed or not table_changed]
    if unread:
        raise RecipeError(
            f"{min(unread)} is given, and nothing reads it: [{table}] names the clients' models"
        )
    notes = [f"{key} is dropped: {table} names the models" for key in sorted(keys)]
    tables = getattr(clients, kind)
    return {"model": None, table: {k: _of_width(v, width) for k, v in tables.items()}}, notes


def _of_width(table: object, width: int | None) -> object:
    """Return an architecture's table, or its share, with the feature width of ``[model]``."""
    if width is None:
        return table
    return {"project": width, **(table if isinstance(table, Mapping) else {"share": table})}


def _objective(recipe: Recipe, changed: Collection[str]) -> Update:
    section, evaluate = recipe.objective, recipe.evaluate
    if ":" in section.name:  # its class checks them
        return {}, []
    update = _section("objective", section, OBJECTIVES[section.name], OF_THE_TASK, changed)
    if PROBE.name not in section.metrics or evaluate.probe != "none":
        return update
    if recipe.facts is not None:  # the server of a federation has no rows for a probe
        return update
    if "probe" in evaluate.model_fields_set:
        raise RecipeError(
            f"evaluate.probe = 'none': nothing else judges models of objective {section.name}"
        )
    update[0]["evaluate"] = evaluate.model_copy(update={"probe": "logistic"})
    return update


def _train(recipe: Recipe, changed: Collection[str]) -> Update:
    train = recipe.train
    if train.optimizer == "momentum":
        momentum = MOMENTUM if train.momentum is None else train.momentum
        return {"train": train.model_copy(update={"momentum": momentum})}, []
    if train.momentum is None:
        return {}, []
    setting = f"train.momentum = {train.momentum}"
    if "train.momentum" in changed or "train.optimizer" not in changed:
        raise RecipeError(
            f"{setting}: train.optimizer = {train.optimizer!r} does not read it; known to: momentum"
        )
    note = f"{setting} is dropped: optimizer {train.optimizer} does not read it"
    return {"train": train.model_copy(update={"momentum": None})}, [note]


def _section(
    table: str,
    section: Any,
    function: Callable[..., Any],
    aside: tuple[str, ...],
    changed: Collection[str],
) -> Update:
    """Return a section with its options checked, without options that belong to an old name."""
    option_names, open_ended = options_of(function, aside)
    options, notes = dict(section.options), []
    if f"{table}.name" in changed and not open_ended:
        for key in [k for k in options if k not in option_names and f"{table}.{k}" not in changed]:
            setting = f"{table}.{key} = {shown(options.pop(key))}"
            notes.append(f"{setting} is dropped: {section.name} does not read it")
    check = check_options(function, options, section.name, table, aside)
    typed = {key: getattr(section, key) for key in section.model_fields_set - set(section.options)}
    return {table: type(section)(**typed, **check)}, notes
