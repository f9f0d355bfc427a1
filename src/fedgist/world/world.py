"""Make the world of a recipe: examples, clients, models and a method that fit each other.

A world belongs to a simulation: it holds the server's context and the rows of all sites. A real
server has only the server's context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedgist.core import random
from fedgist.core.batch import RowSet
from fedgist.core.counts import MOST_ROWS
from fedgist.core.method import ClientInfo, Settings, Task
from fedgist.core.net import Architecture, Net
from fedgist.core.objective import Objective
from fedgist.core.training import Pool, Training
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.data.examples import Examples, by_client, examples
from fedgist.data.partition import Partition
from fedgist.engines.population import Population
from fedgist.errors import RecipeError, first_line
from fedgist.recipe.overrides import ClientGroup
from fedgist.recipe.resolve import Setup
from fedgist.recipe.training_section import training_of
from fedgist.world.availability import availability
from fedgist.world.client_settings import client_settings
from fedgist.world.data import divide, read_data
from fedgist.world.graph import neighbors_of
from fedgist.world.model_sizes import Sizes
from fedgist.world.models import (
    architectures_by_client,
    architectures_of,
    fitted,
    groups_of_recipe,
    members_of,
    members_of_pools,
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
from fedgist.world.server_context import NeighborsByRound, Online, ServerContext
from fedgist.world.server_sets import server_sets


@dataclass(frozen=True, eq=False)
class World:
    """A simulation without its state: the server's context, and the sites' rows and models."""

    server: ServerContext
    data: Dataset
    partition: Partition
    population: Population
    settings: Mapping[int, Settings] = field(default_factory=dict)  # of clients that have their own
    public: Public | None = None


def make_world(setup: Setup, say: Callable[[str], None] = lambda _: None) -> World:
    """Make the world of a resolved recipe; ``say`` is called with notes on long calculations."""
    data, public, central = _data(setup)
    objective = objective_of(setup, data)
    parts = divide(setup, data)
    public = public or rows_of_client(setup, data, parts)
    check_method_reads(setup.method, objective, data.name)
    sizes = Sizes.of(data, objective)
    groups = _groups(setup, sizes, parts.names)
    models = architectures_of(groups, sizes, setup.seed, setup.device)
    clients, train, pools = _clients(setup, groups, parts)
    try:
        on_train, on_test = examples(data, setup.data.augment, setup.device, objective.views)
        sets = server_sets(setup, data, on_test, _held_out(on_train, on_test, central, parts))
        training = replace(training_of(setup.train), pools=pools)
        task = _task(setup, data, len(clients), *models, training, objective, sets)
        task = task if public is None else _with_public(task, public, on_train, setup, parts)
        setup.method.check(task)
        task, spending = private_task(setup, task, clients, train.counts.tolist(), say)
        check_rows(setup.privacy, data, train, parts.validation)
    except (ValueError, RuntimeError) as error:
        raise RecipeError(first_line(error)) from error
    online, neighbors, settings, few_notes = _participants(setup, task, clients, train, parts.names)
    notes, holds_out = _notes(groups, few_notes, spending), len(parts.validation.rows) > 0
    about_data = data.name, data.summary, parts.names, holds_out
    side = ServerContext(
        *(setup, len(parts.train), setup.method, task, clients, online, *about_data),
        *(notes, spending, neighbors, setup.engine.plans),
    )
    population = Population(clients, on_train, on_test, train, parts.validation, parts.test)
    population = _with_own_moments(population, setup.data.normalize, data, parts)
    return World(side, data, parts, population, settings, public)


def _notes(
    groups: Mapping[str, ClientGroup], few_notes: Sequence[str], spending: PrivacyBudget | None
) -> tuple[str, ...]:
    """Return notes for the user before the first round."""
    of_models = (group.note for group in groups.values() if group.note)
    return (*of_models, *few_notes, *(spending.notes() if spending else ()))


def _data(setup: Setup) -> tuple[Dataset, Public | None, Dataset | None]:
    """Return the clients' data, the public rows, and the rows that the server holds out."""
    data = read_data(setup.data, setup.seed, setup.given.data, setup.given.root)
    data, public = set_aside(setup, data)
    data, central = hold_out_at_server(setup, data)
    return data, public, central


