"""Make the world of a recipe: examples, clients, models and a method that fit each other.

A world belongs to a simulation: it holds the server's context and the rows of all sites. A real
server has only the server's context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedgist.core import random
from fedgist.core.objectives.objective import Objective
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.data.examples import Examples, by_client, examples
from fedgist.data.feature_shift import shifted
from fedgist.data.partition import Partition
from fedgist.engines.population import HostSettings, Population
from fedgist.errors import RecipeError, first_line
from fedgist.recipe.resolve import Setup
from fedgist.recipe.schema import Recipe
from fedgist.world.data import divide, read_data, with_fates
from fedgist.world.declared import check_facts, declared_facts
from fedgist.world.model_sizes import Sizes
from fedgist.world.newcomers import newcomers_of
from fedgist.world.objective_choice import (
    check_method_reads,
    clients_with_too_few_rows,
    objective_of,
)
from fedgist.world.privacy_budget import check_rows
from fedgist.world.public_data import (
    Public,
    client_of,
    hold_out_at_server,
    rows_of_client,
    set_aside,
)
from fedgist.world.server_context import ServerContext
from fedgist.world.server_parts import (
    Members,
    Models,
    PublicRows,
    clients_of,
    host_settings,
    server_of,
    task_of,
)
from fedgist.world.server_sets import server_sets


@dataclass(frozen=True, eq=False)
class World:
    """A simulation without its state: the server's context, and the sites' rows and models."""

    server: ServerContext
    data: Dataset
    partition: Partition
    population: Population
    hosting: HostSettings
    public: Public | None = None


def make_world(setup: Setup, say: Callable[[str], None] = lambda _: None) -> World:
    """Make the world of a resolved recipe; ``say`` is called with notes on long calculations."""
    recipe = setup.recipe
    if setup.private_width is not None:
        raise RecipeError(
            f"facts.feature_width = {setup.private_width}: each site of a federation has a private "
            "model; run this recipe with fedgist server (docs/federation.md)"
        )
    data, public, central = _data(setup, say)
    if recipe.facts is not None:
        check_facts(declared_facts(setup), data)
    objective = objective_of(setup, data.facts)
    parts = divide(setup, data)
    data = replace(data, notes=(*data.notes, *_notes_on_owners(recipe, data, parts)))
    data = _shifted(recipe, data, parts)
    public = public or rows_of_client(recipe, data, parts)
    check_method_reads(setup.method, objective)
    models = Models.of(setup, Sizes.of(data.facts, objective), parts.names)
    members, train = _members(setup, models, parts, objective)
    try:
        on_train, on_test = _examples(setup, data, train, objective)
        sets = server_sets(setup, data, on_test, _held_out(on_train, on_test, central, parts))
        shared = None if public is None else _shared(public, on_train, recipe, parts)
        task = task_of(recipe, data.facts, objective, models, members, sets, shared)
        holds_out = len(parts.validation.rows) > 0
        about = setup, data.facts, task, models, members
        side = server_of(*about, holds_out=holds_out, simulated=True, say=say)
        check_rows(recipe.privacy, data, train, parts.validation)
        hosting = host_settings(setup, side.task, parts.names)
    except (ValueError, RuntimeError) as error:
        raise RecipeError(first_line(error)) from error
    rows = train, parts.validation, parts.test
    population = Population(members.clients, on_train, on_test, *rows)
    population = _with_own_moments(population, recipe.data.normalize, data, parts)
    return World(side, data, parts, population, hosting, public)


def _notes_on_owners(recipe: Recipe, data: Dataset, parts: Partition) -> list[str]:
    """Return notes on clients without validation rows, and on test rows of none that trains."""
    notes, share, without = [], recipe.data.validation, int((parts.validation.counts == 0).sum())
    if share and without:
        notes.append(
            f"data.validation = {share:g} holds out no row of {without} of {len(parts.train)} "
            "clients: they are in no score on validation rows"
        )
    if recipe.partition.name != "natural" or data.clients_test is None:
        return notes
    lost = int((data.clients_test >= len(parts.train)).sum())
    note = f"{lost} test rows are of clients without training rows: no client is scored on them"
    return notes + [note] * (lost > 0)


def _shifted(recipe: Recipe, data: Dataset, parts: Partition) -> Dataset:
    """Return the data with each client's images as that client sees them, if a recipe says so."""
    if (shift := recipe.data.shift) is None:
        return data
    key = random.key(recipe.seed, "feature shift")
    return shifted(data, parts, key, rotate=shift.rotate, color=shift.color, noise=shift.noise)


def _examples(
    setup: Setup, data: Dataset, train: Rows, objective: Objective
) -> tuple[Examples, Examples]:
    """Return the training and the test examples, with what draws among protected rows need."""
    on_train, on_test = examples(data, setup.recipe.data.augment, setup.device, objective.views)
    return with_fates(setup, data, on_train, train, setup.recipe.seed), on_test


def _data(
    setup: Setup, say: Callable[[str], None]
) -> tuple[Dataset, Public | None, Dataset | None]:
    """Return the clients' data, the public rows, and the rows that the server holds out."""
    recipe = setup.recipe
    root, code = setup.given.root, recipe.engine.code_folder
    secret = recipe.seed if recipe.privacy.unit == "record" else None
    data = read_data(
        recipe.data,
        recipe.seed,
        setup.given.data,
        root,
        setup.labels,
        code,
        secret,
        private=recipe.privacy.unit != "none",
    )
    for text in data.how_read:
        say(text)
    data, public = set_aside(setup, data)
    data, central = hold_out_at_server(setup, data)
    return data, public, central


def _members(
    setup: Setup, models: Models, parts: Partition, objective: Objective
) -> tuple[Members, Rows]:
    """Return the clients, and their training rows."""
    count = len(parts.train)
    clients, pools = clients_of(setup, models.groups, count, parts.names)
    train = parts.train.merged() if setup.method.merges_clients else parts.train
    nets = [[models.architectures[name] for name in client.architectures] for client in clients]
    few = frozenset[int]()
    if setup.recipe.privacy.unit != "record":  # one row more would let a client in
        few = clients_with_too_few_rows(train, setup.method, objective, nets)
    held_out = newcomers_of(setup, len(clients), parts.names)
    about = clients, count, parts.names, pools, train.counts.tolist(), few
    return Members(*about, held_out), train


def _shared(public: Public, on_train: Examples, recipe: Recipe, parts: Partition) -> PublicRows:
    """Return the public rows as models see them."""
    rows = public.seen(on_train, recipe.data.public)
    return PublicRows(rows, public.labelled, client_of(recipe, parts))


def _held_out(
    on_train: Examples, on_test: Examples, central: Dataset | None, parts: Partition
) -> Examples:
    """Return the held-out rows: those of all clients together, or those of the server."""
    if central is None:
        return on_train.only(parts.validation.rows)
    return on_test.others(central.inputs, central.y)


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
