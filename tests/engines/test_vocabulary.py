"""What methods can rely on: phases, own parameters, optimizer memory, fine-tuning, stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.losses import cross_entropy
from fedgist.core.message import Nothing
from fedgist.core.method import Batch, Context, Count, Exchange, Method, Order, Phase, Replies
from fedgist.core.nets.net import Net
from fedgist.core.nets.parts import Part
from fedgist.core.tree import named, tree
from fedgist.engines.plans.plan import Plan
from fedgist.methods.common.averaging import Averaging
from fedgist.testing.small_worlds import SIZES, federation, trace, with_method, world


@dataclass(frozen=True)
class TwoPhases(Method):
    """FedRep's shape: the head learns, then the body; heads are kept, bodies are averaged."""

    keeps: ClassVar[Part] = "head"

    exchange: ClassVar[Exchange] = Averaging("body")

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        return Phase(("head",), epochs=3), Phase(("body",), steps=2)


@tree
class Bias:
    """A trainable bias on the features that stays with the client."""

    bias: Tensor


@dataclass(frozen=True)
class OwnBias(Method):
    """FedDBE's shape: a client's own parameters learn beside the net, with one Adam for the run."""

    def init_client(self, net: Net, ctx: Context) -> Bias:
        return Bias(torch.zeros(net.arch.feature_width))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        return (Phase(("head", "own.bias"), epochs=1, remembers="run"),)

    def loss(self, net: Net, batch: Batch, own: Bias, down: Any, ctx: Context) -> Tensor:
        return cross_entropy(net.logits(net.features(batch.x) + own.bias), batch.y, batch.mask)

    def predict(self, net: Net, own: Bias, down: Any, x: Tensor, ctx: Context) -> Tensor:
        return net.logits(net.features(x) + own.bias)


@dataclass(frozen=True)
class FineTuned(TwoPhases):
    """FedBABU's shape: a copy is fine-tuned before a second test."""

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        return (Phase(("all",), epochs=5),)


@dataclass(frozen=True)
class Stages(Method):
    """CS-FL's shape: two stages a round, and a third in which the server works alone."""

    def stages(self, ctx: Context) -> tuple[str, ...]:
        return ("first", "second", "server") if ctx.round else ()

    def init_server(self, ctx: Context) -> Count:
        return Count(torch.zeros(()))

    def select(self, server: Count, online: Any, ctx: Context) -> list[Order]:
        return [] if ctx.stage == "server" else super().select(server, online, ctx)

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        return (Phase(),) if ctx.stage == "first" else ()

    def upload(self, net: Net, own: Any, sums: Count, down: Any, ctx: Context) -> tuple[Any, Any]:
        return (sums, own) if ctx.stage == "second" else (Nothing(), own)

    def server_update(self, server: Count, replies: Replies, ctx: Context) -> Count:
        if ctx.stage == "second":
            return Count(replies.total().rows)
        return Count(server.rows * 10) if ctx.stage == "server" else server


def test_each_phase_moves_its_part_alone() -> None:
    small_world = with_method(world("local"), TwoPhases())
    before = small_world.server.task.starts["mlp"].params
    result = trace(small_world, Plan(3), rounds=1).state
    assert set(result) == {
        "server/weights/mlp/arrays/1.weight",
        "server/weights/mlp/arrays/1.bias",
        "clients/mlp/net/4.weight",
        "clients/mlp/net/4.bias",
        "clients/mlp/present",
    }
    heads = result["clients/mlp/net/4.weight"]
    assert len(torch.unique(heads, dim=0)) == len(SIZES)
    assert not torch.equal(result["server/weights/mlp/arrays/1.weight"], before["1.weight"])


