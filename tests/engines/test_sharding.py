"""Shards: an engine on a cluster gives the bits of the local engine with as many shards."""

from __future__ import annotations

import errno
import json
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedgist
from fedgist.api.result import Result
from fedgist.core.method import ClientInfo, Order
from fedgist.engines.engine import Simulation
from fedgist.engines.sharded_engine import ShardedEngine
from fedgist.engines.sharding import divided, merged, row_shards, shard_of
from fedgist.errors import CheckpointError, DiskFullError, RecipeError
from fedgist.methods import METHODS
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.runs.files import atomic_files
from fedgist.runs.files.checkpoint import load
from fedgist.runs.prepare import prepare_run
from fedgist.runs.ray_engine import ShardHost
from fedgist.runs.runner import load_run
from fedgist.testing.small_worlds import (
    PAIRS,
    Trace,
    federation,
    law_world,
    local_engine,
    trace,
    world,
)
from fedgist.world.world import World
from method_objects import each
from pretended_cluster import PretendedCluster, pretend, sharded

PRIVATE = {"unit": "record", "epsilon": 9.0, "delta": 0.01, "clip": 3.0, "noise": "seed"}


def both(small_world: World, shards: int) -> tuple[Trace, Trace]:
    """Return the traces of the local engine and of a cluster, with as many shards."""
    makers: list[Any] = [partial(make, shards=shards) for make in (local_engine, sharded)]
    first, second = (trace(small_world, PAIRS, make_engine=make) for make in makers)
    return first, second


def assert_same(first: Trace, second: Trace) -> None:
    assert first.rounds == second.rounds
    assert first.clients == second.clients
    assert first.state.keys() == second.state.keys()
    for name, array in first.state.items():
        assert torch.equal(second.state[name], array), name


@pytest.mark.parametrize("method", each(METHODS))
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


@pytest.mark.parametrize("method", ["fedavg", "fedlog"])  # which wraps it for each client anew
def test_a_download_crosses_once_for_each_shard(method: str) -> None:
    run = federation(world(method), make_engine=partial(sharded, shards=2))
    run.do_round(1)
    engine = run.engine
    assert isinstance(engine, ShardedEngine)
    assert isinstance(engine.cluster, PretendedCluster)
    asked = [call for call in engine.cluster.calls if call.function == "ask"]
    assert [len(call.downs) for call in asked] == [1, 1]
    assert [call.shard for call in asked] == [0, 1]
    assert asked[0].downs[0] is asked[1].downs[0]


def test_a_clients_state_is_that_of_the_local_engine() -> None:
    runs = [
        federation(world("fedproto"), make_engine=partial(make, shards=2))
        for make in (local_engine, sharded)
    ]
    read: list[dict[str, Tensor]] = []
    for run in runs:
        run.do_round(1)
        orders, downs, ctx = run.downloads(1)
        client = run.engine.client(ctx, orders[3], downs[3])  # type: ignore[attr-defined]
        assert orders[3] == Order(3, orders[3].architecture)
        read.append(client.net.state())
    assert all(torch.equal(read[1][name], array) for name, array in read[0].items())


def recipe(rounds: int = 2, **engine: Any) -> dict[str, Any]:
    """Return a recipe whose clients keep their bodies, and whose best round is kept."""
    return {
        "clients": {"num_clients": 5},
        "partition": {"name": "iid"},
        "data": {"validation": 0.3, "train_rows": 60},
        "method": {"name": "fedproto"},
        "train": {"num_rounds": rounds, "batch_size": 4, "lr": 0.01},
        "model": {"name": "mlp", "hidden": [5]},
        "evaluate": {"keep": "best_validation"},
        "engine": {"workers": 1, "checkpoint_every": 1} | engine,
    }


def arrays_of(result: Result) -> dict[str, Tensor]:
    engine = result.server_run.engine
    assert isinstance(engine, Simulation)
    return {**result.server_run.checkpoint().server, **engine.state()}


def run(out: Path | None = None, rounds: int = 2, *, resume: bool = False, **engine: Any) -> Result:
    raised = rounds if resume else None
    return fedgist.run(
        recipe(2 if resume else rounds, **engine), out=out, resume=resume, rounds=raised
    )


