"""A server's context, made from a recipe and the facts about the data, without any row of a client.

A simulation knows these facts from its data, a real federation from its recipe.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedgist.core import random
from fedgist.core.batch import RowSet
from fedgist.core.counts import MOST_ROWS
from fedgist.core.method import ClientInfo, Task
from fedgist.core.nets.net import Architecture, Net
from fedgist.core.objectives.objective import Objective
from fedgist.core.training import Pool, Training
from fedgist.data.examples import Examples
from fedgist.data.facts import DataFacts
from fedgist.engines.population import HostSettings
from fedgist.errors import RecipeError, listed
from fedgist.recipe.overrides import ClientGroup
from fedgist.recipe.resolve import Setup
from fedgist.recipe.schema import ModelSection, Recipe
from fedgist.world import newcomers
from fedgist.world.availability import availability
from fedgist.world.client_settings import client_settings
from fedgist.world.graph import neighbors_of
from fedgist.world.model_sizes import Sizes
from fedgist.world.models import (
    architectures_by_client,
    architectures_of,
    fitted,
    groups_of_recipe,
    members_of,
    members_of_pools,
    note_on_fixed,
    task_pools,
)
from fedgist.world.objective_choice import notes_on, without_clients
from fedgist.world.privacy_budget import private_task
from fedgist.world.public_data import digest_of
from fedgist.world.server_context import ServerContext


@dataclass(frozen=True, eq=False)
class Models:
    """The models of a task: the groups of clients, and each group's architecture and start."""

    groups: Mapping[str, ClientGroup]
    architectures: Mapping[str, Architecture]
    starts: Mapping[str, Net]

    @staticmethod
    def of(setup: Setup, sizes: Sizes, names: Sequence[str]) -> Models:
        """Return the models of a recipe, or the user's own; ``names`` are the clients' names."""
        if setup.given.groups:
            groups = fitted(setup.given.groups, sizes, setup.recipe.model or ModelSection())
        else:
            groups = groups_of_recipe(setup.models, setup.pools, sizes, names)
        architectures, starts = architectures_of(groups, sizes, setup.recipe.seed, setup.device)
        if setup.method.trains_main:
            least = next(iter(architectures.values())).least_rows
            architectures = {
                name: replace(arch, least_rows=max(arch.least_rows, least))
                for name, arch in architectures.items()
            }
        return Models(groups, architectures, starts)

    @property
    def notes(self) -> list[str]:
        """Notes for the user on pretrained weights, and on parameters that do not learn."""
        noted = [group.note for group in self.groups.values() if group.note]
        return noted + [note for start in self.starts.values() if (note := note_on_fixed(start))]


@dataclass(frozen=True, eq=False)
class Members:
    """The clients of a run: their models, pools and names.

    ``count`` is the number of clients before a method merges them. ``row_counts`` holds the number
    of training rows of each client, or a bound on it. ``left_out`` are clients that never take
    part, and ``newcomers`` those that the recipe holds out.
    """

    clients: tuple[ClientInfo, ...]
    count: int
    names: tuple[str, ...] = ()
    pools: Mapping[str, Pool] = field(default_factory=dict)
    row_counts: Sequence[int] = ()
    left_out: frozenset[int] = frozenset()
    newcomers: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class PublicRows:
    """The public rows as models see them; ``client`` is the client to which they belong."""

    rows: Examples
    labelled: bool = False
    client: int | None = None


def clients_of(
    setup: Setup, groups: Mapping[str, ClientGroup], count: int, names: Sequence[str]
) -> tuple[tuple[ClientInfo, ...], Mapping[str, Pool]]:
    """Return the clients with their architectures, and the pools' sizes."""
    if setup.method.merges_clients:
        return (ClientInfo(0, (next(iter(groups)),)),), {}
    root = random.key(setup.recipe.seed)
    if not setup.pools:
        models = members_of(groups, count, random.fold(root, "architectures"))
        return tuple(ClientInfo(i, (model,)) for i, model in enumerate(models)), {}
    members = members_of_pools(setup.pools, count, random.fold(root, "pools"), names)
    models_of_each = enumerate(architectures_by_client(members, count))
    clients = tuple(ClientInfo(i, models) for i, models in models_of_each)
    return clients, task_pools(setup, members, newcomers.newcomers_of(setup, count, names))


def task_of(
    recipe: Recipe,
    facts: DataFacts,
    objective: Objective,
    models: Models,
    members: Members,
    test_sets: Mapping[str, RowSet],
    public: PublicRows | None,
) -> Task:
    """Return the task that server and clients share."""
    _check_row_weights(recipe.train.sample_weights, facts)
    _check_warmup(recipe.train)
    if objective.views == 1:
        check_batch_size(recipe.train.batch_size, models.architectures.values())
    never = members.left_out | members.newcomers
    able = [client for client in members.clients if client.id not in never]
    task = Task(
        facts.input_shape,
        facts.num_classes,
        len(members.clients),
        models.architectures,
        models.starts,
        recipe.train,
        objective,
        test_sets,
        main=next(iter(models.architectures)),
        clients_with=Counter(name for c in able for name in c.architectures),
        common_starts=recipe.clients.init == "shared",
        newcomers=members.newcomers,
        left_out=members.left_out,
        pools=members.pools,
        min_replies=recipe.privacy.min_replies,
        max_norm=recipe.clients.max_norm or math.inf,
        max_rows=recipe.clients.max_rows or MOST_ROWS,
        annotations=facts.annotations,
        words=facts.words,
        missing_labels=recipe.data.missing_labels == "mask",
    )
    if public is None:
        return task
    return replace(
        task,
        public=public.rows,
        public_labels=public.labelled,
        public_client=public.client,
        public_digest=digest_of(public.rows),
    )


