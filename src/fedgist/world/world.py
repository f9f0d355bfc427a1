"""Make the world of a recipe: examples, clients, models and a method that fit each other.

A world belongs to a simulation: it holds what the server knows and what all sites hold. A real
server has only its own side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedgist.core import random
from fedgist.core.batch import RowSet
from fedgist.core.counts import MOST_ROWS
from fedgist.core.method import ClientInfo, Method, Settings, Task
from fedgist.core.net import Architecture, Net
from fedgist.core.objective import Objective
from fedgist.core.training import Pool, Training
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.data.examples import Examples, by_client, examples
from fedgist.data.partition import Partition
from fedgist.data.sources.in_memory import examples_like
from fedgist.engines.device_choice import usable_device
from fedgist.engines.population import Population
from fedgist.errors import RecipeError, first_line
from fedgist.recipe.method_loading import build_method
from fedgist.recipe.model_factories import check_pools
from fedgist.recipe.reading import Recipe
from fedgist.recipe.training_section import training_of
from fedgist.world.availability import availability
from fedgist.world.client_lists import RowsOfClients
from fedgist.world.client_settings import client_settings
from fedgist.world.data import divide, read_data
from fedgist.world.graph import neighbors_of
from fedgist.world.models import (
    ClientGroup,
    Sizes,
    architectures_by_client,
    architectures_of,
    fitted,
    members_of,
    members_of_pools,
    recipe_groups,
    task_pools,
)
from fedgist.world.objective_choice import check_method_reads, drop_small_clients, objective_of
from fedgist.world.privacy_budget import PrivacyBudget, check_rows, private_task
from fedgist.world.public_data import (
    Public,
    client_of,
    digest_of,
    hold_out_at_server,
    rows_of_client,
    set_aside,
)
from fedgist.world.server_context import NeighborsOf, Online, ServerContext
from fedgist.world.server_sets import TestSets, server_sets


@dataclass(frozen=True)
class Overrides:
    """A user's own objects, which replace what a recipe names."""

    data: Dataset | None = None
    clients: RowsOfClients | None = None  # each client's training rows
    clients_test: RowsOfClients | None = None
    groups: Mapping[str, ClientGroup] | None = None
    method: Method | None = None
    test_sets: TestSets | None = None  # further test sets of the server: x and y by name
    public: object | None = None  # rows that all may see
    root: Path | None = None  # where data sets are


@dataclass(frozen=True, eq=False)
class World:
    """A simulation without its state: the server's context, and the sites' rows and models."""

    server: ServerContext
    data: Dataset
    partition: Partition
    population: Population
    settings: Mapping[int, Settings] = field(default_factory=dict)  # of clients that have their own
    public: Public | None = None


def make_world(
    recipe: Recipe, given: Overrides | None = None, say: Callable[[str], None] = lambda _: None
) -> World:
    """Make the world of a recipe; ``say`` is told what takes long."""
    given, recipe = given or Overrides(), _with_device(recipe)  # found before any work
    data, public, central = _data(recipe, given)
    objective = objective_of(recipe, data)
    recipe = _with_clients(recipe, data, given)
    parts = divide(recipe, data, given.clients, given.clients_test)
    public = public or rows_of_client(recipe, data, parts)
    method = _method(recipe, given, objective, data.name)
    sizes, device = Sizes.of(data, objective), recipe.engine.device
    groups = fitted(given.groups, sizes) if given.groups else recipe_groups(recipe, sizes)
    architectures, starts = architectures_of(recipe, sizes, groups, device)
    clients, train, pools = _clients(recipe, groups, method, parts)
    try:
        on_train, on_test = examples(data, recipe.data.augment, device, objective.views)
        held_out = _held_out(on_train, on_test, central, parts)
        sets = server_sets(recipe, data, given.test_sets, on_test, held_out)
        training = replace(training_of(recipe.train), pools=pools)
        about = training, objective, sets, recipe
        task = _task(data, len(clients), architectures, starts, *about)
        task = task if public is None else _with_public(task, public, on_train, recipe, parts)
        method.check(task)
        task, spending = private_task(recipe, method, task, clients, train.counts.tolist(), say)
        check_rows(recipe.privacy, data, train, parts.validation)
    except (ValueError, RuntimeError) as error:
        raise RecipeError(first_line(error)) from error
    online, hears, settings, lonely = _who(recipe, method, task, clients, train)
    known = data.name, len(parts.validation.rows) > 0, _notes(groups, lonely, spending)
    side = ServerContext(recipe, method, task, clients, online, *known, spending, hears)
    population = Population(clients, on_train, on_test, train, parts.validation, parts.test)
    return World(side, data, parts, _as_seen(population, recipe, data, parts), settings, public)


def _notes(
    groups: Mapping[str, ClientGroup], lonely: Sequence[str], spending: PrivacyBudget | None
) -> tuple[str, ...]:
    """Return notes for the user before the first round."""
    of_models = (group.note for group in groups.values() if group.note)
    return (*of_models, *lonely, *(spending.notes() if spending else ()))


