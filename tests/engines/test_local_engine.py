"""The local engine: the same bits for any number of workers, for every kind of model and client."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedgist.core import random
from fedgist.core.method import Phase
from fedgist.core.nets.compiled.kernel_library import Compiled
from fedgist.core.nets.layers import Pass
from fedgist.data.sources import file_sizes
from fedgist.engines.plans import timing as plan_timing
from fedgist.engines.plans.plan import Plan, choose, remembered, sizes
from fedgist.engines.plans.timing import choose_plans
from fedgist.engines.population import HostSettings
from fedgist.engines.worker_pool import WorkerPool
from fedgist.errors import WorkerError
from fedgist.methods.fedavg import FedAvg
from fedgist.recipe.overrides import ClientGroup
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.runs.prepare import hosting_of, prepare_run
from fedgist.runs.round import start_server
from fedgist.testing.laws import reversed_engine
from fedgist.testing.small_worlds import ALONE, SIZES, Trace, federation, trace, world
from fedgist.training import local_training
from fedgist.training.cohort import Clients, Cohort
from fedgist.world.world import World


def same(a: Trace, b: Trace) -> bool:
    return (
        a.rounds == b.rounds
        and a.clients == b.clients
        and all(torch.equal(a.state[k], b.state[k]) for k in a.state)
    )


class Normed(nn.Module):
    """Batch norm, dropout and a convolution, on six numbers seen as a 1x2x3 image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, (2, 2)), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.relu(self.norm(self.conv(x.view(-1, 1, 2, 3)))).flatten(1)
        out: torch.Tensor = self.head(self.drop(z))
        return out


class Recurrent(nn.Module):
    """An LSTM: torch has no batching rule for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(x.view(-1, 3, 2))[0][:, -1])
        return out


class DrawsFromTorch(nn.Module):
    """Dropout as a function, which draws from torch's generator.

    What it draws for a client would depend on the others in the stack.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(F.dropout(self.body(x), 0.5, training=self.training))
        return out


