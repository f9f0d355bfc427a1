"""Training by recorded programs has the bits of training without, for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedgist.core.method import Batch, Context, Net, Phase
from fedgist.core.recorded import Program, record
from fedgist.core.tree import Tree
from fedgist.engines import client_host
from fedgist.engines.plans.plan import Plan
from fedgist.methods import METHODS
from fedgist.methods.fedavg import FedAvg
from fedgist.recipe.overrides import ClientGroup
from fedgist.testing.small_worlds import Trace, law_world, trace, world
from fedgist.training import recorded_step
from fedgist.training.recorded_step import MOST_FORMS, Recordings
from fedgist.world.world import World
from method_objects import TRAINS, each

STACK = Plan(3)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the second step of a form, for runs are short."""
    monkeypatch.setattr(recorded_step, "RECORDED", 2)
    monkeypatch.setattr(recorded_step, "CHECKED", 3)


def both(small_world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, Trace, int]:
    """Return a run without recordings and one with them, and how many steps were replayed."""
    monkeypatch.setattr(client_host, "Recordings", lambda: None)
    without = trace(small_world, STACK)
    every: list[Recordings] = []

    def recordings() -> Recordings:
        every.append(Recordings())
        return every[-1]

    monkeypatch.setattr(client_host, "Recordings", recordings)
    return without, trace(small_world, STACK), sum(replayed(one) for one in every)


def replayed(recordings: Recordings) -> int:
    described = [forms for known in recordings.forms.values() for _, forms in known]
    steps = [form for forms in described for form in forms.values() if form.program is not None]
    return sum(max(0, form.seen - recorded_step.CHECKED) for form in steps)


def assert_same(first: Trace, second: Trace) -> None:
    assert first.rounds == second.rounds
    for name, array in first.state.items():
        assert torch.equal(second.state[name], array), name


READS_ROUND = {"pfedme"}  # the rate of the round is in its loss


@pytest.mark.parametrize("method", each(METHODS))
def test_a_run_has_the_bits_of_one_without_recordings(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"num_rounds": 5, "local_epochs": 3, **TRAINS.get(method, {})}
    small_world = law_world(METHODS[method](), train=train)
    without, recorded, steps = both(small_world, monkeypatch)
    assert_same(without, recorded)
    trains = any(
        small_world.server.method.phases(
            Context(torch.zeros(()), small_world.server.task, 1, stage, architecture=name)
        )
        for name in small_world.server.task.architectures
        for stage in small_world.server.method.stages(
            Context(torch.zeros(()), small_world.server.task, 1, "")
        )
    )
    assert (steps > 0) == (trains and method not in READS_ROUND)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.5}, {"optimizer_memory": "run"}], ids=str)
def test_it_has_with_every_optimizer(
    optimizer: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"optimizer": optimizer, "local_epochs": 4, "lr": 0.01, **more}
    without, recorded, steps = both(world(train=train), monkeypatch)
    assert_same(without, recorded)
    assert steps > 0


def normed() -> nn.Sequential:
    body = nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    end = nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, 3)
    return nn.Sequential(*body, *end)


def test_it_has_on_convolutions_norms_and_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    # rejects masks of dropout that are those of the step that was recorded
    given = {"groups": {"mine": ClientGroup(normed)}}
    small_world = world(given=given, train={"local_epochs": 5, "num_rounds": 4})
    without, recorded, steps = both(small_world, monkeypatch)
    assert_same(without, recorded)
    assert steps > 0


@dataclass(frozen=True)
class ByRound(FedAvg):
    """The loss grows with the round."""

    def loss(self, net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context) -> Tensor:
        return ctx.round * super().loss(net, batch, own, down, ctx)


@dataclass(frozen=True)
class TwoLosses(FedAvg):
    """Two phases of one form, with different losses; the first begins from a shared model."""

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        return Phase(), Phase(), Phase(loss=self.half)

    def half(self, net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context) -> Tensor:
        return super().loss(net, batch, own, down, ctx) / 2


@dataclass(frozen=True)
class OtherEachRound(FedAvg):
    """A loss that is another function in each round."""

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        factor = float(ctx.round)

        def scaled(net: Net, batch: Batch, own: Tree, down: Tree, ctx: Context) -> Tensor:
            return factor * self.loss(net, batch, own, down, ctx)

        return (Phase(loss=scaled),)


@pytest.mark.parametrize(
    ("method", "replays"), [(ByRound(), False), (TwoLosses(), True), (OtherEachRound(), False)]
)
def test_a_loss_that_differs_is_not_repeated(
    method: FedAvg, monkeypatch: pytest.MonkeyPatch, *, replays: bool
) -> None:
    train = {"local_epochs": 4, "optimizer": "adam"}  # whose phases have tensors of one form
    without, recorded, steps = both(world(method, train=train), monkeypatch)
    assert_same(without, recorded)
    assert (steps > 0) == replays


LATER = 1000


class Counting(nn.Module):
    """A model that does another thing in its first calls than later."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.last(self.body(x) * (1.0 if self.calls < LATER else 2.0))
        return out


def test_a_model_that_counts_its_calls_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    small_world = world(given={"groups": {"mine": ClientGroup(Counting)}})
    every = Recordings()
    monkeypatch.setattr(client_host, "Recordings", lambda: every)
    trace(small_world, STACK)
    assert replayed(every) == 0


def test_a_program_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(function: Program, inputs: Sequence[Tensor]) -> tuple[Program, Sequence[Tensor]]:
        program, results = record(function, inputs)
        return lambda *tensors: [result + 1 for result in program(*tensors)], results

    monkeypatch.setattr(recorded_step, "record", wrong)
    without, recorded, steps = both(world(train={"local_epochs": 4}), monkeypatch)
    assert_same(without, recorded)
    assert steps == 0


def test_programs_of_many_forms_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_step, "MOST_FORMS", 2)
    every = Recordings()
    monkeypatch.setattr(client_host, "Recordings", lambda: every)
    trace(world(train={"local_epochs": 4}), Plan(5))
    described = [forms for known in every.forms.values() for _, forms in known]
    assert max(len(forms) for forms in described) == 2 < MOST_FORMS
    for number in range(100):
        every.of(("about",), {f"name {number}": torch.zeros(1)})
    assert len(every.forms["about",]) == recorded_step.MOST_SPECS
