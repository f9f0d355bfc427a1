"""What a phase leaves open is the recipe's; phases know the architecture, and learn whole trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedgist.core.method import Context, Count, Method, Net, Nothing, Order, Part, Phase, Replies
from fedgist.core.privacy import Privacy, PrivateSteps
from fedgist.core.training import Optimizer
from fedgist.core.tree import tree
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.method_check import check_method
from fedgist.engines.plans.plan import Plan
from fedgist.engines.plans.timing import choose_plans
from fedgist.errors import MethodError
from fedgist.testing import check_laws
from fedgist.testing.small_worlds import (
    ALONE,
    PAIRS,
    SIZES,
    federation,
    law_world,
    local_engine,
    loopback,
    trace,
    world,
)
from fedgist.testing.stages import stages
from fedgist.training.timetable import timetable
from fedgist.world.privacy_budget import _private_steps
from small_cohorts import asked


@dataclass(frozen=True)
class Trains(Method):
    """Local training, in phases that a test gives."""

    given: tuple[Phase, ...] = (Phase(),)
    tests: tuple[Phase, ...] = ()

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        return self.given

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        return self.tests


@pytest.mark.parametrize("epochs", [1, 2, 5])
@pytest.mark.parametrize("plan", [ALONE, PAIRS])
def test_a_phase_takes_the_recipes_epochs_unless_it_states_others(epochs: int, plan: Plan) -> None:
    def state(of: int, *given: Phase) -> dict[str, Tensor]:
        small = world(Trains(given), train={"local_epochs": of, "num_rounds": 1})
        return trace(small, plan, rounds=1).state

    expected = state(7, Phase(epochs=epochs))
    for given in (Phase(), Phase(("all",)), Phase(("head", "body"))):
        seen = state(epochs, given)
        assert all(torch.equal(seen[name], expected[name]) for name in expected)
    # rejects one epoch, whatever the recipe says
    once = state(epochs, Phase(epochs=1))
    assert (epochs == 1) == all(torch.equal(once[name], expected[name]) for name in expected)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_phase_without_epochs_is_as_long_everywhere(epochs: int) -> None:
    small = world("fedlog", train={"local_epochs": epochs, "batch_size": 4})
    steps = PrivateSteps(0.5, 1.0, 1.0)
    task = replace(small.server.task, privacy=Privacy("record", "central", 1.0, 0.0, steps))
    counts = _private_steps(small.server.method, task)
    assert counts == (0, *[steps.count(epochs)] * 3)
    cohort, _ = asked(small, Plan(5))
    turns, _ = timetable(cohort, Phase(), cohort.keys, "round", kept=False)
    assert len(turns) == epochs * -(-max(SIZES) // 4)


def test_a_second_test_without_epochs_takes_the_recipes() -> None:
    def scores(of: int, phase: Phase) -> list[object]:
        small = world(Trains((), (phase,)), train={"local_epochs": of, "num_rounds": 1})
        return [line["eval/client/finetuned_loss_mean"] for line in trace(small, rounds=1).rounds]

    assert scores(4, Phase()) == scores(2, Phase(epochs=4)) != scores(2, Phase())


def test_an_optimizer_states_its_rate() -> None:
    with pytest.raises(TypeError, match="lr"):
        Optimizer("sgd")  # type: ignore[call-arg]


@tree
class Pair:
    v: dict[str, Tensor]
    bias: Tensor
    seen: Tensor


@dataclass(frozen=True)
class TwoModels(Method):
    """A client with a second model, in phases that a test gives."""

    learns: tuple[str, ...] = ("own.v",)

    def init_client(self, net: Net, ctx: Context) -> Pair:
        zeros = torch.zeros(ctx.task.num_classes, device=ctx.key.device)
        return Pair(dict(net.params), zeros, torch.zeros(3, dtype=torch.int64))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        return (Phase(self.learns),)

    def loss(self, net: Net, batch: Any, own: Pair, down: Any, ctx: Context) -> Tensor:
        return ctx.task.objective.loss(net.with_arrays(own.v)(batch.x) + own.bias, batch)


NAMES = ("1.weight", "1.bias", "4.weight", "4.bias")


@pytest.mark.parametrize(
    ("learns", "moves"),
    [
        (("own.v",), {f"v/{n}" for n in NAMES}),
        (("own.v.4",), {"v/4.weight", "v/4.bias"}),
        (("own.v.1.bias", "own.bias"), {"v/1.bias", "bias"}),
        (("own.bias", "own.v"), {"bias", *(f"v/{n}" for n in NAMES)}),
    ],
)
def test_a_phase_learns_the_tensors_below_a_name(learns: tuple[str, ...], moves: set[str]) -> None:
    end = trace(world(TwoModels(learns)), rounds=1).state
    first = world(TwoModels()).server.task.starts["mlp"].params
    own = {n.removeprefix("clients/mlp/own/"): a for n, a in end.items() if "/own/" in n}
    begun = {f"v/{n}": first[n] for n in NAMES} | {"bias": torch.zeros(3)}
    assert {n for n in begun if not torch.equal(own[n][0], begun[n])} == moves
    assert all(torch.equal(end[f"clients/mlp/net/{n}"][0], first[n]) for n in NAMES)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own.w", r"TwoModels.phases: a phase learns 'own.w', .*own.v, own.bias, own.seen$"),
        ("own.v.4.w", r"a phase learns 'own.v.4.w', which does not exist"),
        ("own.v.", r"a phase learns 'own.v.', which does not exist"),
        ("heads", r"a phase learns 'heads', which does not exist; choices: all, body, head"),
        ("own.seen", r"a phase learns own.seen, which is int64: only floats can learn"),
        ("own", r"a phase learns own.seen, which is int64: only floats can learn"),
    ],
)
def test_what_cannot_learn_is_named_before_round_one(name: str, says: str) -> None:
    small = world(TwoModels((name,)))
    with pytest.raises(MethodError, match=says):
        check_method(small.server.method, small.server.task, Nothing(), torch.tensor(0))


@dataclass(frozen=True)
class KnowsItsNet(Method):
    """A method whose clients' functions know the architecture; the server's have none."""

    keeps: ClassVar[Part] = "all"

    def _look(self, net: Net, ctx: Context) -> None:
        assert ctx.architecture == net.arch.name
        start = ctx.start
        assert {n: p.shape for n, p in start.params.items()} == {
            n: p.shape for n, p in net.params.items()
        }

    def init_server(self, ctx: Context) -> Count:
        assert not ctx.architecture
        return Count(torch.zeros(()))

    def download(self, server: Count, order: Order, ctx: Context) -> Count:
        assert not ctx.architecture
        return server

    def init_client(self, net: Net, ctx: Context) -> Nothing:
        self._look(net, ctx)
        return Nothing()

    def receive(self, net: Net, own: Any, down: Any, ctx: Context) -> tuple[Net, Any]:
        self._look(net, ctx)
        return net, own

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        deep = len(ctx.start.arch.layers) > 3
        return (Phase(("head",), steps=1 if deep else 2), Phase(("body",), steps=1))[: 1 + deep]

    def loss(self, net: Net, batch: Any, own: Any, down: Any, ctx: Context) -> Tensor:
        self._look(net, ctx)
        return super().loss(net, batch, own, down, ctx)

    def upload(self, net: Net, own: Any, sums: Count, down: Any, ctx: Context) -> Any:
        self._look(net, ctx)
        return sums, own

    def server_update(self, server: Count, replies: Replies, ctx: Context) -> Count:
        assert not ctx.architecture
        total: Count = replies.total()
        return total

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        return self.phases(ctx)

    def predict(self, net: Net, own: Any, down: Any, x: Tensor, ctx: Context) -> Tensor:
        self._look(net, ctx)
        return net(x)


def test_every_function_of_a_client_knows_its_architecture() -> None:
    small = law_world(KnowsItsNet())
    trace(small, ALONE, rounds=1, make_engine=loopback)
    state = trace(small, ALONE, rounds=1).state
    starts = small.server.task.starts
    moved = {
        name
        for name, arrays in state.items()
        for _, arch, kind, *rest in [(*name.split("/"), "", "", "")]
        if kind == "net" and not torch.equal(arrays[0], starts[arch].params[rest[0]])
    }
    heads = {f"clients/{n}/net/{s.arch.head}.weight" for n, s in starts.items()}
    assert heads <= moved
    assert {name.split("/")[1] for name in moved - heads if "bias" not in name} == {"wide"}


def test_phases_of_each_architecture_are_timed_and_charged() -> None:
    small = law_world(KnowsItsNet())
    side = small.server
    server = federation(small).server
    plans = choose_plans(
        side.method,
        side.task,
        small.population,
        local_engine(small, PAIRS).settings,
        server,
        {},
    )
    assert plans.keys() == {"wide", "flat"}
    check_laws(KnowsItsNet(), only=("1", "12"))
    steps = PrivateSteps(0.5, 1.0, 1.0)
    task = replace(side.task, privacy=Privacy("record", "central", 1.0, 0.0, steps))
    long = {"wide": 2, "flat": 5}

    class Uneven(KnowsItsNet):
        def phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(steps=long[ctx.architecture]),)

    # rejects the steps of the first architecture, or of the last
    assert _private_steps(Uneven(), task)[1] == 5
    long["wide"] = 8
    assert _private_steps(Uneven(), task)[1] == 8


def test_the_servers_functions_have_no_start() -> None:
    ctx = federation(law_world(KnowsItsNet())).context("train", 1)
    with pytest.raises(MethodError, match=r"ctx.start is a client's; .*ctx.task.starts"):
        _ = ctx.start


@pytest.mark.parametrize(("init", "common"), [("shared", True), ("own", False)])
def test_a_method_can_ask_whether_starts_are_common(init: str, *, common: bool) -> None:
    small = world("local", clients={"num_clients": 5, "init": init})
    assert small.server.task.common_starts is common
    # as the clients' nets before training say
    stage = next(iter(stages(federation(small), rounds=(1,))))
    engine = stage.fed.engine
    assert isinstance(engine, LocalEngine)
    nets = [
        engine.trial(stage.ctx, [o], [d])[1].net
        for o, d in zip(stage.orders, stage.downs, strict=True)
    ]
    first, *others = [net.params["1.weight"] for net in nets]
    assert all(torch.equal(first, other) is common for other in others)
