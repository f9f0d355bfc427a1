"""Steps as CUDA graphs, which are pretended: the same bits as step by step, and nothing stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fedgist.core import cuda_graphs, random
from fedgist.core.batch import Batch
from fedgist.core.cuda_graphs import Capturing
from fedgist.core.method import Method
from fedgist.engines.plans.plan import Plan
from fedgist.methods.common.codistillation import Distillation
from fedgist.methods.flesd import FLESD, SimilarityDistillation
from fedgist.methods.merged_codist import MergedCodist
from fedgist.methods.periodic_codist import PeriodicCodist
from fedgist.recipe.overrides import ClientGroup
from fedgist.testing.small_worlds import (
    ALONE,
    Trace,
    federation,
    law_world,
    state_of,
    trace,
    world,
)
from fedgist.training import captured_step, local_training
from fedgist.training.cohort import Clients, Cohort
from fedgist.training.timetable import Turn
from fedgist.world.world import World
from pretended_graphs import REFUSED, PretendedGraphs
from small_cohorts import asked

# epochs of 3, 3, 2, 1 and 1 steps: 6 steps of 5 clients, 6 of 3 and 6 of 2
EPOCHS, FORMS, STEPS = 6, 3, 18
TOGETHER = Plan(5)
WARNING = "no CUDA graph could be made"


class Normed(nn.Module):
    """Batch norm, dropout by key and a convolution, on six numbers as a 1x2x3 image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, (2, 2)), nn.BatchNorm2d(4)
        self.drop, self.mid, self.head = nn.Dropout(0.3), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.norm(self.conv(x.view(-1, 1, 2, 3)))).flatten(1)
        out: Tensor = self.head(torch.tanh(self.mid(self.drop(z))))
        return out


def normed(method: str = "fedavg", **train: Any) -> World:
    about = {"local_epochs": EPOCHS, **train}
    return world(method, train=about, given={"groups": {"mine": ClientGroup(Normed)}})


@contextmanager
def graphs(fails_at: int = 0) -> Iterator[PretendedGraphs]:
    pretended = PretendedGraphs(fails_at)
    with patch.object(cuda_graphs, "capturing_on", pretended.capturing_on):
        yield pretended


def same(a: Trace, b: Trace) -> bool:
    alike = all(torch.equal(a.state[name], b.state[name]) for name in a.state)
    return alike and a.rounds == b.rounds and a.clients == b.clients


OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "momentum kept for the run": {"optimizer": "momentum", "optimizer_memory": "run"},
    "adam": {"optimizer": "adam"},
    "adamw clipped": {"optimizer": "adamw", "weight_decay": 0.3, "clip_norm": 0.3},
    "class weights": {"optimizer": "adam", "class_weights": "balanced"},
    "smoothing": {"optimizer": "sgd", "label_smoothing": 0.2, "clip_norm": 0.1},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_replayed_steps_give_the_bits_of_steps_one_by_one(option: str) -> None:
    # rejects: steps before a capture that are not undone (in parameters, moments, counts, or
    # running statistics), the batch, keys or losses of another step, and a graph of other clients
    plain = trace(normed(**OPTIONS[option]), TOGETHER, rounds=2)
    with graphs() as done:
        replayed = trace(normed(**OPTIONS[option]), TOGETHER, rounds=2)
    assert (done.captures, done.replays) == (2 * FORMS, 2 * (STEPS - FORMS))
    assert done.aside == done.captures
    assert same(plain, replayed)


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_optimizers_that_begin_anew_each_epoch_are_reset_between_replays(optimizer: str) -> None:
    # also rejects a graph of Adam's other rule: in every sixth step all five counts are equal
    train: dict[str, Any] = {"optimizer": optimizer, "optimizer_memory": "epoch"}
    train["local_epochs"] = 24
    plain = trace(normed(**train), TOGETHER, rounds=1)
    with graphs() as done:
        replayed = trace(normed(**train), TOGETHER, rounds=1)
    assert (done.captures, done.replays) == (5, 67)  # the first step of each form is taken aside
    assert same(plain, replayed)


@pytest.mark.parametrize("method", ["fedlog", "fedprox", "fedrep", "feddbe", "lg_fedavg"])
def test_downloads_own_states_and_parts_of_a_net_are_those_of_the_round(method: str) -> None:
    def small() -> World:
        return world(method, train={"local_epochs": EPOCHS, "optimizer": "adam"})

    plain = trace(small(), TOGETHER, rounds=2)
    with graphs() as done:
        replayed = trace(small(), TOGETHER, rounds=2)
    assert done.replays
    assert same(plain, replayed)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_capture_that_fails_changes_nothing_and_is_reported(
    fails_at: int, optimizer: str
) -> None:
    plain = trace(normed(optimizer=optimizer), TOGETHER, rounds=1)
    with graphs(fails_at) as done, pytest.warns(UserWarning, match=WARNING) as heard:
        replayed = trace(normed(optimizer=optimizer), TOGETHER, rounds=1)
    assert same(plain, replayed)
    assert done.captures == fails_at  # no further attempt in this phase
    assert done.replays == 5 * (fails_at - 1)
    assert [str(w.message).endswith(f": {REFUSED}") for w in heard] == [True]