def test_a_clients_own_parameters_learn_like_torchs_and_its_adam_lives_on() -> None:
    small_world = with_method(
        world("local", train={"optimizer": "adam", "lr": 0.05, "batch_size": max(SIZES)}), OwnBias()
    )
    state = trace(small_world, Plan(5), rounds=3).state
    net, x = small_world.server.task.starts["mlp"], (small_world.data.x - 0.5) / 2
    for client in range(len(SIZES)):
        rows = small_world.population.train[client]
        w, b, bias = (
            t.clone().requires_grad_()
            for t in (net.params["4.weight"], net.params["4.bias"], torch.zeros(5))
        )
        adam = torch.optim.Adam([w, b, bias], lr=0.05)
        z = torch.relu(x[rows] @ net.params["1.weight"].T + net.params["1.bias"])
        for _ in range(3):  # one optimizer through three rounds: rejects a fresh one each round
            adam.zero_grad()
            torch.autograd.backward(F.cross_entropy((z + bias) @ w.T + b, small_world.data.y[rows]))
            adam.step()
        assert torch.allclose(state["clients/mlp/own/bias"][client], bias.detach(), atol=1e-4)
        assert torch.allclose(state["clients/mlp/net/4.weight"][client], w.detach(), atol=1e-4)
    assert state["clients/mlp/memory/train-0/count"].tolist() == [3] * len(SIZES)


@pytest.mark.slow
def test_fine_tuning_before_a_test_is_on_a_copy_and_helps_each_client_in_any_stack() -> None:
    plain = trace(with_method(world("local"), TwoPhases()), Plan(2))
    # sorted by test rows, clients come in another order than sorted by training rows
    uneven = {"clients_test": [torch.arange(n) for n in (3, 30, 10, 25, 7)]}
    for size in (1, 2, 5):
        tuned = trace(with_method(world("local"), FineTuned()), Plan(size))
        assert all(torch.allclose(plain.state[k], tuned.state[k], atol=1e-5) for k in plain.state)
        other = trace(with_method(world("local", given=uneven), FineTuned()), Plan(size))
        alone = trace(with_method(world("local", given=uneven), FineTuned()), Plan(1, stack=False))
        key = "eval/client/finetuned_accuracy_mean"
        assert other.rounds[-1][key] == pytest.approx(alone.rounds[-1][key], abs=1e-6)
        assert "eval/client/accuracy_mean" in tuned.rounds[-1]


def test_stages_have_messages_of_their_own_and_the_server_may_work_alone() -> None:
    fed = federation(with_method(world("local"), Stages()))
    line, _ = fed.advance()
    assert named(fed.server)["rows"] == 10 * sum(SIZES)
    assert line["comm/up_bytes"] == 4 * len(SIZES)


def test_optimizers_that_live_for_an_epoch_are_new_in_each() -> None:
    @dataclass(frozen=True)
    class Epochs(Method):
        def phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(epochs=3, remembers="epoch"),)

    @dataclass(frozen=True)
    class Rounds(Method):
        def phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(epochs=3, remembers="round"),)

    def learned_weights(method: Method, rounds: int) -> Tensor:
        small_world = with_method(
            world("local", train={"optimizer": "momentum", "batch_size": max(SIZES)}), method
        )
        return trace(small_world, Plan(5), rounds=rounds).state["clients/mlp/net/1.weight"]

    @dataclass(frozen=True)
    class One(Method):
        def phases(self, ctx: Context) -> tuple[Phase, ...]:
            return (Phase(epochs=1, remembers="round"),)

    # with one batch an epoch, three epochs of fresh optimizers are three rounds of one epoch
    assert torch.allclose(learned_weights(Epochs(), 1), learned_weights(One(), 3), atol=1e-6)
    assert not torch.allclose(learned_weights(Rounds(), 1), learned_weights(One(), 3), atol=1e-4)


def test_a_recipe_says_when_optimizers_start_anew() -> None:
    def learned_weights(memory: str, rounds: int, epochs: int) -> Tensor:
        train = {"optimizer": "momentum", "batch_size": max(SIZES), "local_epochs": epochs}
        small_world = world("local", train=train | {"optimizer_memory": memory})
        return trace(small_world, Plan(5), rounds=rounds).state["clients/mlp/net/1.weight"]

    # with one batch an epoch, an optimizer that lives for the run sees no difference
    one_round = learned_weights("round", 1, 3)
    assert torch.allclose(learned_weights("run", 3, 1), one_round, atol=1e-6)
    assert not torch.allclose(learned_weights("round", 3, 1), one_round, atol=1e-4)
    assert not torch.allclose(learned_weights("epoch", 1, 3), one_round, atol=1e-4)
