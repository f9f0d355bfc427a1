"""Shards: an engine on a cluster gives the bits of the local engine with as many shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedgist
from fedgist.core.method import ClientInfo, Order
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.sharded_engine import ShardedEngine
from fedgist.engines.sharding import divided, merged, row_shards, shard_of
from fedgist.errors import RecipeError
from fedgist.methods import METHODS
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.runs.prepare import host_settings, prepare_run
from fedgist.testing.small_worlds import PAIRS, Trace, blobs, federation, law_world, trace, world
from fedgist.training.stacking_plan import Plan
from fedgist.world.world import World
from pretended_cluster import PretendedCluster, sharded

PRIVATE = {"unit": "record", "epsilon": 9.0, "delta": 0.01, "clip": 3.0, "noise": "seed"}


def here(small_world: World, plan: Plan, shards: int) -> LocalEngine:
    side, settings = small_world.server, host_settings(small_world)
    plans = dict.fromkeys(side.task.architectures, plan)
    parts = side.method, side.task, small_world.population, settings, plans
    return LocalEngine(*parts, shards=shards)


def both(small_world: World, shards: int) -> tuple[Trace, Trace]:
    """Return the traces of the local engine and of a cluster, with as many shards."""
    makers: list[Any] = [partial(make, shards=shards) for make in (here, sharded)]
    first, second = (trace(small_world, PAIRS, make_engine=make) for make in makers)
    return first, second


def assert_same(first: Trace, second: Trace) -> None:
    assert first.rounds == second.rounds
    assert first.clients == second.clients
    assert first.state.keys() == second.state.keys()
    for name, array in first.state.items():
        assert torch.equal(second.state[name], array), name


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_cluster_has_the_bits_of_the_same_shards_here(method: str) -> None:
    small_world = law_world(METHODS[method]())
    shards = 1 if small_world.server.method.merges_clients else 2
    local, remote = both(small_world, shards)
    assert_same(local, remote)
    whole = trace(small_world, PAIRS)  # sums are formed in another order
    for name, array in whole.state.items():
        torch.testing.assert_close(remote.state[name], array, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "sections",
    [
        {"evaluate": {"on": "test"}},
        {"data": {"normalize": "client"}},
        {"privacy": PRIVATE, "method": "fedlog"},
        {
            "privacy": PRIVATE | {"unit": "client"},
            "train": {"fraction_train": 0.6},
        },
        {"clients": {"num_clients": 5, "availability": 0.7}},
        {"evaluate": {"trained_every": 1}},
        {"train": {"fraction_train": 0.4}},
        {"architectures": {}, "method": "fedavg"},
    ],
    ids=str,
)
def test_so_it_has_with_every_kind_of_row_and_test(sections: dict[str, Any]) -> None:
    sections = dict(sections)
    assert_same(*both(world(sections.pop("method", "fedavg"), **sections), 3))


def test_each_client_can_be_a_shard() -> None:
    assert_same(*both(world("fedproto"), 5))


def test_a_shard_keeps_no_row_of_another_client() -> None:
    population = world("fedavg").population
    shards = [shard_of(population, number, 2, all_tests=False) for number in range(2)]
    for number, shard in enumerate(shards):
        assert [c.id for c in shard.population.clients] == list(range(number, 5, 2))
        rows = torch.cat([population.train[i] for i in range(number, 5, 2)]).sort().values
        assert torch.equal(shard.train_rows, rows)
        assert torch.equal(shard.population.examples.y, population.examples.y[rows])
        first = population.train[number]  # the same rows, by other numbers
        here = shard.population.examples.y[shard.population.train[0]]
        assert torch.equal(here, population.examples.y[first])
    together = torch.cat([shard.test_rows for shard in shards]).sort().values
    assert torch.equal(together, torch.arange(len(population.test_examples)))
    homes = row_shards(population, "client", 2)
    for number, shard in enumerate(shards):
        assert set(shard.test_rows.tolist()) >= set((homes == number).nonzero()[:, 0].tolist())


def test_the_clients_state_is_divided_and_put_together_again() -> None:
    clients = [ClientInfo(i, ("a",) if i % 3 else ("b", "a")) for i in range(7)]
    state = {"a/w": torch.arange(14.0).view(7, 2), "b/w": torch.arange(3)}
    parts = divided(state, clients, 3)
    assert [part["a/w"][:, 0].tolist() for part in parts] == [[0, 6, 12], [2, 8], [4, 10]]
    again = merged(parts, clients)
    assert all(torch.equal(again[name], array) for name, array in state.items())


def test_a_download_crosses_once_for_each_shard_and_nothing_else_of_the_server() -> None:
    run = federation(world("fedavg"), make_engine=partial(sharded, shards=2))
    run.do_round(1)
    engine = run.engine
    assert isinstance(engine, ShardedEngine)
    assert isinstance(engine.cluster, PretendedCluster)
    asked = [call for call in engine.cluster.calls if call.function == "ask"]
    assert [len(call.downs) for call in asked] == [1, 1]
    assert [call.shard for call in asked] == [0, 1]


def test_a_clients_state_is_that_of_the_local_engine() -> None:
    runs = [
        federation(world("fedproto"), make_engine=partial(make, shards=2))
        for make in (here, sharded)
    ]
    read: list[dict[str, Tensor]] = []
    for run in runs:
        run.do_round(1)
        orders, downs, ctx = run.downloads(1)
        client = run.engine.client(ctx, orders[3], downs[3])  # type: ignore[attr-defined]
        assert orders[3] == Order(3, orders[3].architecture)
        read.append(client.net.state())
    assert all(torch.equal(read[1][name], array) for name, array in read[0].items())


def test_a_resumed_run_keeps_its_shards(tmp_path: Path) -> None:
    data = blobs()
    recipe: dict[str, Any] = {
        "clients": {"num_clients": 5},
        "partition": {"name": "iid"},
        "method": {"name": "fedproto"},
        "train": {"num_rounds": 2, "batch_size": 4},
        "model": {"name": "mlp", "hidden": [5]},
        "engine": {"workers": 1, "shards": 3, "checkpoint_every": 1},
    }
    rows = (data.x.numpy(), np.asarray(data.y), data.x_test.numpy(), np.asarray(data.y_test))
    whole = fedgist.run(recipe | {"train": {"num_rounds": 3, "batch_size": 4}}, data=rows)
    fedgist.run(recipe, data=rows, out=tmp_path / "run")
    later = recipe | {"engine": {"workers": 1}}
    resumed = fedgist.run(later, data=rows, out=tmp_path / "run", resume=True, rounds=3)
    kept = resumed.federation.checkpoint()
    assert resumed.federation.side.shards == 3
    for name, array in whole.federation.checkpoint().arrays().items():
        assert torch.equal(kept.arrays()[name], array), name


def test_more_shards_than_clients_are_an_error() -> None:
    recipe = make({"clients": {"num_clients": 4}, "engine": {"shards": 5, "workers": 1}})
    with pytest.raises(RecipeError, match=r"engine\.shards = 5: at most 4, for there are so many"):
        prepare_run(resolve(recipe))
