"""Runs on a Ray cluster of two nodes with one core each, on this machine, and their faults."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Command, call, fedgist, lines_so_far, wait_until
from fedgist.engines.plans.plan import Plan
from fedgist.engines.sharded_engine import HostsHere, ShardedEngine
from fedgist.errors import DataError, WorkerError
from fedgist.methods import METHODS
from fedgist.runs.files.checkpoint import load
from fedgist.runs.prepare import hosting_of
from fedgist.runs.ray_engine import HostRecipe, ShardHost
from fedgist.testing.small_worlds import PAIRS, law_world, local_engine, trace, world
from fedgist.world.world import World
from ray_nodes import Nodes, cluster_of

pytestmark = [pytest.mark.environment, pytest.mark.slow]

PRIVATE = {"unit": "record", "epsilon": 9.0, "delta": 0.01, "clip": 3.0, "noise": "seed"}


def on_ray(small_world: World, plan: Plan, address: str, shards: int) -> ShardedEngine:
    side, settings = small_world.server, hosting_of(small_world)
    plans = dict.fromkeys(side.task.architectures, plan)
    source = HostRecipe(side.setup.recipe, side.setup.given, settings, plans, shards)
    make = functools.partial(ShardHost, source)
    cluster = cluster_of(address, make, shards)
    parts = side.method, side.task, small_world.population, settings, plans
    return ShardedEngine(*parts, shards=shards, cluster=cluster, later=HostsHere(make, shards))


@pytest.mark.parametrize(
    "method", ["fedlog", "fedavg", "repshare", "merged_codist", "flesd", "private"]
)
def test_a_cluster_has_the_bits_of_as_many_shards_here(method: str, nodes: Nodes) -> None:
    small_world = (
        world("fedlog", privacy=PRIVATE) if method == "private" else law_world(METHODS[method]())
    )
    remote = trace(
        small_world,
        PAIRS,
        make_engine=functools.partial(on_ray, address=nodes.address, shards=2),
    )
    local = trace(small_world, PAIRS, make_engine=functools.partial(local_engine, shards=2))
    whole = trace(small_world, PAIRS)
    assert remote.rounds == local.rounds
    assert remote.clients == local.clients
    for name, array in local.state.items():
        assert torch.equal(remote.state[name], array), name
        torch.testing.assert_close(array, whole.state[name], rtol=1e-3, atol=1e-4)


def recipe(nodes: Nodes, rounds: int) -> list[str]:
    settings = {
        "engine.name": "ray",
        "engine.address": nodes.address,
        "engine.shards": 2,
        "engine.cohort_size": 5,
        "engine.checkpoint_every": 3,
        "engine.server_threads": 1,
        "train.num_rounds": rounds,
        "method.name": "fedper",
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in lines_so_far(folder / "rounds.jsonl")]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.fixture(scope="session")
def whole(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted, on one machine."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*recipe(nodes, 40), "--set", "engine.name=local"]
    fedgist("run", "demo", *words, "--out", "run", cwd=folder)
    return folder / "run"


def begun(nodes: Nodes, tmp_path: Path) -> Command:
    """Return a run with rounds done, and a checkpoint."""
    command = Command(["run", "demo", *recipe(nodes, 40), "--out", "run"], tmp_path)
    wait_until(lambda: len(rounds_of(tmp_path / "run")) >= 4 or not command.runs)
    assert command.runs, command.end()
    return command


def assert_resumed(tmp_path: Path, whole: Path) -> None:
    done = fedgist("run", "--resume", "run", cwd=tmp_path)
    assert "round 40/40" in done.stdout
    assert rounds_of(tmp_path / "run") == rounds_of(whole)
    first, second = load(tmp_path / "run"), load(whole)
    assert first is not None
    assert second is not None
    assert all(torch.equal(first.server[name], array) for name, array in second.server.items())


def test_an_actor_that_is_killed_ends_the_run_which_goes_on_with_the_same_bits(
    nodes: Nodes, whole: Path, tmp_path: Path
) -> None:
    command = begun(nodes, tmp_path)
    os.kill(nodes.actors()[-1].pid, signal.SIGKILL)
    done = command.end()
    assert done.returncode != 0
    assert "an actor of the Ray cluster died" in done.stderr
    assert "go on with: fedgist run --resume run" in done.stderr
    assert_resumed(tmp_path, whole)


def test_a_node_that_is_killed_ends_the_run_which_goes_on_with_one_node_less(
    nodes: Nodes, whole: Path, tmp_path: Path
) -> None:
    command = begun(nodes, tmp_path)
    nodes.cluster.remove_node(nodes.second, allow_graceful=False)
    try:
        done = command.end()
        assert done.returncode != 0
        assert "go on with: fedgist run --resume run" in done.stderr
        assert_resumed(tmp_path, whole)  # two shards, one core
    finally:
        nodes.add()


def test_a_driver_that_is_killed_leaves_no_actor_and_goes_on(
    nodes: Nodes, whole: Path, tmp_path: Path
) -> None:
    command = begun(nodes, tmp_path)
    command.signal(signal.SIGKILL)
    command.end()
    wait_until(lambda: not nodes.actors())
    assert_resumed(tmp_path, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_round_and_leaves_no_actor(
    nodes: Nodes, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = begun(nodes, tmp_path)
    command.signal(number)
    done = command.end()
    assert done.returncode == 130
    assert "resume with: fedgist run --resume run" in done.stderr + done.stdout
    wait_until(lambda: not nodes.actors())
    assert_resumed(tmp_path, whole)


def test_a_cluster_on_this_machine_begins_and_ends_with_the_run(
    nodes: Nodes, tmp_path: Path
) -> None:
    del nodes  # where it can be started, so can another one
    command = Command(
        ["run", "demo", "--set", "engine.name=ray", "--set", "train.num_rounds=2", "--out", "run"],
        tmp_path,
    )
    wait_until(lambda: bool(rounds_of(tmp_path / "run")) or not command.runs)
    processes = command.workers()
    done = command.end()
    assert done.returncode == 0, done
    assert "round 2/2" in done.stdout
    wait_until(lambda: not any(process.is_running() for process in processes))


def test_an_address_without_a_cluster_is_an_error(tmp_path: Path) -> None:
    words = ["--set", "engine.name=ray", "--set", "engine.address=127.0.0.1:1"]
    done = fedgist("run", "demo", *words, "--out", "run", cwd=tmp_path, code=2)
    assert "engine.address = '127.0.0.1:1'" in done.stderr


def test_a_host_that_cannot_be_made_says_why(nodes: Nodes) -> None:
    def fails(number: int) -> object:
        if number == 1:
            raise DataError("row 7 cannot be read")
        return number

    cluster = cluster_of(nodes.address, fails, 2)
    with pytest.raises(DataError, match="row 7 cannot be read"):
        cluster.start()
    import ray

    assert not ray.is_initialized()


def test_an_unexpected_error_in_an_actor_is_shown_whole(nodes: Nodes) -> None:
    def breaks(number: int) -> object:
        return 1 // number

    cluster = cluster_of(nodes.address, breaks, 1)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        cluster.start()


def test_what_an_actor_cannot_import_is_named(nodes: Nodes) -> None:
    cluster = cluster_of(nodes.address, imported_here_alone, 1)
    with pytest.raises(WorkerError, match="No module named"):
        cluster.start()


def imported_here_alone(number: int) -> object:
    return number


OWN = """
from dataclasses import dataclass

