"""The context of a federation's server, which is made of its recipe and has no rows of a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fedgist.core import random
from fedgist.core.message import Form
from fedgist.core.method import Context, Order, Task
from fedgist.core.nets.net import split_head
from fedgist.core.objectives.objective import Objective
from fedgist.data.examples import examples_of
from fedgist.data.facts import DataFacts
from fedgist.engines.message_form import upload_form
from fedgist.errors import RecipeError
from fedgist.federation.agreement.recipe_check import check_setup
from fedgist.models.dense import mlp
from fedgist.recipe.overrides import ClientGroup
from fedgist.recipe.resolve import Setup
from fedgist.runs.evaluation import check_evaluation
from fedgist.wire.outline import Outline
from fedgist.world.declared import declared_facts
from fedgist.world.model_sizes import Sizes
from fedgist.world.objective_choice import check_method_reads, objective_of
from fedgist.world.public_data import public_source
from fedgist.world.server_context import ServerContext
from fedgist.world.server_parts import (
    Members,
    Models,
    PublicRows,
    clients_of,
    server_of,
    task_of,
)

PRIVATE = "private"  # the architecture's name of all sites, if each has a model of its own


def server_context(
    setup: Setup, names: Sequence[str], say: Callable[[str], None] = lambda _: None
) -> ServerContext:
    """Return the context of a server whose sites have these names, in the order of their numbers.

    If the recipe states a larger ``clients.num_clients``, places are left for later sites. ``say``
    is called with notes on long calculations.
    """
    check_setup(setup)
    facts = declared_facts(setup)
    objective = objective_of(setup, facts)
    check_method_reads(setup.method, objective)
    models, members = _models_and_members(setup, facts, objective, places(setup, names))
    public = public_rows(setup, facts)
    task = task_of(setup.recipe, facts, objective, models, members, {}, public)
    if PRIVATE in task.architectures:
        _check_shares_heads_alone(setup, task)
        _check_bodies_differ(setup)
    holds_out = setup.recipe.data.validation > 0
    side = server_of(
        setup, facts, task, models, members, holds_out=holds_out, simulated=False, say=say
    )
    check_evaluation(side)
    return side


def places(setup: Setup, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all clients: those of the sites, and of places for later sites."""
    count = setup.num_clients or len(names)
    if count < len(names):
        raise RecipeError(
            f"clients.num_clients = {count}, and the federation has {len(names)} sites"
        )
    return (*names, *(f"place {number}" for number in range(len(names), count)))


def _models_and_members(
    setup: Setup, facts: DataFacts, objective: Objective, names: Sequence[str]
) -> tuple[Models, Members]:
    """Return the models of a federation, or an outline of private ones, and its members."""
    sizes = Sizes.of(facts, objective)
    models = _outlines(setup, sizes) if setup.private_width else Models.of(setup, sizes, names)
    clients, pools = clients_of(setup, models.groups, len(names), names)
    counts = [setup.recipe.clients.max_rows or 1] * len(clients)
    return models, Members(clients, len(names), tuple(names), pools, counts)


def public_rows(setup: Setup, facts: DataFacts) -> PublicRows | None:
    """Return the public rows that a recipe names, as models see them; None without public rows."""
    section = setup.recipe.data.public
    if section is None:
        return None
    public = public_source(setup, section, facts)
    rows = examples_of(facts, public.x, public.y, section.augment, setup.device)
    return PublicRows(rows, public.labelled)


def _outlines(setup: Setup, sizes: Sizes) -> Models:
    """Return the outline of the sites' private models: the server knows their heads alone."""
    width = setup.private_width
    assert width is not None  # the caller's
    shape, outputs = sizes.input_shape, sizes.outputs
    outline = Outline(PRIVATE, shape, outputs, width, projects=sizes.projects)
    arch = outline.architecture()
    group = ClientGroup(lambda: arch.module)
    start = arch.start(int(random.key(setup.recipe.seed, "start", PRIVATE)))
    if setup.recipe.facts is not None and setup.recipe.facts.encoder is not None:
        arch = replace(arch, frozen=start, evaluates=True)
        start = replace(start, arch=arch)
    return Models({PRIVATE: group}, {PRIVATE: arch}, {PRIVATE: start})


def _check_bodies_differ(setup: Setup) -> None:
    """Raise RecipeError if a method needs one body at all sites, and they are not known to have it.

    A method whose clients keep no part of their models between rounds has one body for all.
    """
    facts = setup.recipe.facts
    if setup.method.keeps == "none" and facts is not None and facts.encoder is None:
        raise RecipeError(
            f"facts.feature_width = {facts.feature_width}: method {setup.recipe.method.name} adds "
            "up features, so all sites need the same body: state facts.encoder, the digest of "
            "their encoder (fedgist site --check prints it)"
        )


def _check_shares_heads_alone(setup: Setup, task: Task) -> None:
    """Raise RecipeError if a method sends more of a model than its head.

    The forms of its messages are then not the same for an outline as for a whole model.
    """
    width = task.architectures[PRIVATE].feature_width
    build = partial(mlp, task.input_shape, task.architectures[PRIVATE].num_classes, hidden=[width])
    arch = split_head(
        build,
        task.input_shape,
        task.architectures[PRIVATE].num_classes,
        name=PRIVATE,
        projects=task.architectures[PRIVATE].projects,
    )
    whole = replace(task, architectures={PRIVATE: arch}, starts={PRIVATE: arch.start(0)})
    try:
        same = message_forms(setup, task) == message_forms(setup, whole)
    except (ValueError, KeyError, RuntimeError):  # it asks for weights that an outline lacks
        same = False
    if not same:
        raise RecipeError(
            f"facts.feature_width = {width}: sites cannot have private models, because "
            f"method {setup.recipe.method.name} shares more than heads: state [model] or "
            "clients.architectures"
        )


def message_forms(setup: Setup, task: Task) -> list[Form]:
    """Return the forms of all messages of the first rounds to and from a private model."""
    method, key, order = setup.method, random.key(0), Order(0, PRIVATE)
    server = method.init_server(Context(key, task, 0, "init"))
    forms = []
    for number in (0, 1):
        for stage in method.stages(Context(key, task, number, "")):
            ctx = Context(key, task, number, stage)
            if method.orders(server, [order], ctx) is None:
                continue
            down = method.download(server, order, ctx)
            forms += [Form.of(down), upload_form(method, ctx, PRIVATE, down)]
    return forms