def test_a_step_that_reads_a_number_is_taken_without_a_graph() -> None:
    # with counts that the trainer does not know, a CPU reads them
    train = {"optimizer": "adam", "optimizer_memory": "run"}
    plain = trace(normed(**train), TOGETHER, rounds=2)
    with graphs() as done, pytest.warns(UserWarning, match=WARNING):
        replayed = trace(normed(**train), TOGETHER, rounds=2)
    assert (done.captures, done.replays) == (2, 0)
    assert same(plain, replayed)


def test_a_resumed_run_with_graphs_gives_the_bits_of_a_whole_one() -> None:
    # rejects tensors of a graph that are still used in the next round
    train = {"optimizer": "adam", "class_weights": "balanced"}
    plain = trace(normed("local", **train), TOGETHER)
    with graphs():
        second = federation(normed("local", **train), TOGETHER)
        second.restore(plain.saved[0].copied())
        kept = second.checkpoint().copied().arrays()
        first = {name: array.clone() for name, array in kept.items()}
        for _ in range(2):
            second.advance()
    assert all(torch.equal(kept[name], first[name]) for name in first)
    state = state_of(second)
    assert all(torch.equal(plain.state[name], state[name]) for name in plain.state)


def trained(cohort: Cohort, clients: Clients, small: World) -> Clients:
    return local_training.train(cohort, clients, small.server.method.phases(cohort.ctx))[0]


def test_graphs_end_with_their_phase() -> None:
    small = normed(optimizer="adam")
    cohort, clients = asked(small, TOGETHER)
    with graphs() as done:
        gc.disable()  # no cycle keeps them until a collection
        try:
            after = trained(cohort, clients, small)
            assert done.captures == FORMS
            assert len(done.alive) == 0
        finally:
            gc.enable()
        values = {name: p.clone() for name, p in after.net.params.items()}
        trained(cohort, clients, small)
    assert all(torch.equal(after.net.params[name], p) for name, p in values.items())


def test_the_clients_that_train_are_not_changed() -> None:
    small = normed(optimizer="adam")
    cohort, clients = asked(small, TOGETHER)
    before = {name: a.clone() for name, a in clients.net.state().items()}
    with graphs():
        trained(cohort, clients, small)
    assert all(torch.equal(clients.net.state()[name], a) for name, a in before.items())


@pytest.mark.parametrize(
    ("plan", "epochs", "expected"),
    [
        (ALONE, EPOCHS, 0),  # torch's generator, and batches of any width
        (TOGETHER, 3, 0),  # 3 steps of each form
        (TOGETHER, 4, FORMS),
        (Plan(2), EPOCHS, 4),  # 18 steps of two; 6 of two and 6 of one; 6 of one
    ],
)
def test_stacks_are_captured_if_enough_steps_have_one_form(
    plan: Plan, epochs: int, expected: int
) -> None:
    with graphs() as done:
        trace(normed(local_epochs=epochs), plan, rounds=1)
    assert done.captures == expected


def test_private_steps_and_lazy_rows_are_not_captured() -> None:
    cohort, _ = asked(normed(), TOGETHER)
    turns = [Turn(5)] * cuda_graphs.LEAST
    step = Doubling(torch.ones(5))
    lazy = replace(cohort, examples=replace(cohort.examples, x=object()))  # type: ignore[arg-type]
    with graphs():
        assert captured_step.captured(step, cohort, turns) is not step
        assert captured_step.captured(step, lazy, turns) is step
        assert captured_step.captured(step, cohort, turns[1:]) is step
        with patch.object(Cohort, "private_steps", object()):
            assert captured_step.captured(step, cohort, turns) is step
    assert captured_step.captured(step, cohort, turns) is step  # on a CPU


DISTILLING: dict[str, Method] = {
    "flesd": FLESD(distillation=SimilarityDistillation(epochs=3, batch_size=32, queue=40)),
    "merged_codist": MergedCodist(distillation=Distillation(steps=6)),
    "periodic_codist": PeriodicCodist(period=1, distillation=Distillation(steps=6)),
}


