"""From a recipe to a world: examples, clients, models and a method that fit each other."""

from __future__ import annotations

import copy
import csv
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.method import ClientInfo, Method, Task, Training
from fedgist.core.net import Architecture, Net, split
from fedgist.core.optim import Optimizer
from fedgist.core.tree import map_leaves
from fedgist.data import load
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset, check
from fedgist.data.examples import examples
from fedgist.data.partition import Partition, partition
from fedgist.engines.client_work import Population
from fedgist.errors import RecipeError, one_of
from fedgist.federation.recipe import ModelSection, Recipe, build_method
from fedgist.models import MODELS

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Group:
    """Clients of one architecture.

    How the model is built, and which clients (or which share of them).
    """

    build: Build
    share: float = 1.0
    clients: tuple[int, ...] | None = None
    head: str | None = None


@dataclass(frozen=True)
class Given:
    """A user's own objects, standing in for what a recipe names."""

    data: Dataset | None = None
    clients: Sequence[Tensor] | None = None  # each client's training rows
    clients_test: Sequence[Tensor] | None = None
    groups: Mapping[str, Group] | None = None
    method: Method | None = None
    root: Path | None = None  # where data sets are


@dataclass(frozen=True, eq=False)
class World:
    """Everything of a run but its state."""

    recipe: Recipe
    data: Dataset
    partition: Partition
    method: Method
    task: Task
    population: Population
    online: Callable[[int], list[ClientInfo]]


def make_world(recipe: Recipe, given: Given | None = None) -> World:
    """Make the world of a recipe.

    Raises
    ------
    ValueError
        (RecipeError, DataError) if its parts do not exist or do not fit each other: one line that
        says which.
    """
    given = given or Given()
    root = random.key(recipe.seed)
    data = read_data(recipe, given)
    natural = recipe.partition.name == "natural" and data.clients is not None
    if natural and "num_clients" not in recipe.clients.model_fields_set:
        assert data.clients is not None  # for the type checker
        found = recipe.clients.model_copy(update={"num_clients": int(data.clients.max()) + 1})
        recipe = recipe.model_copy(update={"clients": found})
    parts = divide(recipe, data, given, random.fold(root, "partition"))
    num_clients = len(parts.train)
    method = given.method or build_method(recipe.method.name, recipe.method.options)
    groups = given.groups or recipe_groups(recipe, data)
    device = recipe.engine.device
    architectures, starts = _architectures(recipe, data, groups, device)
    members = _members(groups, num_clients, random.fold(root, "architectures"))
    everyone = tuple(ClientInfo(i, (members[i],)) for i in range(num_clients))
    train, clients = parts.train, everyone
    if method.merges_clients:
        train, clients = train.merged(), (ClientInfo(0, (next(iter(architectures)),)),)
    t = recipe.train
    optimizer = Optimizer(t.optimizer, lr=t.lr, momentum=t.momentum, weight_decay=t.weight_decay)
    training = Training(t.num_rounds, t.fraction_train, t.local_epochs, t.batch_size, optimizer)
    task = Task(data.input_shape, data.num_classes, len(clients), architectures, starts, training)
    try:
        method.check(task)
        on_train, on_test = examples(data, recipe.data.augment, device)
    except (ValueError, RuntimeError) as error:
        raise RecipeError(str(error).splitlines()[0]) from error
    population = Population(clients, on_train, on_test, train, parts.validation, parts.test)
    online = _online(recipe, clients, random.fold(root, "online"))
    return World(recipe, data, parts, method, task, population, online)


def read_data(recipe: Recipe, given: Given) -> Dataset:
    """Return the examples a recipe names, or the user's own."""
    if given.data is not None:
        return check(given.data).first(recipe.data.train_rows)
    data = load(recipe.data.name, root=given.root, **recipe.data.options).first(
        recipe.data.train_rows
    )
    if recipe.data.augment and len(data.input_shape) != 3:  # noqa: PLR2004
        msg = (
            f"data.augment needs images; {data.name} has examples of shape {list(data.input_shape)}"
        )
        raise RecipeError(msg)
    return data


def divide(recipe: Recipe, data: Dataset, given: Given, key: Tensor) -> Partition:
    """Return who has what: the recipe's partition, or the user's own."""
    if given.clients is None:
        p = recipe.partition
        return partition(
            data,
            p.name,
            recipe.clients.num_clients,
            key,
            validation=recipe.data.validation,
            **p.options,
        )
    train = Rows.of([torch.as_tensor(rows, dtype=torch.int64) for rows in given.clients])
    tests = given.clients_test or [torch.arange(len(data.y_test))] * len(train)
    if len(tests) != len(train):
        msg = f"{len(train)} clients have training rows, {len(tests)} have test rows"
        raise RecipeError(msg)
    test = Rows.of([torch.as_tensor(rows, dtype=torch.int64) for rows in tests])
    for rows, size, what in (
        (train.rows, len(data.y), "training"),
        (test.rows, len(data.y_test), "test"),
    ):
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= size):
            msg = (
                f"clients name {what} rows {int(rows.min())}..{int(rows.max())}, but there are "
                f"{size}"
            )
            raise RecipeError(msg)
    return Partition(train, Rows.of([torch.zeros(0, dtype=torch.int64)] * len(train)), test)