def test_a_resumed_run_keeps_its_shards(tmp_path: Path) -> None:
    whole = run(rounds=3, shards=3)
    run(tmp_path, shards=3)
    resumed = run(tmp_path, 3, resume=True)
    assert resumed.server_run.side.shards == 3
    assert_equal(arrays_of(resumed), arrays_of(whole))


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], array) for name, array in second.items())


@pytest.mark.filterwarnings("ignore:the cluster's machines do not share")
@pytest.mark.parametrize("shared", [True, False])
def test_a_cluster_saves_its_state_in_parts_and_goes_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    clusters = pretend(monkeypatch)
    if not shared:
        monkeypatch.setattr(ShardHost, "reads", lambda *_: False)
    whole = run(rounds=4, shards=2)
    run(tmp_path, name="ray")
    parts = sorted((tmp_path / "checkpoint").glob("clients-*"))
    assert len(parts) in ({2, 4} if shared else {0})  # with those of the best round
    assert not list((tmp_path / "checkpoint").glob("token*"))
    notes = json.loads((tmp_path / "result.json").read_text("utf-8"))["notes"]
    assert any("do not share" in note for note in notes) != shared
    resumed = run(tmp_path, 3, resume=True, name="ray")
    assert {call.function for call in clusters[-1].calls} >= {
        "restore_part" if shared else "restore"
    }
    again = run(tmp_path, 4, resume=True)  # on one machine
    loaded = load_run(tmp_path)[0]
    assert_equal(loaded.checkpoint().arrays(), again.server_run.checkpoint().arrays())
    assert_equal(arrays_of(again), arrays_of(whole))
    scores = [[line["eval/client/loss_mean"] for line in r.rounds] for r in (resumed, whole)]
    assert scores[0] == scores[1][:3]
    saved = load(tmp_path)
    assert saved is not None
    assert saved.best is not None
    assert saved.parts is None
    left = {path.name for path in (tmp_path / "checkpoint").glob("clients-*")}
    assert left == set(saved.best.parts.files if saved.best.parts else ())


@pytest.mark.parametrize("folder", [True, False])
def test_models_are_used_after_the_end_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, folder: bool
) -> None:
    clusters = pretend(monkeypatch)
    done = run(tmp_path if folder else None, name="ray")
    whole = run(shards=2)
    assert not clusters[-1].hosts
    x = torch.rand(3, 1, 8, 8)
    for client in range(5):
        assert torch.equal(done.model(client)(x), whole.model(client)(x))
    assert not clusters[-1].hosts
    assert_equal(arrays_of(done), arrays_of(whole))


def test_a_part_that_is_missing_or_changed_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    run(tmp_path, name="ray")
    part = min((tmp_path / "checkpoint").glob("clients-1-*"))
    blob = part.read_bytes()
    part.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{part.name} is damaged"):
        run(tmp_path, 3, resume=True, name="ray")
    part.unlink()
    with pytest.raises(CheckpointError, match=rf"{part.name} cannot be read"):
        load_run(tmp_path)
    part.write_bytes(blob)
    run(tmp_path, 3, resume=True, name="ray")


def test_a_full_disk_of_a_host_ends_the_run_which_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    whole = run(rounds=4, shards=2)
    run(tmp_path, name="ray")

    whole_file = atomic_files.whole

    def full(path: Path, **how: bool) -> AbstractContextManager[Path]:
        with atomic_files.room_for(path):
            if path.name.startswith("clients-"):
                raise OSError(errno.ENOSPC, "No space left on device")
        return whole_file(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "whole", full)
        with pytest.raises(DiskFullError, match=r"clients-\d.*go on with: fedgist run --resume"):
            run(tmp_path, 4, resume=True, name="ray")
    assert_equal(arrays_of(run(tmp_path, 4, resume=True, name="ray")), arrays_of(whole))


def test_a_run_that_is_replaced_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    run(tmp_path, name="ray")
    fedgist.run(recipe(), out=tmp_path, overwrite=True)
    assert not list((tmp_path / "checkpoint").glob("clients-*"))


def test_more_shards_than_clients_are_an_error() -> None:
    few = make({"clients": {"num_clients": 4}, "engine": {"shards": 5, "workers": 1}})
    with pytest.raises(RecipeError, match=r"engine\.shards = 5: must be at most 4, the number"):
        prepare_run(resolve(few))