def _check_warmup(train: Training) -> None:
    """Raise RecipeError if all rounds belong to the warm-up."""
    warmup = train.lr_schedule.warmup_rounds
    if warmup >= train.num_rounds:
        raise RecipeError(
            f"train.lr_schedule.warmup_rounds = {warmup} leaves none of train.num_rounds = "
            f"{train.num_rounds}"
        )


def _check_row_weights(name: str, facts: DataFacts) -> None:
    """Raise RecipeError if rows have no annotation of this name, a negative one, or zeros alone."""
    if not name:
        return
    key = f"train.sample_weights = {name!r}"
    if name not in facts.annotations:
        raise RecipeError(f"{key}: the annotations of {facts.name} are {listed(facts.annotations)}")
    least, most = facts.annotations[name]
    if least < 0:
        raise RecipeError(f"{key}: a weight is at least 0, not {least:g}")
    if most <= 0:
        raise RecipeError(f"{key}: the weights of all rows are 0: nothing would be learned")


def server_of(
    setup: Setup,
    facts: DataFacts,
    task: Task,
    models: Models,
    members: Members,
    *,
    holds_out: bool,
    simulated: bool,
    say: Callable[[str], None],
) -> ServerContext:
    """Return the server's context of a task, with its privacy and its clients' availability.

    ``simulated`` says whether the numbers of rows of ``members`` are those of clients, and not
    bounds. ``say`` is called with notes on long calculations.
    """
    recipe = setup.recipe
    clients, root = members.clients, random.key(recipe.seed)
    setup.method.check(task)
    task, spending = private_task(setup, task, clients, members.row_counts, say)
    online = availability(recipe.clients.availability, clients, random.fold(root, "online"))
    online = without_clients(online, members.left_out | members.newcomers)
    neighbors = neighbors_of(recipe.clients.graph, setup.method, task, random.fold(root, "graph"))
    sizes = members.row_counts if simulated else None
    promised = () if spending is None else spending.notes(sizes)
    joined = notes_on_last_batches(task, clients, sizes)
    left_out = notes_on(members.left_out - members.newcomers)
    notes = (*models.notes, *left_out, *newcomers.notes_on(task), *joined, *promised)
    about_data = facts.name, facts.summary, members.names, holds_out
    return ServerContext(
        *(setup, members.count, setup.method, task, clients, online, *about_data),
        *(notes, spending, neighbors, recipe.engine.plans),
    )


def host_settings(setup: Setup, task: Task, names: Sequence[str]) -> HostSettings:
    """Return the settings of a host of clients, in a simulation or at a site."""
    recipe = setup.recipe
    key = random.fold(random.key(recipe.seed), "client settings")
    tables = recipe.clients.settings
    return HostSettings(
        seed=recipe.seed,
        device=setup.device,
        readers=None if recipe.engine.readers == "auto" else recipe.engine.readers,
        share_measurements=recipe.privacy.share_measurements,
        trained_every=recipe.evaluate.trained_every,
        features="kept" if recipe.engine.keep_features else "anew",
        feature_memory=recipe.engine.feature_memory,
        memory_limit=recipe.engine.memory_limit,
        own=client_settings(tables, setup.method, task, task.num_clients, key, names),
    )


def check_batch_size(batch_size: int, nets: Iterable[Architecture]) -> None:
    """Raise RecipeError if batches have fewer rows than a model can be trained on."""
    if few := [net for net in nets if batch_size < net.least_rows]:
        raise RecipeError(
            f"train.batch_size = {batch_size}: the batch norm of {few[0].name} sees one "
            "value per channel of a row, and its mean of one value tells nothing: use at least 2, "
            "or group norm"
        )


def notes_on_last_batches(
    task: Task, clients: Sequence[ClientInfo], row_counts: Sequence[int] | None
) -> list[str]:
    """Return a note if a last batch of one row joins the batch before it.

    ``row_counts`` are the clients' numbers of training rows, or None if the server has bounds only.
    """
    size, notes = task.training.batch_size, []
    for name in task.architectures:
        if task.least_rows(name) == 1:
            continue
        members = [i for i, client in enumerate(clients) if name in client.architectures]
        rule = f"model {name}: batch norm sees one value per channel of a row, so a last batch of "
        rule += "one row joins the batch before it"
        if row_counts is None:
            notes.append(rule)
        elif count := sum(row_counts[i] % size == 1 and row_counts[i] > size for i in members):
            notes.append(f"{rule}: {count} of {len(members)} clients")
    return notes
