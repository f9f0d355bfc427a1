"""The models of a run: they are built from a recipe's names or a user's modules, and assigned.

A factory is called as ``factory(input_shape, num_classes, **options)``, where ``input_shape`` is
the shape of one example as a tuple of whole numbers. It returns a ``torch.nn.Module`` that maps a
batch of examples (rows, *input_shape) to logits. A factory passed to ``fedgist.run`` may also take
no arguments. A pretrained model starts with the weights in a file. A pool is a group of clients
with one model. A client may be in several pools.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.nets.adapters import Adapters, frozen
from fedgist.core.nets.net import Architecture, Net, head_of, split_head
from fedgist.core.nets.projection import projected
from fedgist.core.nets.user_module import check_gradients
from fedgist.core.training import Pool
from fedgist.core.tree import map_leaves
from fedgist.data.sources.file_sizes import check_memory
from fedgist.errors import DataError, RecipeError, first_line, listed, shown
from fedgist.recipe.model_factories import (
    WORDS,
    Factory,
    ModelTable,
    NamedModel,
    PoolTable,
    sizes_of,
)
from fedgist.recipe.overrides import Build, ClientGroup
from fedgist.recipe.resolve import Setup
from fedgist.recipe.schema import ModelSection
from fedgist.world.client_lists import named_like, numbers_of
from fedgist.world.model_sizes import Sizes
from fedgist.world.pretrained import pretrained


def members_of_pools(
    pools: Mapping[str, PoolTable], num_clients: int, key: Tensor, names: Sequence[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Return the clients of each pool in ascending order, or as drawn with the key.

    ``key`` () draws the clients of a pool that states only its number of clients. ``names`` holds
    the clients' names, if they have any.
    """
    members: dict[str, tuple[int, ...]] = {}
    for name, pool in pools.items():
        chosen, setting = pool.clients, f"clients.pools.{name}.clients"
        if isinstance(chosen, int):
            if chosen > num_clients:
                raise RecipeError(f"{setting} = {chosen}: there are {num_clients} clients")
            members[name] = tuple(random.choice(random.fold(key, name), num_clients, chosen))
            continue
        if isinstance(chosen, str):
            members[name] = named_like(chosen, names, setting)
            continue
        listed = range(num_clients) if chosen is None else numbers_of(chosen, names, setting)
        members[name] = tuple(sorted(set(listed)))
        if strange := [client for client in members[name] if client >= num_clients]:
            raise RecipeError(
                f"{setting}: client {strange[0]} does not exist, there are {num_clients}"
            )
    if without_pool := set(range(num_clients)).difference(*members.values()):
        raise RecipeError(f"clients.pools: client {min(without_pool)} is in no pool")
    return members


def architectures_by_client(
    members: Mapping[str, Sequence[int]], num_clients: int
) -> list[tuple[str, ...]]:
    """Return each client's pools, the smallest first. The client holds the first pool's model."""
    pool_names: list[list[str]] = [[] for _ in range(num_clients)]
    for name in sorted(members, key=lambda pool: len(members[pool])):
        for client in members[name]:
            pool_names[client].append(name)
    return [tuple(names) for names in pool_names]


def task_pools(
    setup: Setup, members: Mapping[str, Sequence[int]], newcomers: Collection[int] = ()
) -> dict[str, Pool]:
    """Return the size of each pool, and the number of its clients that are selected in a round.

    A share of clients is of those that train.
    """
    recipe = setup.recipe
    if recipe.privacy.unit != "none":
        raise RecipeError(
            f"privacy.unit = {shown(recipe.privacy.unit)}: not with clients.pools, in which a "
            "client may release several messages a round"
        )
    out = {}
    for name, pool in setup.pools.items():
        size = len(members[name])
        able = size - len(set(members[name]) & set(newcomers))
        per_round = pool.per_round or max(1, round(recipe.train.fraction_train * able))
        if per_round > size:
            raise RecipeError(
                f"clients.pools.{name}.per_round = {per_round}: the pool has {size} clients"
            )
        out[name] = Pool(size, per_round)
    return out


RANDOM = "{}: the frozen body has random weights (model.weights reads a file's)"
MOST_NAMES = 4  # of fixed parameters, in a note
_COPIES = 4  # of all parameters, in training: themselves, their gradients, two moments of Adam


