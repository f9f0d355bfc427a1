"""The engine of a simulation whose clients are trained on the machines of a Ray cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from fedgist.engines.population import HostSettings
from fedgist.engines.sharded_engine import HostsHere, ShardedEngine
from fedgist.engines.stop_signals import stoppable
from fedgist.errors import RecipeError
from fedgist.runs.shard_host import HostRecipe, ShardHost
from fedgist.world.world import World


def ray_engine(
    world: World, settings: HostSettings, say: Callable[[str], None]
) -> tuple[ShardedEngine, int]:
    """Connect to the recipe's cluster; return an engine on it, and its number of shards.

    Raises
    ------
    RecipeError
        If Ray is not installed, or no cluster answers.
    """
    try:
        from fedgist.engines.ray_cluster import Connection, RayCluster
    except ModuleNotFoundError as error:
        needs = "engine.name = 'ray' needs Ray: pip install 'fedgist[ray]'"
        raise RecipeError(needs) from error
    side, section = world.server, world.server.setup.engine
    with stoppable(lambda: None) as stopping:  # Ray does not bear an exception while it starts
        connection = Connection(section.address)
    if stopping():
        connection.close()
        raise KeyboardInterrupt
    if section.shards != "auto":
        shards = section.shards
    else:
        shards = max(1, min(connection.slots(side.setup.device), len(side.clients)))
    recipe, device = side.setup.text, side.setup.device.partition(":")[0]  # an actor sees one GPU
    recipe, settings = recipe.changed({"engine.device": device}), replace(settings, device=device)
    source = HostRecipe(recipe, side.setup.given, settings, side.plans, shards)
    make = functools.partial(ShardHost, source)
    cluster = RayCluster(connection, make, shards, side.setup.device, say)
    here = replace(settings, device=side.setup.device)
    parts = side.method, side.task, world.population, here, side.plans
    later = HostsHere(make, shards)
    return ShardedEngine(*parts, shards=shards, cluster=cluster, later=later), shards
