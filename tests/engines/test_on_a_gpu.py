"""Rounds of every method on a GPU, which is pretended: nothing mixes its tensors with the CPU's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from commands import call
from fedgist.engines.plans.timing import STEPS_ON_GPU, TRIES
from fedgist.methods import METHODS

TESTS = Path(__file__).parents[1]
TELLS = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.skipif(not TELLS, reason="this torch knows no device that is made in Python")
def test_rounds_are_those_on_the_cpu() -> None:
    done = call([sys.executable, TESTS / "pretended_gpu.py"], TESTS)
    assert len(done.stdout.split()) > len(METHODS)


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.skipif(not TELLS, reason="this torch knows no device that is made in Python")
def test_what_mixes_devices_fails() -> None:
    mixed = """
import torch, pretended_gpu
with pretended_gpu.pretended_gpu():
    there, here = torch.ones(2, device="cuda"), torch.ones(2)
    assert (there + there.new_ones(2)).tolist() == [2.0, 2.0]
    there + here
"""
    done = call([sys.executable, "-c", mixed], TESTS, code=1)
    assert "aten.add.Tensor of tensors on the GPU and on the CPU" in done.stderr


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.skipif(not TELLS, reason="this torch knows no device that is made in Python")
def test_laws_can_be_tried_there() -> None:
    # law 3 once gave the method's functions a key on the CPU
    tried = """
import pretended_gpu
from fedgist.methods import METHODS
from fedgist.testing import LAWS, MethodUnderTest
pretended_gpu.tell_torch()
with pretended_gpu.pretended_gpu():
    for name in ("fedavg", "fedlog", "repshare"):
        subject = MethodUnderTest(METHODS[name](), {"engine": {"device": "cuda"}})
        for law in LAWS:
            if law.name.split()[0] in {"1", "3", "7"}:
                law.try_on(subject)
                print(law.name)
"""
    assert len(call([sys.executable, "-c", tried], TESTS).stdout.splitlines()) == 9


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.skipif(not TELLS, reason="this torch knows no device that is made in Python")
def test_no_local_step_waits_for_the_gpu() -> None:
    # rejects a number read in each step or each epoch: a mask that is asked for its rows, a key
    # as a seed, clients that begin an epoch, counts of the optimizer
    tried = """
import pretended_gpu
from fedgist.testing.small_worlds import ALONE, trace, world
from fedgist.engines.plans.plan import Plan
def waits(plan, epochs, train):
    pretended_gpu.WAITS.clear()
    about = {"optimizer": "adam", "clip_norm": 1.0, "class_weights": "balanced", **train}
    about["local_epochs"] = epochs
    small = world("fedavg", train=about, engine={"device": "cuda"})
    trace(small, plan, rounds=1)
    return dict(pretended_gpu.WAITS)
pretended_gpu.tell_torch()
with pretended_gpu.pretended_gpu():
    for plan in (Plan(5), Plan(2), ALONE):
        for memory in ("round", "epoch", "run"):
            few, many = (waits(plan, epochs, {"optimizer_memory": memory}) for epochs in (1, 4))
            assert few and few == many, (plan, memory, few, many)
            print(plan.cohort_size, memory)
"""
    assert len(call([sys.executable, "-c", tried], TESTS).stdout.splitlines()) == 9


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.skipif(not TELLS, reason="this torch knows no device that is made in Python")
def test_the_steps_of_every_method_can_be_captured_there() -> None:
    # rejects a loss that reads a number from the GPU or brings one there
    tried = """
import warnings
from unittest.mock import patch
import pretended_gpu
from fedgist.testing.small_worlds import law_world, trace, without_times
from fedgist.core import cuda_graphs
from fedgist.training import captured_step
from method_objects import METHOD_OBJECTS, TRAINS
from pretended_graphs import PretendedGraphs
pretended_gpu.tell_torch()
warnings.simplefilter("error")  # a step without a graph is a warning
for name, method in METHOD_OBJECTS.items():
    train = {"local_epochs": 3, "optimizer": "adam", "lr": 0.01} | TRAINS.get(name, {})
    expected = trace(law_world(method, train=train), rounds=1).rounds
    done = PretendedGraphs()
    with (
        pretended_gpu.pretended_gpu(),
        patch.object(cuda_graphs, "capturing_on", done.capturing_on),
        patch.object(captured_step, "LEAST", 2),
    ):
        found = trace(law_world(method, train=train, engine={"device": "cuda"}), rounds=1).rounds
    assert done.replays or name == "analytic", name  # it has no steps
    for line, wanted in zip(found, expected, strict=True):
        for column, value in without_times(wanted).items():
            if isinstance(value, float):
                assert abs(line[column] - value) < pretended_gpu.ROUNDING, (name, column)
    print(name)
"""
    done = call([sys.executable, "-c", tried], TESTS)
    assert len(done.stdout.split()) > len(METHODS)


@pytest.mark.slow
@pytest.mark.environment
@pytest.mark.skipif(not TELLS, reason="this torch knows no device that is made in Python")
def test_plans_are_timed_there_with_the_captures_of_a_round() -> None:
    # rejects a choice by steps one by one, and by steps that a round does not have; a step that
    # cannot be captured still makes no model one that cannot be stacked
    tried = """
from unittest.mock import patch
import pretended_gpu
from fedgist.engines.plans import timing as plan_timing
from fedgist.runs.prepare import hosting_of
from fedgist.runs.round import start_server
from fedgist.testing.small_worlds import world
from fedgist.core import cuda_graphs
from pretended_graphs import PretendedGraphs
def timed(epochs, fails_at=0):
    done = PretendedGraphs(fails_at)
    with (
        pretended_gpu.pretended_gpu(),
        patch.object(cuda_graphs, "capturing_on", done.capturing_on),
        patch.object(plan_timing, "LONG_ON_GPU_S", 1e9),
        patch.object(plan_timing, "remembered", lambda _, make: make()),
    ):
        w = world("fedavg", train={"local_epochs": epochs}, engine={"device": "cuda"})
        server, about = w.server, hosting_of(w)
        state = start_server(server)
        about = server.method, server.task, w.population, about, state
        plans = plan_timing.choose_plans(*about, {}, cohort_size=5)
    return done, plans
pretended_gpu.tell_torch()
short, _ = timed(1)
done, plans = timed(40)
_, broken = timed(40, fails_at=1)
(plan,) = plans.values()
print(short.replays, done.captures, done.replays, plan.stack, plans == broken)
"""
    done = call([sys.executable, "-W", "ignore", "-c", tried], TESTS)
    replays = str(TRIES * (STEPS_ON_GPU - 1))
    assert done.stdout.split() == ["0", str(TRIES), replays, "True", "True"]