def builder(
    factory: Factory, sizes: Sizes, options: Mapping[str, Any], label: str, *, bare: bool = False
) -> Build:
    """Return a function that makes a model of these sizes; its errors start with ``label``.

    Parameters
    ----------
    bare
        Whether to call the factory without arguments if its signature allows it.
    """
    given = () if bare and _takes(factory, (), options) else (sizes.input_shape, sizes.outputs)
    if given and WORDS in sizes_of(factory):
        options = {**options, WORDS: sizes.words}
    if not _takes(factory, given, options):
        named = "".join(f", {name}=..." for name in options)
        raise RecipeError(
            f"{label}: a factory is called as f(input_shape, num_classes{named}), and this one is "
            f"f{inspect.signature(factory)}"
        )

    def build() -> nn.Module:
        try:
            module: object = factory(*given, **options)
        except ValueError as error:  # it says what does not fit
            raise RecipeError(f"{label}: {first_line(error)}") from error
        except Exception as error:  # a user's code may fail in any way
            raise RecipeError(
                f"{label} failed: {type(error).__name__}: {first_line(error)}"
            ) from error
        if not isinstance(module, nn.Module):
            raise RecipeError(f"{label} returned a {type(module).__name__}, not a torch.nn.Module")
        return module

    stated = ", ".join(f"{key} = {shown(value)}" for key, value in options.items())
    _check_size(build, f"{label} ({stated})" if stated else label)
    return build


def truncated_normal(build: Build) -> Build:
    """Return a builder whose linear layers and convolutions start as Haiku's do.

    Weights are ``s`` times a standard normal number truncated to [-2, 2], with ``s = 1 / sqrt(n)``
    for a layer with n inputs. For a convolution, n counts the inputs of one output. Biases are 0.
    """

    def started() -> nn.Module:
        module = build()
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                deviation = layer.weight[0].numel() ** -0.5
                cut = 2 * deviation
                nn.init.trunc_normal_(layer.weight, std=deviation, a=-cut, b=cut)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        return module

    return started