def _groups(setup: Setup, sizes: Sizes, names: Sequence[str]) -> dict[str, ClientGroup]:
    """Return the groups of clients with one model each: the user's own, or the recipe's."""
    if setup.given.groups:
        return fitted(setup.given.groups, sizes, setup.feature_width)
    return groups_of_recipe(setup.models, setup.pools, sizes, names)


def _with_public(
    task: Task, public: Public, on_train: Examples, setup: Setup, parts: Partition
) -> Task:
    rows = public.seen(on_train, setup.data.public)
    return replace(
        task,
        public=rows,
        public_labels=public.labelled,
        public_client=client_of(setup, parts),
        public_digest=digest_of(rows),
    )


def _held_out(
    on_train: Examples, on_test: Examples, central: Dataset | None, parts: Partition
) -> Examples:
    """Return the held-out rows: those of all clients together, or those of the server."""
    if central is None:
        return on_train.only(parts.validation.rows)
    return on_test.others(central.x, central.y)


def _clients(
    setup: Setup, groups: Mapping[str, ClientGroup], parts: Partition
) -> tuple[tuple[ClientInfo, ...], Rows, Mapping[str, Pool]]:
    """Return the clients with their architectures, their training rows, and the pools' sizes."""
    if setup.method.merges_clients:
        return (ClientInfo(0, (next(iter(groups)),)),), parts.train.merged(), {}
    root, train, count = random.key(setup.seed), parts.train, len(parts.train)
    if not setup.pools:
        names = members_of(groups, count, random.fold(root, "architectures"))
        return tuple(ClientInfo(i, (name,)) for i, name in enumerate(names)), train, {}
    members = members_of_pools(setup.pools, count, random.fold(root, "pools"), parts.names)
    names_of = enumerate(architectures_by_client(members, count))
    clients = tuple(ClientInfo(i, names) for i, names in names_of)
    return clients, train, task_pools(setup, members)


def _participants(
    setup: Setup, task: Task, clients: tuple[ClientInfo, ...], train: Rows, names: Sequence[str]
) -> tuple[Online, NeighborsByRound, dict[int, Settings], list[str]]:
    """Return the clients online in a round, each client's neighbors, and client settings.

    The last value returned is a list of notes on clients that are left out.
    """
    root, section = random.key(setup.seed), setup.clients
    online = availability(section.availability, clients, random.fold(root, "online"))
    online, few_notes = drop_small_clients(online, train, task.objective)
    neighbors = neighbors_of(section.graph, setup.method, task, random.fold(root, "graph"))
    key = random.fold(root, "client settings")
    own = client_settings(section.settings, setup.method, task, len(clients), key, names)
    return online, neighbors, own, few_notes


def _with_own_moments(
    population: Population, normalize: str, data: Dataset, parts: Partition
) -> Population:
    """With ``normalize = "client"``, normalize each client's rows with its own moments.

    The server's test rows keep the moments of the data.
    """
    if normalize != "client":
        return population
    whole = population.test_examples
    train, test = by_client(data, parts, population.examples, whole)
    return replace(population, examples=train, test_examples=test, whole_test=whole)


def _task(
    setup: Setup,
    data: Dataset,
    num_clients: int,
    architectures: Mapping[str, Architecture],
    starts: Mapping[str, Net],
    training: Training,
    objective: Objective,
    test_sets: Mapping[str, RowSet],
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
        min_replies=setup.privacy.min_replies,
        max_norm=setup.clients.max_norm or math.inf,
        max_rows=setup.clients.max_rows or MOST_ROWS,
        annotations={
            name: (float(values.min()), float(values.max()))
            for name, values in data.annotations.items()
        },
    )
