"""Which clients have which model: from a recipe's names or a user's modules to architectures."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.net import Architecture, Net, split
from fedgist.core.tree import map_leaves
from fedgist.errors import RecipeError, first_line
from fedgist.options import check_options
from fedgist.recipe.model_factories import (
    Factory,
    check_models,
    check_pools,
    model_factory,
    sizes_of,
)
from fedgist.recipe.schema import ModelSection, Recipe, check_named
from fedgist.world.model_building import Build, Sizes, builder, truncated_normal
from fedgist.world.pretrained import pretrained


@dataclass(frozen=True)
class Group:
    """Clients of one architecture: how the model is built, and which clients, or what share.

    ``head`` names the linear layer that is the head; None is the last one. ``note`` is what a user
    should know of its start.
    """

    build: Build
    share: float = 1.0
    clients: tuple[int, ...] | None = None
    head: str | None = None
    note: str = ""


def recipe_groups(recipe: Recipe, sizes: Sizes) -> dict[str, Group]:
    """Return the groups of clients by architecture that a recipe describes."""
    if recipe.clients.pools:
        pools = check_pools(recipe.clients.pools)
        return {n: _group(p.section, sizes, f"clients.pools.{n}") for n, p in pools.items()}
    if not recipe.clients.architectures:
        model = recipe.model or ModelSection()
        return {
            model.name.rpartition(":")[2]: _group(model, sizes, "model"),
        }
    return {
        name: replace(
            _group(model.section, sizes, f"clients.architectures.{name}"),
            share=model.share,
            clients=model.clients,
        )
        for name, model in check_models(recipe.clients.architectures).items()
    }


def _group(section: ModelSection, sizes: Sizes, table: str) -> Group:
    """Return the group of clients that have a model, whose start may be read from a file."""
    check_named(table, section.name, "model=")
    factory = model_factory(section.name)
    options = check_options(factory, section.options, section.name, table, sizes_of(factory))
    build = builder(factory, sizes, options, f"model {section.name}")
    if section.weights is None:
        start = truncated_normal(build) if section.init == "truncated_normal" else build
        return Group(start, head=section.head)
    build, note = pretrained(build, section.weights, sizes, section.head)
    return Group(build, head=section.head, note=note)


def module_group(
    module: nn.Module | Factory, *, own_start: bool, clients: Sequence[int] | None = None
) -> Group:
    """Return the group of a user's module, whose numbers are the start, or of a factory."""
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


def fitted(groups: Mapping[str, Group], sizes: Sizes) -> dict[str, Group]:
    """Return a user's groups of clients, whose factories may take the sizes of the data."""
    return {
        name: replace(group, build=builder(group.build, sizes, {}, f"model {name}", bare=True))
        for name, group in groups.items()
    }


def architectures_of(
    recipe: Recipe, sizes: Sizes, groups: Mapping[str, Group], device: str
) -> tuple[dict[str, Architecture], dict[str, Net]]:
    """Return each group's architecture and its common start, on a device."""
    architectures, starts = {}, {}
    for name, group in groups.items():
        try:
            arch = split(
                group.build,
                sizes.input_shape,
                sizes.outputs,
                name=name,
                head=group.head,
                text=sizes.text,
                projects=sizes.projects,
            )
        except RecipeError:
            raise
        except (ValueError, TypeError, RuntimeError) as error:
            raise RecipeError(f"model {name}: {first_line(error)}") from error
        start = arch.start(int(random.key(recipe.seed, "start", name)))
        architectures[name] = arch
        starts[name] = map_leaves(lambda leaf: leaf.to(device), start)
    return architectures, starts


def members_of(groups: Mapping[str, Group], num_clients: int, key: Tensor) -> list[str]:
    """Return the name of each client's architecture.

    Groups have the clients that they list or, drawn at random, their shares of all clients, rounded
    by largest remainders.
    """
    if all(g.clients is not None for g in groups.values()):
        by_client = {c: name for name, g in groups.items() for c in g.clients or ()}
        listed = [c for group in groups.values() for c in group.clients or ()]
        if twice := sorted({c for c in listed if listed.count(c) > 1}):
            raise RecipeError(
                f"every client needs exactly one model; client {twice[0]} is listed twice"
            )
        if sorted(by_client) != list(range(num_clients)):
            missing = sorted(set(range(num_clients)) ^ set(by_client))
            problem = "has none" if missing[0] in range(num_clients) else "does not exist"
            raise RecipeError(
                f"every client needs exactly one model; client {missing[0]} {problem}"
            )
        return [by_client[i] for i in range(num_clients)]
    total = sum(g.share for g in groups.values())
    exact = {name: g.share / total * num_clients for name, g in groups.items()}
    counts = {name: int(value) for name, value in exact.items()}
    left_over = num_clients - sum(counts.values())
    for name in sorted(exact, key=lambda n: counts[n] - exact[n])[:left_over]:
        counts[name] += 1
    names = [name for name, count in counts.items() for _ in range(count)]
    out = [""] * num_clients
    for place, name in zip(random.permutation(key, num_clients).tolist(), names, strict=True):
        out[place] = name
    return out