def _takes(factory: Factory, given: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C: only a call can tell
        return True
    try:
        signature.bind(*given, **options)
    except TypeError:
        return False
    return True


def _check_size(build: Build, label: str) -> None:
    """Raise RecipeError if a model is too large. The check does not allocate its parameters."""
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            module = build()
        arrays = [*module.parameters(), *module.buffers()]
        count = sum(array.numel() for array in arrays)
        size = sum(array.numel() * array.element_size() for array in arrays)
    except (ValueError, RuntimeError):  # not every model can be made so; a real one will tell
        return
    description = f"{label}: {count:,} parameters, with their gradients and moments,"
    try:
        check_memory(_COPIES * size, description)
    except DataError as error:
        raise RecipeError(str(error)) from error


def groups_of_recipe(
    models: Mapping[str, ModelTable],
    pools: Mapping[str, PoolTable],
    sizes: Sizes,
    names: Sequence[str] = (),
) -> dict[str, ClientGroup]:
    """Return the groups of clients by architecture, from a recipe's models or its pools.

    ``names`` are the clients' names, if they have any.
    """
    if pools:
        return {name: _group(pool.model, sizes) for name, pool in pools.items()}
    return {name: _group_of_table(table, sizes, names) for name, table in models.items()}


def _group_of_table(table: ModelTable, sizes: Sizes, names: Sequence[str]) -> ClientGroup:
    """Return the group of the clients that a table names, or of their share of all."""
    group, clients = _group(table.model, sizes), table.clients
    if clients is None:
        return replace(group, share=table.share)
    return replace(group, clients=numbers_of(clients, names, f"{table.model.table}.clients"))


def _group(model: NamedModel, sizes: Sizes) -> ClientGroup:
    """Return the group of clients with a model; initial weights may be read from a file."""
    section, label = model.section, f"model {model.section.name}"
    build = builder(model.factory, sizes, model.options, label)
    group = _as_frozen(ClientGroup(build, head=section.head), section)
    group = _projected(group, section.project, sizes, label)
    if section.weights is not None:
        build, note = pretrained(group.build, section.weights, sizes, group.head)
        return replace(group, build=build, note=note)
    if section.init == "truncated_normal":
        group = replace(group, build=truncated_normal(group.build))
    is_own = ":" in section.name  # a factory may load weights of its own
    is_random = section.frozen and (not is_own or _draws_its_body(group, sizes, label))
    return replace(group, note=RANDOM.format(label)) if is_random else group


def _draws_its_body(group: ClientGroup, sizes: Sizes, label: str) -> bool:
    """Return whether the body depends on torch's generator, and not only the head."""
    bodies = []
    for seed in (0, 1):
        with random.torch_draws(seed):
            module = group.build()
        try:
            head, _ = head_of(module, sizes.outputs, label, group.head)
        except ValueError:  # there is no such head, as its architecture will say
            return True
        arrays = module.state_dict().items()
        bodies.append({n: a for n, a in arrays if not n.startswith(f"{head}.")})
    return any(not torch.equal(array, bodies[1][name]) for name, array in bodies[0].items())


def _projected(group: ClientGroup, width: int | None, sizes: Sizes, label: str) -> ClientGroup:
    """Return the group with a model whose features have ``width``; None means any width."""
    if width is None:
        return group
    with torch.random.fork_rng(devices=[]):
        whole = group.build()
    try:
        name, layer = head_of(whole, sizes.outputs, label, group.head)
    except ValueError as error:
        raise RecipeError(first_line(error)) from error
    if layer.in_features == width:
        return group
    new_head = projected(whole, name, width)[1]
    return replace(group, build=lambda: projected(group.build(), name, width)[0], head=new_head)


def _draw(path: str, layer: nn.Module) -> None:
    """Give a layer new random weights, or raise ValueError if it cannot draw those it holds."""
    own = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
    if callable(own):
        own()
    for name, parameter in layer.named_parameters(recurse=False):
        if parameter.requires_grad and not callable(own):
            raise ValueError(
                f"clients.init = 'own': {path or type(layer).__name__!r} has no reset_parameters, "
                f"so that its {name!r} would be the same at all clients: give a factory in place "
                "of the module"
            )


def module_group(
    module: nn.Module | Factory, *, own_start: bool, clients: Sequence[int] | None = None
) -> ClientGroup:
    """Return the group of a user's module, which is also its initial state, or of a factory.

    With ``own_start`` each client's copy of a module gets new random weights.
    """
    members = None if clients is None else tuple(clients)
    if not isinstance(module, nn.Module):
        return ClientGroup(module, clients=members)

    def build() -> nn.Module:
        check_gradients(module)
        fresh = copy.deepcopy(module)
        for path, layer in fresh.named_modules() if own_start else ():
            _draw(path, layer)
        with torch.no_grad():
            for given, drawn in zip(module.parameters(), fresh.parameters(), strict=True):
                if not given.requires_grad:  # a constant, common to all clients
                    drawn.copy_(given)
        return fresh

    return ClientGroup(build, clients=members)


def fitted(
    groups: Mapping[str, ClientGroup], sizes: Sizes, section: ModelSection
) -> dict[str, ClientGroup]:
    """Return a user's groups of clients with builders that pass the data's sizes to factories.

    ``section`` says to which feature width models of another width project, and what is frozen.
    """
    out = {}
    for name, group in groups.items():
        label = f"model {name}"
        build = builder(group.build, sizes, {}, label, bare=True)
        fitting = _projected(replace(group, build=build), section.project, sizes, label)
        out[name] = _as_frozen(fitting, section)
    return out


def _as_frozen(group: ClientGroup, section: ModelSection) -> ClientGroup:
    """Return the group with a frozen body and with adapters, if its table says so."""
    table = section.adapters
    if table is None:
        return replace(group, frozen=section.frozen)
    layers = ("*",) if table.layers == "linear" else table.layers
    return replace(group, frozen=True, adapters=Adapters(table.rank, table.alpha, layers))


def architectures_of(
    groups: Mapping[str, ClientGroup], sizes: Sizes, seed: int, device: str
) -> tuple[dict[str, Architecture], dict[str, Net]]:
    """Return each group's architecture, and its shared initial model on the device."""
    architectures, starts = {}, {}
    for name, group in groups.items():
        try:
            arch = split_head(
                group.build,
                sizes.input_shape,
                sizes.outputs,
                name=name,
                head=group.head,
                words=sizes.words,
                target=sizes.target,
                projects=sizes.projects,
                trains=not group.frozen,
            )
        except RecipeError:
            raise
        except (ValueError, TypeError, RuntimeError) as error:
            raise RecipeError(f"model {name}: {first_line(error)}") from error
        number = int(random.key(seed, "start", name))
        start = map_leaves(lambda leaf: leaf.to(device), arch.start(number))
        if group.frozen or start.arch.fixed:
            start = map_leaves(lambda leaf: leaf.to(device), _frozen(start, group).start(number))
        architectures[name], starts[name] = start.arch, start
    return architectures, starts


def _frozen(start: Net, group: ClientGroup) -> Architecture:
    """Return the architecture of a group with constants, which are those of ``start``."""
    try:
        return frozen(start, group.adapters, body=group.frozen)
    except ValueError as error:
        raise RecipeError(f"model {start.arch.name}: {first_line(error)}") from error


def note_on_fixed(start: Net) -> str:
    """Return a note on the parameters that the module's code fixes; an empty text if none."""
    arch = start.arch
    if not arch.fixed:
        return ""
    few = len(arch.fixed)
    return (
        f"model {arch.name}: {few} parameter{'s' * (few != 1)} with requires_grad = False "
        f"({listed(sorted(arch.fixed), MOST_NAMES)}) do not learn and are not sent"
    )


def members_of(groups: Mapping[str, ClientGroup], num_clients: int, key: Tensor) -> list[str]:
    """Return the name of each client's architecture.

    A group has the clients that it lists, or a share of all clients drawn with ``key`` (). Shares
    are rounded by the largest-remainder method.
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
