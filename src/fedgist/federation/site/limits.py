"""Limits of the work that a server's recipe can give a site, checked before anything is built."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch

from fedgist.core import random
from fedgist.core.method import Context
from fedgist.core.training import Work
from fedgist.errors import SiteError
from fedgist.federation.agreement.server_setup import places
from fedgist.federation.site.file import SiteFile
from fedgist.recipe.reading import Recipe
from fedgist.recipe.resolve import Setup
from fedgist.world.declared import declared_facts
from fedgist.world.model_sizes import Sizes
from fedgist.world.models import groups_of_recipe
from fedgist.world.objective_choice import objective_of
from fedgist.world.server_context import ServerContext

LAYERS, CLASSES = 200, 10_000  # with more of either, preparing takes minutes


def check_lists(recipe: Recipe) -> None:
    """Raise SiteError if a recipe has more layers in a model, or classes, than can be meant."""
    if (count := len(recipe.data.classes)) > CLASSES:
        text = f"data.classes has {count} names; a site accepts {CLASSES}"
        raise SiteError(text, "policy", "classes")
    clients = recipe.clients
    models = {"clients.architectures": clients.architectures, "clients.pools": clients.pools}
    if recipe.model is not None:
        models["model"] = recipe.model.options
    for key, value in models.items():
        for length in _lengths(value):
            if length > LAYERS:
                text = f"{key} has a list of {length} numbers; a site accepts {LAYERS}"
                raise SiteError(text, "policy", "layers")


def _lengths(value: object) -> Iterator[int]:
    """Yield the length of each list in a table of a recipe."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _lengths(part)
    elif isinstance(value, list | tuple):
        yield len(value)


def check_size(setup: Setup, site: SiteFile, names: Sequence[str]) -> None:
    """Raise SiteError if the recipe's models have more parameters than the site's policy allows.

    ``names`` are those of all sites. No parameter is allocated. A private model is the site's own.
    """
    if setup.private_width is not None:
        return
    facts = declared_facts(setup)
    sizes = Sizes.of(facts, objective_of(setup, facts))
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        warnings.simplefilter("ignore")
        groups = groups_of_recipe(setup.models, setup.pools, sizes, places(setup, names))
        modules = [group.build() for group in groups.values()]
    count = sum(array.numel() for module in modules for array in module.parameters())
    if count > (most := site.policy.most_parameters):
        text = f"{site.file}: policy.most_parameters = {most}; the recipe's models have {count}"
        raise SiteError(text, "policy", "most_parameters")


def check_steps(
    side: ServerContext, number: int, rows: int, site: SiteFile, work: Work | None
) -> None:
    """Raise SiteError if a round has more local steps than the site's policy allows.

    ``rows`` are those of the site, or under privacy as many as it may have. ``work`` is how long
    the site trains, if it has a length of its own.
    """
    most, task = site.policy.most_local_steps, side.task
    for ctx in _stages(side):
        for architecture in side.clients[number].architectures:
            here = Context(ctx.key, task, ctx.round, ctx.stage, architecture=architecture)
            phases, one = side.method.phases(here), torch.tensor([rows])
            steps = sum(int(phase.steps_of(one, task, architecture, work)) for phase in phases)
            if steps > most:
                text = f"{site.file}: policy.most_local_steps = {most}; a round has {steps}"
                raise SiteError(text, "policy", "most_local_steps")


def _stages(side: ServerContext) -> Iterator[Context]:
    key = random.key(0)
    for number in (0, 1):
        for stage in side.method.stages(Context(key, side.task, number, "")):
            yield Context(key, side.task, number, stage)