class Branching(nn.Module):
    """A model that branches on its data, which cannot be stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.body(x)
        out: torch.Tensor = self.head(z if bool(z.sum() > 0) else 2 * z)
        return out


def with_model(build: type[nn.Module], method: str = "fedavg", **sections: Any) -> World:
    return world(method, given={"groups": {"mine": ClientGroup(build)}}, **sections)


@pytest.mark.parametrize("method", ["fedavg", "fedlog", "local"])
def test_the_same_bits_for_one_and_two_workers(method: str) -> None:
    alone, shared_out = (trace(world(method, engine={"workers": n})) for n in (1, 2))
    assert same(alone, shared_out)


def test_clients_with_equally_many_rows_are_stacked_in_one_order() -> None:
    # rejects stacks in the order of asking: sums would be added up in another order
    small_world = world("fedavg", given={"clients": list(torch.split(torch.arange(30), 6))})
    straight = trace(small_world, rounds=2)
    assert same(straight, trace(small_world, rounds=2, make_engine=reversed_engine))


@pytest.mark.slow
@pytest.mark.parametrize("convolutions", ["each", "stacked"])
def test_batch_norm_dropout_and_convolutions_do_not_depend_on_the_stack(convolutions: Any) -> None:
    alone = trace(with_model(Normed), Plan(1, stack=False))
    for size in (1, 3, 5):
        together = trace(with_model(Normed), Plan(size, convolutions))
        assert all(
            torch.allclose(alone.state[k], together.state[k], atol=1e-5) for k in alone.state
        )


NEEDS_UNITS = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU has no units for bfloat16, which torch's LSTM needs",
)


@pytest.mark.slow
@pytest.mark.parametrize("build", [Normed, pytest.param(Recurrent, marks=NEEDS_UNITS)])
def test_bfloat16_steps_do_not_depend_on_the_stack_and_keep_numbers_in_float32(
    build: type[nn.Module],
) -> None:
    half, whole = {"precision": "bfloat16"}, trace(with_model(build), ALONE)
    alone = trace(with_model(build, train=half), ALONE)
    assert all(a.dtype == whole.state[k].dtype for k, a in alone.state.items())
    assert not all(torch.equal(a, whole.state[k]) for k, a in alone.state.items())
    plans = [Plan(k, c) for k in (2, 5) for c in ("each", "stacked")] if build is Normed else []
    for state in [whole.state, *(trace(with_model(build, train=half), p).state for p in plans)]:
        assert all(torch.allclose(alone.state[k], state[k], atol=3e-2) for k in state)


def test_heads_and_methods_terms_get_whole_numbers_from_a_body_of_bfloat16() -> None:
    net = next(iter(with_model(Normed).server.task.starts.values()))
    x, mask = torch.randn(4, 6), torch.ones(4, dtype=torch.bool)
    run = Pass(mask, random.key(0))
    whole, half = (
        replace(net, run=replace(run, half=h)).features(x.view(4, *net.arch.input_shape))
        for h in (False, True)
    )
    assert whole.dtype == half.dtype == torch.float32
    assert not torch.equal(whole, half)
    assert torch.allclose(whole, half, atol=5e-2)


def test_batch_norm_statistics_stay_with_each_client_where_the_model_does() -> None:
    state = trace(with_model(Normed, "local")).state
    means = state["clients/mine/net/norm.running_mean"]
    assert means.shape == (len(SIZES), 4)
    assert len(torch.unique(means, dim=0)) == len(SIZES)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_optimizers_with_memory_agree_between_stacks(optimizer: str) -> None:
    alone, stacked = (
        trace(world("local", train={"optimizer": optimizer}), Plan(k)) for k in (1, 5)
    )
    far = [(alone.state[k].double() - stacked.state[k].double()).abs() > 1e-4 for k in alone.state]
    # Adam magnifies the last bits
    assert sum(int(f.sum()) for f in far) <= 0.01 * sum(f.numel() for f in far)


def test_a_client_that_trains_alone_computes_nothing_for_absent_rows() -> None:
    seen: list[int] = []

    class Counting(Normed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x) if torch.is_grad_enabled() else 0)
            return super().forward(x)

    trace(with_model(Counting, train={"batch_size": 4, "local_epochs": 1}), ALONE, rounds=1)
    assert sum(seen) == sum(SIZES)


@pytest.mark.parametrize("build", [Recurrent, Branching])
def test_a_model_that_cannot_be_stacked_runs_alone_and_says_so(build: type[nn.Module]) -> None:
    small_world = with_model(build)
    plan = choose_plans(
        small_world.server.method,
        small_world.server.task,
        small_world.population,
        hosting_of(small_world),
        start_server(small_world.server),
        {},
    )["mine"]
    assert plan.cohort_size == 1
    assert not plan.stack
    assert "runs client by client" in plan.note
    assert same(trace(small_world, plan), trace(small_world, plan))


def test_a_model_that_draws_from_torch_is_a_function_of_the_seed_all_the_same() -> None:
    small_world = with_model(DrawsFromTorch)
    plan = choose_plans(
        small_world.server.method,
        small_world.server.task,
        small_world.population,
        hosting_of(small_world),
        start_server(small_world.server),
        {},
    )["mine"]
    assert not plan.stack
    torch.manual_seed(1)
    first = trace(small_world, plan)
    torch.manual_seed(2)
    assert same(first, trace(small_world, plan))


def test_own_starts_differ_and_shared_starts_do_not() -> None:
    def spread(init: str) -> float:
        small_world = world("local", clients={"init": init}, train={"lr": 1e-12, "num_rounds": 1})
        weights = trace(small_world, rounds=1).state["clients/mlp/net/1.weight"]
        return float((weights - weights[0]).abs().max())

    assert spread("shared") < 1e-6
    assert spread("own") > 1e-2


@pytest.mark.slow
def test_an_earlier_run_in_the_process_leaves_nothing_behind() -> None:
    before = trace(world("fedlog"))
    trace(world("fedprox"))
    assert same(before, trace(world("fedlog")))


def test_a_run_does_not_move_torchs_own_generator_or_threads() -> None:
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    trace(with_model(Normed))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_workers_end_with_the_engine() -> None:
    others = psutil.Process().children()
    fed = federation(world(engine={"workers": 2}))
    fed.advance()
    children = [child for child in psutil.Process().children() if child not in others]
    assert len(children) == 2
    fed.engine.close()
    assert not [c for c in children if c.is_running()]


def _act(task: str) -> str:
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "fail":
        raise ValueError("no such thing")
    if task == "ask too much":
        torch.empty(2**60)
    if task == "sleep":
        time.sleep(0.2)
    return task


def test_results_come_in_the_order_of_the_tasks() -> None:
    pool = WorkerPool(_act, 2)
    try:
        tasks = ["sleep", "a", "b", "sleep", "c"]
        assert pool.run(tasks) == tasks
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("die", "worker process died"),
        ("fail", "ValueError: no such thing"),
        ("ask too much", "^this machine has not enough memory$"),
    ],
)
def test_a_worker_that_dies_or_fails_is_an_error_that_says_so(task: str, says: str) -> None:
    pool = WorkerPool(_act, 2)
    with pytest.raises(WorkerError, match=says):
        pool.run(["a", task, "b"])
    assert not pool.workers


def test_the_fastest_plan_is_chosen_and_a_larger_stack_must_pay() -> None:
    seconds = {1: 1.0, 2: 0.9, 4: 0.5, 8: 0.499, 10: 0.6}

    def measure(plan: Plan) -> float:
        return seconds[plan.cohort_size] * (1 if plan.convolutions == "each" else 1.1)

    chosen = choose(measure, sorted(seconds), ("each", "stacked"))
    assert (chosen.cohort_size, chosen.convolutions) in {(4, "each"), (8, "each")}
    assert choose(lambda _: 1.0, [1, 3]).cohort_size == 3


def test_kernels_are_in_a_plan_only_if_a_whole_step_is_faster_with_them() -> None:
    kernels: dict[str, Compiled] = {"conv": "compiled"}
    for gain in (0.5, 1.5):

        def measure(plan: Plan, gain: float = gain) -> float:
            return (gain if plan.kernels else 1.0) / plan.cohort_size

        chosen = choose(measure, [1, 2, 4], ("each", "stacked"), kernels)
        assert chosen == Plan(4, "each", kernels=kernels if gain < 1 else {})


def test_sizes_of_stacks_leave_no_core_waiting_for_another() -> None:
    # rejects round numbers: 50 clients in stacks of 24 are three stacks for two cores, one of them
    # of two clients
    assert sizes(50, 2, 1000)[-4:] == [7, 9, 13, 25]
    assert sizes(50, 2, 10) == [1, 2, 3, 5, 7, 9, 10]
    assert sizes(3, 8, 1000) == [1]


def test_a_plan_is_measured_once_and_remembered() -> None:
    calls = []

    def make() -> dict[str, int]:
        calls.append(1)
        return {"cohort_size": 7}

    assert [remembered({"key": "plans"}, make) for _ in range(3)] == [{"cohort_size": 7}] * 3
    assert len(calls) == 1


@pytest.mark.parametrize(("epochs", "steps"), [(0, 1), (1, 2), (2, plan_timing.STEPS)])
def test_no_more_steps_are_timed_than_a_phase_has(
    epochs: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rejects a choice of small stacks where the start of a phase costs more than its steps, and an
    # error for a phase without steps
    seen: list[int | None] = []
    train = local_training.train

    def noted(cohort: Cohort, clients: Clients, phases: tuple[Phase, ...]) -> Any:
        seen.extend(phase.steps for phase in phases)
        return train(cohort, clients, phases)

    monkeypatch.setattr(local_training, "train", noted)
    monkeypatch.setattr(plan_timing, "LONG_S", 1e9)
    monkeypatch.setattr(plan_timing, "remembered", lambda _, make: make())
    monkeypatch.setattr(plan_timing, "default_workers", lambda _: 1)  # in this process
    monkeypatch.setattr(FedAvg, "phases", lambda *_: (Phase(epochs=epochs),))
    small_world = world(train={"batch_size": 6})  # the largest client has 11 rows
    side = small_world.server
    about = side.method, side.task, small_world.population, hosting_of(small_world)
    choose_plans(*about, start_server(side), {}, cohort_size=5)
    assert max(number or 0 for number in seen) == steps


def test_the_plan_does_not_depend_on_the_number_of_workers() -> None:
    small_world = world()
    plans = []
    for workers in (1, 2):
        settings = HostSettings(seed=0, workers=workers)
        plans.append(
            choose_plans(
                small_world.server.method,
                small_world.server.task,
                small_world.population,
                settings,
                start_server(small_world.server),
                {},
            )
        )
    assert plans[0] == plans[1]


def test_the_memory_of_a_container_bounds_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen: half of the host's memory was planned with
    small_world = world()
    (tmp_path / "limit").write_text("2\n")
    monkeypatch.setattr(file_sizes, "_GROUP_LIMITS", (tmp_path / "limit",))
    side, settings = small_world.server, hosting_of(small_world)
    population, start = small_world.population, start_server(side)
    plans = choose_plans(side.method, side.task, population, settings, start, {})
    assert plans["mlp"].cohort_size == 1


def test_the_memory_limit_bounds_the_stack() -> None:
    small_world = world()
    settings = hosting_of(small_world)
    tight = choose_plans(
        small_world.server.method,
        small_world.server.task,
        small_world.population,
        settings,
        start_server(small_world.server),
        {},
        memory_limit=1,
    )
    assert tight["mlp"].cohort_size == 1


def test_workers_that_would_have_nothing_to_do_are_left_out_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # seen: 150 processes for 20 clients
    assert hosting_of(world("fedavg", engine={"workers": 3})).workers == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert hosting_of(world("fedavg", engine={"workers": 150})).workers == 4  # of five clients
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert hosting_of(world("fedavg", engine={"workers": 150})).workers == len(SIZES)
    recipe = make({"engine": {"workers": 150, "cohort_size": 2}, "clients": {"num_clients": 3}})
    opened, _, engine = prepare_run(resolve(recipe))
    engine.close()
    assert any("engine.workers = 150 is lowered to 3: more" in n for n in opened.server.notes)