def recipe_groups(recipe: Recipe, data: Dataset) -> dict[str, Group]:
    """Return the groups of clients by architecture that a recipe describes."""
    if not recipe.clients.architectures:
        return {
            recipe.model.name.rpartition(":")[2]: Group(
                _builder(recipe.model, data), head=recipe.model.head
            )
        }
    groups = {}
    for name, value in recipe.clients.architectures.items():
        table: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"share": value}
        share = table.pop("share", None)
        if not isinstance(share, int | float) or share <= 0:
            msg = (
                f"clients.architectures.{name}: share must be a number greater than 0, not "
                f"{share!r}"
            )
            raise RecipeError(msg)
        section = ModelSection.model_validate({"name": table.pop("model", name), **table})
        groups[name] = Group(_builder(section, data), float(share), head=section.head)
    return groups


def _builder(section: ModelSection, data: Dataset) -> Build:
    if ":" in section.name:
        module, _, attribute = section.name.partition(":")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            msg = f"model.name = {section.name!r}: {error}"
            raise RecipeError(msg) from error
    else:
        try:
            factory = MODELS[one_of(section.name, MODELS, "model")]
        except ValueError as error:
            msg = f"model.name: {error} (or your own: 'package.module:factory')"
            raise RecipeError(msg) from error
    accepted = list(inspect.signature(factory).parameters)
    open_ended = any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(factory).parameters.values()
    )
    for key in section.options:
        if key not in accepted and not open_ended:
            msg = (
                f"model.{key}: unknown key of {section.name}; known: "
                f"{', '.join(accepted[2:]) or 'none'}"
            )
            raise RecipeError(msg)
    return lambda: factory(data.input_shape, data.num_classes, **section.options)


def module_group(
    module: nn.Module | Build, *, own_start: bool, clients: Sequence[int] | None = None
) -> Group:
    """Return the group of a user's module (its numbers are the start) or factory."""
    members = None if clients is None else tuple(clients)
    if not isinstance(module, nn.Module):
        return Group(module, clients=members)

    def build() -> nn.Module:
        fresh = copy.deepcopy(module)
        for layer in fresh.modules() if own_start else ():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
        return fresh

    return Group(build, clients=members)


def _architectures(
    recipe: Recipe, data: Dataset, groups: Mapping[str, Group], device: str
) -> tuple[dict[str, Architecture], dict[str, Net]]:
    architectures, starts = {}, {}
    for name, group in groups.items():
        try:
            arch = split(
                group.build, data.input_shape, data.num_classes, name=name, head=group.head
            )
        except (ValueError, TypeError, RuntimeError) as error:
            msg = f"model {name}: {str(error).splitlines()[0]}"
            raise RecipeError(msg) from error
        start = arch.start(int(random.key(recipe.seed, "start", name)))
        architectures[name] = arch
        starts[name] = map_leaves(lambda leaf: leaf.to(device), start)
    return architectures, starts


def _members(groups: Mapping[str, Group], num_clients: int, key: Tensor) -> list[str]:
    """Return each client's architecture.

    The given clients, or shares of a random order (largest remainders).
    """
    if all(g.clients is not None for g in groups.values()):
        by_client = {c: name for name, g in groups.items() for c in g.clients or ()}
        if sorted(by_client) != list(range(num_clients)):
            missing = sorted(set(range(num_clients)) ^ set(by_client))
            msg = f"every client needs exactly one model; look at client {missing[0]}"
            raise RecipeError(msg)
        return [by_client[i] for i in range(num_clients)]
    total = sum(g.share for g in groups.values())
    exact = {name: g.share / total * num_clients for name, g in groups.items()}
    counts = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda n: counts[n] - exact[n])[
        : num_clients - sum(counts.values())
    ]:
        counts[name] += 1
    names = [name for name, count in counts.items() for _ in range(count)]
    out = [""] * num_clients
    for place, name in zip(random.permutation(key, num_clients).tolist(), names, strict=True):
        out[place] = name
    return out


def _online(
    recipe: Recipe, clients: Sequence[ClientInfo], key: Tensor
) -> Callable[[int], list[ClientInfo]]:
    availability = recipe.clients.availability
    if isinstance(availability, str):
        trace = _trace(Path(availability).expanduser(), len(clients))
        return lambda number: [c for c in clients if c.id in trace.get(number, ())]

    def online(number: int) -> list[ClientInfo]:
        draws = random.uniform(random.fold(key, number), (len(clients),)).tolist()
        return [c for c, draw in zip(clients, draws, strict=True) if draw < availability]

    return online


def _trace(path: Path, num_clients: int) -> dict[int, set[int]]:
    """Read who is online when: lines "round,client" under that header."""
    out: dict[int, set[int]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            pairs = [(int(row["round"]), int(row["client"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        msg = f"clients.availability: {path} is no file of 'round,client' lines ({error})"
        raise RecipeError(msg) from error
    for number, client in pairs:
        if not 0 <= client < num_clients:
            msg = (
                f"clients.availability: {path} names client {client}, outside 0..{num_clients - 1}"
            )
            raise RecipeError(msg)
        out.setdefault(number, set()).add(client)
    return out


def class_counts(world: World) -> dict[str, Any]:
    """Return the names of the classes, and how many training rows of each every client has."""
    names = world.data.classes or tuple(str(c) for c in range(world.data.num_classes))
    train = world.partition.train
    counts = [
        world.data.y[train[i]].bincount(minlength=world.data.num_classes).tolist()
        for i in range(len(train))
    ]
    return {"classes": list(names), "train": counts}