import numpy as np
import torch

import fedgist
from fedgist.core.message import message
from fedgist.methods.common.linear_head import class_sums


@message(reduce="sum")
class Means:
    total: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class ShareMeans(fedgist.Method):
    pull: float = 0.1

    def init_server(self, ctx):
        width = next(iter(ctx.task.architectures.values())).feature_width
        return Means(torch.zeros(ctx.task.num_classes, width), torch.zeros(ctx.task.num_classes))

    def download(self, server, order, ctx):
        return server

    def loss(self, net, batch, own, down, ctx):
        z = net.features(batch.x)
        means = down.total / down.rows.clamp(min=1.0).unsqueeze(1)
        far = torch.where(batch.mask, (z - means[batch.y]).square().sum(1), 0.0)
        task_loss = ctx.task.objective.loss(net.logits(z), batch)
        return task_loss + self.pull * far.sum() / batch.mask.sum().clamp(min=1)

    def summarize(self, net, batch, own, down, ctx):
        z, classes = net.features(batch.x), ctx.task.num_classes
        rows = class_sums(torch.ones_like(z[:, :1]), batch.y, batch.mask, classes)[:, 0]
        return Means(class_sums(z, batch.y, batch.mask, classes), rows)

    def upload(self, net, own, sums, down, ctx):
        return sums, own

    def server_update(self, server, replies, ctx):
        assert type(replies.total()) is Means
        return replies.total()
"""
SCRIPT = """

draw = np.random.default_rng(0)
x, y = draw.normal(size=(200, 5)).astype("float32"), draw.integers(0, 3, 200)
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
losses = []
for engine in ({"name": "ray", "shards": 2}, {"shards": 2}):
    recipe = {"train": {"num_rounds": 2, "lr": 0.1}, "engine": {**engine, "cohort_size": 3}}
    run = fedgist.run(
        recipe,
        data=(x[:150], y[:150], x[150:], y[150:]),
        clients=np.array_split(np.arange(150), 6),
        model=model,
        method=ShareMeans(),
    )
    losses.append([line["eval/client/loss_mean"] for line in run.rounds])
assert losses[0] == losses[1], losses
print("the same bits")
"""


def test_own_code_that_a_recipe_names_is_imported_by_the_actors(
    nodes: Nodes, tmp_path: Path
) -> None:
    (tmp_path / "own_means.py").write_text(OWN, "utf-8")
    (tmp_path / "mine.toml").write_text(
        '[method]\nname = "own_means:ShareMeans"\n[model]\nname = "mlp"\n[train]\nnum_rounds = 2\n'
        "[clients]\nnum_clients = 6\n[engine]\ncohort_size = 3\nshards = 2\n",
        "utf-8",
    )
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for name in ("ray", "local"):
        where = ("--set", f"engine.name={name}", "--set", f"engine.address={nodes.address}")
        fedgist("run", "../mine.toml", *where, "--out", name, cwd=elsewhere)
    assert rounds_of(elsewhere / "ray") == rounds_of(elsewhere / "local")


def test_objects_of_a_script_reach_the_actors(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OWN + SCRIPT, "utf-8")
    done = call([sys.executable, "script.py"], tmp_path, RAY_ADDRESS=nodes.address)
    assert done.stdout.splitlines()[-1] == "the same bits"


def test_a_run_that_began_on_a_cluster_goes_on_here(
    nodes: Nodes, whole: Path, tmp_path: Path
) -> None:
    command = begun(nodes, tmp_path)
    command.signal(signal.SIGINT)
    command.end()
    done = fedgist("run", "--resume", "run", "--set", "engine.name=local", cwd=tmp_path)
    assert "round 40/40" in done.stdout
    assert rounds_of(tmp_path / "run") == rounds_of(whole)
    refused = fedgist(
        *("run", "--resume", "run", "--rounds", "41", "--set", "engine.name=loopback"),
        cwd=tmp_path,
        code=2,
    )
    assert "was begun with engine.name = 'local', not 'loopback'" in refused.stderr