@pytest.mark.parametrize("method", DISTILLING)
def test_replayed_steps_of_the_server_give_the_bits_of_steps_one_by_one(method: str) -> None:
    # rejects a step of another lesson, a capture that is not undone, and a state that a graph keeps
    def small() -> World:
        return law_world(DISTILLING[method])

    plain = trace(small(), TOGETHER, rounds=2)
    with graphs() as done:
        replayed = trace(small(), TOGETHER, rounds=2)
    assert done.captures < done.replays
    assert len(done.alive) == 0
    assert same(plain, replayed)


def test_a_step_of_the_server_that_cannot_be_captured_is_taken_without_a_graph() -> None:
    def small() -> World:
        return law_world(DISTILLING["flesd"])

    plain = trace(small(), TOGETHER, rounds=1)
    with graphs(fails_at=1) as done, pytest.warns(UserWarning, match=WARNING):
        replayed = trace(small(), TOGETHER, rounds=1)
    assert done.replays == 0
    assert same(plain, replayed)


class Doubling:
    """A step that doubles numbers and returns the sum of its inputs."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __call__(self, batch: Batch, keys: Tensor, turn: Turn) -> Tensor:
        self.numbers[: turn.count].mul_(2.0)
        return batch.x.sum(1) + keys

    def changed(self, count: int) -> list[Tensor]:
        return [self.numbers[:count]]


def test_inputs_may_be_overwritten_and_losses_kept() -> None:
    # rejects losses that the next replay overwrites, and graphs that read the caller's tensors
    cohort, _ = asked(normed(), TOGETHER)
    step = Doubling(torch.ones(5))
    with graphs() as done:
        take = captured_step.captured(step, cohort, [Turn(3)] * 4)
        x, keys = random.uniform(random.key(0), (4, 3, 2)), torch.arange(12).view(4, 3)
        losses = []
        for s in range(4):
            batch = Batch(x[s].clone(), torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool))
            losses.append(take(batch, keys[s], Turn(3)))
            batch.x.zero_()
    assert (done.captures, done.replays) == (1, 3)
    assert torch.equal(torch.stack(losses), x.sum(2) + keys)
    assert step.numbers.tolist() == [16.0, 16.0, 16.0, 1.0, 1.0]


class Streams:
    """Stand-ins for torch's streams and graphs, which write down what is done with them."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.events, self.now = fails, list[str](), "main"

    def stream(self, name: str) -> Any:
        def wait(other: Any) -> None:
            self.events.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait)

    @contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def graph(self, graph: Any, pool: object = None, stream: Any = None) -> Iterator[None]:
        """Like torch's, which leaves its stream current if the end of a capture fails."""
        self.events.append(f"capture on {stream.name} in {pool}")
        self.now = stream.name
        try:
            yield
        finally:
            if self.fails:
                raise RuntimeError("capture invalidated")
        self.now = "main"

    @contextmanager
    def in_place_of_torchs(self) -> Iterator[Capturing]:
        stand_ins = {
            "current_stream": lambda _: self.stream("main"),
            "stream": self.within,
            "graph": self.graph,
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.events.append("replay")),
        }
        cuda_graphs._side_stream.cache_clear()
        with ExitStack() as stack:
            stack.enter_context(
                patch.object(cuda_graphs, "_new_stream", lambda _: self.stream("side"))
            )
            for name, stand_in in stand_ins.items():
                stack.enter_context(patch.object(torch.cuda, name, stand_in))
            capturing = cuda_graphs.capturing_on(torch.device("cuda"))
            assert capturing is not None
            yield capturing
        cuda_graphs._side_stream.cache_clear()


def test_warm_ups_and_captures_use_one_side_stream_in_order_with_the_main_one() -> None:
    streams, losses = Streams(), torch.ones(2)

    def work() -> Tensor:
        streams.events.append(f"work on {streams.now}")
        return losses

    with streams.in_place_of_torchs() as capturing:
        capturing.aside(work)
        capturing.record(work)()
    assert streams.now == "main"
    assert streams.events == [
        "side waits for main",
        "work on side",
        "main waits for side",
        "capture on side in pool",
        "work on side",
        "replay",
    ]


def test_after_a_failure_the_main_stream_is_current_again_and_waits_for_the_side_stream() -> None:
    streams = Streams(fails=True)

    def work() -> Tensor:
        raise ValueError("a number was read")

    with streams.in_place_of_torchs() as capturing:
        with pytest.raises(ValueError, match="read"):
            capturing.aside(work)
        assert streams.events[-1] == "main waits for side"
        with pytest.raises(RuntimeError, match="invalidated") as caught:
            capturing.record(work)
    assert streams.now == "main"
    assert str(cuda_graphs._cause(caught.value)) == "a number was read"
