"""Pools: groups of clients with a model of their own, in which a client may be several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedgist.core import random
from fedgist.core.training import Pool
from fedgist.errors import RecipeError, shown
from fedgist.recipe.model_factories import PoolTable
from fedgist.recipe.schema import Recipe
from fedgist.world.client_lists import named_like


def members_of_pools(
    pools: Mapping[str, PoolTable], num_clients: int, key: Tensor, names: Sequence[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Return the clients of each pool, in order; those that are not named are drawn by the key.

    ``names`` are the clients' own, where they have any.
    """
    members: dict[str, tuple[int, ...]] = {}
    for name, pool in pools.items():
        asked, where = pool.clients, f"clients.pools.{name}.clients"
        if isinstance(asked, int):
            if asked > num_clients:
                raise RecipeError(f"{where} = {asked}: there are {num_clients} clients")
            members[name] = tuple(random.choice(random.fold(key, name), num_clients, asked))
            continue
        if isinstance(asked, str):
            members[name] = named_like(asked, names, where)
            continue
        members[name] = tuple(range(num_clients)) if asked is None else tuple(sorted(set(asked)))
        if strange := [client for client in members[name] if client >= num_clients]:
            raise RecipeError(
                f"{where}: client {strange[0]} does not exist, there are {num_clients}"
            )
    if alone := set(range(num_clients)).difference(*members.values()):
        raise RecipeError(f"clients.pools: client {min(alone)} is in no pool")
    return members


def architectures_by_client(
    members: Mapping[str, Sequence[int]], num_clients: int
) -> list[tuple[str, ...]]:
    """Return the pools of each client, the smallest first: that is the one it holds a model of."""
    found: list[list[str]] = [[] for _ in range(num_clients)]
    for name in sorted(members, key=lambda pool: len(members[pool])):
        for client in members[name]:
            found[client].append(name)
    return [tuple(names) for names in found]


def task_pools(
    recipe: Recipe, pools: Mapping[str, PoolTable], members: Mapping[str, Sequence[int]]
) -> dict[str, Pool]:
    """Return of each pool how many clients it has, and how many a round asks."""
    if pools and recipe.privacy.unit != "none":
        raise RecipeError(
            f"privacy.unit = {shown(recipe.privacy.unit)}: not with clients.pools, in which a "
            "client may release several messages a round"
        )
    out = {}
    for name, pool in pools.items():
        size = len(members[name])
        asked = pool.per_round or max(1, round(recipe.train.fraction_train * size))
        if asked > size:
            raise RecipeError(
                f"clients.pools.{name}.per_round = {asked}: the pool has {size} clients"
            )
        out[name] = Pool(size, asked)
    return out
