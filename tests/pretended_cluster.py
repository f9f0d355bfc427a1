"""A cluster in this process: every call and every answer is pickled, so nothing is shared."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fedgist.engines.plans.plan import Plan
from fedgist.engines.population import HostSettings
from fedgist.engines.process_control import as_workers_do
from fedgist.engines.sharded_engine import Call, HostsHere, ShardedEngine
from fedgist.runs import prepare
from fedgist.runs.prepare import hosting_of
from fedgist.runs.ray_engine import HostRecipe, ShardHost
from fedgist.world.world import World


class PretendedCluster:
    def __init__(self, source: HostRecipe) -> None:
        self.source = source
        self.hosts: list[ShardHost] = []
        self.calls: list[Call] = []

    def start(self) -> None:
        with as_workers_do():
            shards = range(self.source.shards)
            self.hosts = [ShardHost(self.source, number) for number in shards]

    def run(self, calls: Sequence[Call]) -> list[Any]:
        self.calls += calls
        with as_workers_do():
            return [self._answer(pickle.loads(pickle.dumps(call))) for call in calls]

    def _answer(self, call: Call) -> Any:
        answer = getattr(self.hosts[call.shard], call.function)(*call.arguments, *call.downs)
        return pickle.loads(pickle.dumps(answer))

    def close(self) -> None:
        self.hosts = []


def pretend(monkeypatch: pytest.MonkeyPatch) -> list[PretendedCluster]:
    """Let runs with engine.name = "ray" have pretended clusters; return these."""
    clusters: list[PretendedCluster] = []

    def make_engine(
        world: World, settings: HostSettings, say: Callable[[str], None]
    ) -> tuple[ShardedEngine, int]:
        del say
        side, chosen = world.server, world.server.setup.recipe.engine.shards
        shards = 2 if chosen == "auto" else chosen
        source = HostRecipe(side.setup.recipe, side.setup.given, settings, side.plans, shards)
        clusters.append(PretendedCluster(source))
        parts = side.method, side.task, world.population, settings, side.plans
        later = HostsHere(functools.partial(ShardHost, source), shards)
        engine = ShardedEngine(*parts, shards=shards, cluster=clusters[-1], later=later)
        return engine, shards

    monkeypatch.setattr(prepare, "ray_engine", make_engine)
    return clusters


def sharded(small_world: World, plan: Plan, shards: int) -> ShardedEngine:
    """Return an engine on a pretended cluster, with the same plan for all architectures."""
    side, settings = small_world.server, hosting_of(small_world)
    plans = dict.fromkeys(side.task.architectures, plan)
    source = HostRecipe(side.setup.recipe, side.setup.given, settings, plans, shards)
    parts = side.method, side.task, small_world.population, settings, plans
    later = HostsHere(functools.partial(ShardHost, source), shards)
    return ShardedEngine(*parts, shards=shards, cluster=PretendedCluster(source), later=later)