def _data(recipe: Recipe, given: Overrides) -> tuple[Dataset, Public | None, Dataset | None]:
    """Return the clients' examples, the rows that all may see, and those that the server holds."""
    data = read_data(recipe, given.data, given.root)
    own = None if given.public is None else examples_like(data, given.public, "public")
    listed = given.clients is not None
    data, public = set_aside(recipe, data, given.root, own, listed=listed)
    data, central = hold_out_at_server(recipe, data, listed=listed)
    return data, public, central


def _method(recipe: Recipe, given: Overrides, objective: Objective, data: str) -> Method:
    """Return the method, if it can work for such an objective."""
    method = given.method or build_method(recipe.method.name, recipe.method.options)
    check_method_reads(method, objective, data)
    return method


def _with_public(
    task: Task, public: Public, on_train: Examples, recipe: Recipe, parts: Partition
) -> Task:
    rows = public.seen(on_train, recipe.data.public)
    return replace(
        task,
        public=rows,
        public_labels=public.labelled,
        public_client=client_of(recipe, parts),
        public_digest=digest_of(rows),
    )


def _held_out(
    on_train: Examples, on_test: Examples, central: Dataset | None, parts: Partition
) -> Examples:
    """Return the rows that are held out: the clients' together, or those of the server."""
    if central is None:
        return on_train.only(parts.validation.rows)
    return on_test.others(central.x, central.y)


def _clients(
    recipe: Recipe, groups: Mapping[str, ClientGroup], method: Method, parts: Partition
) -> tuple[tuple[ClientInfo, ...], Rows, Mapping[str, Pool]]:
    """Return the clients with their architectures and training rows, and the pools they are in."""
    if method.merges_clients:
        return (ClientInfo(0, (next(iter(groups)),)),), parts.train.merged(), {}
    root, train, count = random.key(recipe.seed), parts.train, len(parts.train)
    tables = check_pools(recipe.clients.pools)
    if not tables:
        names = members_of(groups, count, random.fold(root, "architectures"))
        return tuple(ClientInfo(i, (name,)) for i, name in enumerate(names)), train, {}
    if groups.keys() != tables.keys():
        raise RecipeError(
            "clients.pools name the clients' models; they cannot be given as objects as well"
        )
    members = members_of_pools(tables, count, random.fold(root, "pools"), parts.names)
    names_of = enumerate(architectures_by_client(members, count))
    clients = tuple(ClientInfo(i, names) for i, names in names_of)
    return clients, train, task_pools(recipe, tables, members)


def _who(
    recipe: Recipe, method: Method, task: Task, clients: tuple[ClientInfo, ...], train: Rows
) -> tuple[Online, NeighborsOf, dict[int, Settings], list[str]]:
    """Return who is online in a round, each client's neighbors, and clients' own settings.

    Also returned are notes on clients that are left out.
    """
    root, tables = random.key(recipe.seed), recipe.clients.settings
    online = availability(recipe, clients, random.fold(root, "online"))
    online, lonely = drop_small_clients(online, train, task.objective)
    hears = neighbors_of(recipe, method, task, random.fold(root, "graph"))
    key = random.fold(root, "client settings")
    return online, hears, client_settings(tables, method, task, len(clients), key), lonely


def _as_seen(population: Population, recipe: Recipe, data: Dataset, parts: Partition) -> Population:
    """Let each client see its rows by its own moments, if asked for; the server's stay the same."""
    if recipe.data.normalize != "client":
        return population
    whole = population.test_examples
    train, test = by_client(data, parts, population.examples, whole)
    return replace(population, examples=train, test_examples=test, whole_test=whole)


def _with_device(recipe: Recipe) -> Recipe:
    """Return the recipe with the device that is used."""
    section = recipe.engine.model_copy(update={"device": usable_device(recipe.engine.device)})
    return recipe.model_copy(update={"engine": section})


def _with_clients(recipe: Recipe, data: Dataset, given: Overrides) -> Recipe:
    """Return the recipe with the number of clients, which the user or the data may give."""
    count = None if given.clients is None else len(given.clients)
    natural = recipe.partition.name == "natural" and data.clients is not None
    if count is None and natural and "num_clients" not in recipe.clients.model_fields_set:
        assert data.clients is not None  # for the type checker
        count = int(data.clients.max()) + 1
    count = recipe.clients.num_clients if count is None else count
    section = recipe.clients.model_copy(update={"num_clients": count})
    return recipe.model_copy(update={"clients": section})


def _task(
    data: Dataset,
    num_clients: int,
    architectures: Mapping[str, Architecture],
    starts: Mapping[str, Net],
    training: Training,
    objective: Objective,
    test_sets: Mapping[str, RowSet],
    recipe: Recipe,
) -> Task:
    return Task(
        data.input_shape,
        data.num_classes,
        num_clients,
        architectures,
        starts,
        training,
        objective,
        test_sets,
        main=next(iter(architectures)),
        min_replies=recipe.privacy.min_replies,
        max_norm=recipe.clients.max_norm or math.inf,
        max_rows=recipe.clients.max_rows or MOST_ROWS,
        annotations={
            name: (float(values.min()), float(values.max()))
            for name, values in data.annotations.items()
        },
    )
