"""A second model inside a loss leaves the client's net alone: MOON and Ditto on nets with norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgist.core import random
from fedgist.core.method import Batch, Context, Exchange, Method, Net, Nothing, Part, Phase
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import split_head
from fedgist.core.tree import Tree, tree
from fedgist.methods.common.averaging import Averaging
from fedgist.methods.fedavg import FedAvg
from fedgist.testing import LawError, check_laws, check_reduces_to
from fedgist.testing.small_nets import normed


@tree
class Earlier:
    """A client's net after its last round."""

    arrays: dict[str, Tensor]


def trained_mode(net: Net, arrays: Mapping[str, Tensor]) -> Net:
    return net.with_arrays(arrays)


def as_it_predicts(net: Net, arrays: Mapping[str, Tensor]) -> Net:
    return net.with_arrays(arrays).in_evaluation()


def in_the_clients_pass(net: Net, arrays: Mapping[str, Tensor]) -> Net:
    """Return another model whose statistics go into the client's net: what must be refused."""
    other = net.with_arrays(arrays)
    return replace(other, run=net.run)


Other = Callable[[Net, Mapping[str, Tensor]], Net]


@dataclass(frozen=True)
class Moon(Method):
    """MOON (Li, He, Song 2021, eq. 3): pull features to the global model's, away from the last."""

    mu: float = 1.0
    temperature: float = 0.5
    other: Other = as_it_predicts

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def init_client(self, net: Net, ctx: Context) -> Earlier:
        return Earlier(net.state())

    def loss(self, net: Net, batch: Batch, own: Earlier, down: Any, ctx: Context) -> Tensor:
        shared, last = (self.other(net, a).features(batch.x) for a in (down.arrays, own.arrays))
        z = net.features(batch.x)
        near, far = (F.cosine_similarity(z, w.detach(), dim=1) for w in (shared, last))
        each = F.softplus((far - near) / self.temperature)
        term = torch.where(batch.mask, each, 0.0).sum() / batch.mask.sum().clamp(min=1)
        return ctx.task.objective.loss(net.logits(z), batch) + self.mu * term

    def upload(self, net: Net, own: Earlier, sums: Any, down: Any, ctx: Context) -> Any:
        message, _ = super().upload(net, own, sums, down, ctx)
        return message, Earlier(net.state())


@tree
class Personal:
    """A client's second model: its parameters."""

    v: dict[str, Tensor]


@dataclass(frozen=True)
class Ditto(Method):
    """Ditto (Li et al. 2021, algorithm 1): FedAvg, and a personal model near the shared one."""

    lam: float = 0.1
    joint: bool = False  # both models in one phase
    other: Other = trained_mode

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def init_client(self, net: Net, ctx: Context) -> Personal:
        return Personal(dict(net.params))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        if self.joint:
            return (Phase(("all", "own.v"), loss=self.both),)
        return Phase(("all",)), Phase(("own.v",), loss=self.personal)

    def personal(self, net: Net, batch: Batch, own: Personal, down: Any, ctx: Context) -> Tensor:
        far = sum((v - down.arrays[name]).square().sum() for name, v in own.v.items())
        own_loss = ctx.task.objective.loss(self.other(net, own.v)(batch.x), batch)
        total: Tensor = own_loss + self.lam / 2 * far
        return total

    def both(self, net: Net, batch: Batch, own: Personal, down: Any, ctx: Context) -> Tensor:
        personal = self.personal(net, batch, own, down, ctx)
        return personal + ctx.task.objective.loss(net(batch.x), batch)

    def predict(self, net: Net, own: Personal, down: Any, x: Tensor, ctx: Context) -> Tensor:
        return net.with_arrays(own.v)(x)


WAYS: tuple[Other, ...] = (trained_mode, as_it_predicts)


@pytest.mark.parametrize("other", WAYS)
def test_moon_without_its_term_is_fedavg_bit_for_bit(other: Other) -> None:
    check_reduces_to(Moon(mu=0.0, other=other), FedAvg())


@pytest.mark.parametrize("joint", [False, True])
def test_dittos_shared_model_is_fedavgs_bit_for_bit(*, joint: bool) -> None:
    # for any lambda: the shared model learns nothing of the personal one
    for lam in (0.0, 0.3):
        check_reduces_to(Ditto(lam, joint=joint), FedAvg())


def test_statistics_of_a_second_model_in_the_clients_net_are_found() -> None:
    says = r"Moon does not reduce to FedAvg: .* of client 0 differs by 0.*; its largest number is"
    with pytest.raises(LawError, match=says):
        check_reduces_to(Moon(mu=0.0, other=in_the_clients_pass), FedAvg())
    with pytest.raises(LawError, match="Moon does not reduce to FedAvg"):
        check_reduces_to(Moon(mu=0.5), FedAvg())


@pytest.mark.parametrize("method", [Moon(), Ditto(), Ditto(joint=True)])
def test_methods_with_a_second_model_keep_the_laws_on_nets_with_norms(method: Method) -> None:
    check_laws(method, only=("13", "14", "15"))


ARCH = split_head(lambda: normed((6,), 3), (6,), 3)
X = random.normal(random.key(1), (8, 6))


def in_training(seed: int = 0) -> Net:
    run = Pass(torch.ones(8, dtype=torch.bool), random.key(seed))
    return replace(ARCH.start(0), run=run)


@pytest.mark.parametrize("changes", ["body", "buffers", "all"])
@pytest.mark.parametrize("first", [True, False])
def test_a_net_with_other_arrays_changes_no_bit_of_the_clients_pass(
    changes: str, *, first: bool
) -> None:
    """A second net before or after the client's own: the same outputs, statistics and draws."""
    alone, theirs = in_training(), ARCH.start(1)
    arrays = {"body": theirs.body, "buffers": {n: b + 1 for n, b in theirs.buffers.items()}}
    arrays["all"] = theirs.state()
    expected = alone(X), alone(X)
    net = in_training()
    other = net.with_arrays(arrays[changes])
    before = [other(X)] if first else []
    seen = net(X), net(X)
    after = [] if first else [other(X)]
    assert torch.equal(expected[0], seen[0])
    assert torch.equal(expected[1], seen[1])
    assert alone.run is not None
    assert net.run is not None
    assert alone.run.updates.keys() == net.run.updates.keys() != set()
    assert all(torch.equal(v, net.run.updates[n]) for n, v in alone.run.updates.items())
    # it is in training, with draws of its own: not the client's, nor a second net's
    twins = [net.with_arrays(arrays[changes])(X) for _ in range(2)]
    assert not torch.equal(twins[0], twins[1])
    assert not torch.equal(twins[0], (before + after)[0])


def test_another_head_on_the_same_body_is_still_the_clients_net() -> None:
    net, theirs = in_training(), ARCH.start(1)
    weight, bias = theirs.head
    assert bias is not None
    net.with_head(weight, bias)(X)
    same = net.with_arrays(net.state())
    assert net.run is not None
    assert set(net.run.updates) == {"2.running_mean", "2.running_var"}
    assert same.run is net.run


def test_in_evaluation_a_net_is_what_it_is_after_training() -> None:
    net, theirs = in_training(), ARCH.start(1)
    assert torch.equal(net.with_arrays(theirs.state()).in_evaluation()(X), theirs(X))
    assert net.run is not None
    assert not net.run.updates
    assert not net.run.draws


def test_a_user_module_is_told_whether_a_net_aside_trains() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x) * (2.0 if self.training else 1.0))
            return out

    start = split_head(Asks, (6,), 3).start(0)
    net = replace(start, run=Pass(torch.ones(8, dtype=torch.bool), random.key(0)))
    other = {n: p + 1 for n, p in start.body.items()}
    trained = net.with_arrays(other).features(X)
    assert torch.equal(trained, 2 * net.with_arrays(other).in_evaluation().features(X))


# a method's server that keeps what it knows outside its state
BOARD: dict[Any, Any] = {}


@dataclass(frozen=True)
class Cached(FedAvg):
    """FedAvg whose server adds a part of the last round's average, kept in its module."""

    by_round: bool = True

    def server_update(self, server: Any, replies: Any, ctx: Context) -> Any:
        new = super().server_update(server, replies, ctx)
        last = BOARD.get(ctx.round - 1 if self.by_round else 0)
        BOARD[ctx.round if self.by_round else 0] = new
        if ctx.round <= 1 or last is None:
            return new
        for weights, old in zip(new.weights.values(), last.weights.values(), strict=True):
            for name in weights.arrays:
                weights.arrays[name] = 0.9 * weights.arrays[name] + 0.1 * old.arrays[name]
        return new


@pytest.mark.parametrize("by_round", [True, False])
def test_what_a_server_keeps_in_its_module_is_found(*, by_round: bool) -> None:
    BOARD.clear()
    with pytest.raises(LawError, match=r"Cached breaks law 15 .* a run beside it changes"):
        check_laws(Cached(by_round=by_round), only=("15",))


def test_a_resumed_run_and_a_second_run_do_not_find_a_cache_by_round() -> None:
    """Why law 15 is needed: within one process, a cache by round is full of the right numbers."""
    BOARD.clear()
    check_laws(Cached(), only=("7", "9"))


@dataclass(frozen=True)
class Divides(Method):
    """FedAvg with a mistake: what its weighted sum is divided by."""

    by: str = "clients"
    sends: str = "weights"

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def server_update(self, server: Any, replies: Any, ctx: Context) -> Any:
        weights = dict(server.weights)
        for name in replies.architectures:
            part = replies.by(name)
            total = part.total()
            count = {"clients": len(part), "rows": total.rows, "one": 1.0, "classes": 3.0}[self.by]
            arrays = {n: a / count for n, a in total.arrays.items()}
            weights[name] = replace(weights[name], arrays=arrays)
        return replace(server, weights=weights)


@pytest.mark.parametrize("by", ["clients", "one", "classes"])
def test_a_sum_that_is_divided_by_something_else_than_its_weights_is_found(by: str) -> None:
    says = r"Divides breaks law 14 .*clients return the weights that they received, .* sum of its"
    with pytest.raises(LawError, match=says):
        check_laws(Divides(by), only=("14",))


def test_a_right_average_has_fixed_points() -> None:
    check_laws(Divides("rows"), only=("14",))


@dataclass(frozen=True)
class MovesTwice(Method):
    """An average of differences whose server also shrinks what it has."""

    shrink: float = 0.0
    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def upload(self, net: Net, own: Nothing, sums: Any, down: Any, ctx: Context) -> Any:
        message, _ = super().upload(net, own, sums, down, ctx)
        arrays = {n: a - sums.rows * down.arrays[n] for n, a in message.arrays.items()}
        return replace(message, arrays=arrays), own

    def server_update(self, server: Any, replies: Any, ctx: Context) -> Tree:
        new = super().server_update(server, replies, ctx)
        weights = {}
        for name, moved in new.weights.items():
            old = server.weights[name].arrays
            steps = moved.arrays if name in replies.architectures else {}
            arrays = {n: (1 - self.shrink) * a + steps.get(n, 0.0) for n, a in old.items()}
            weights[name] = replace(moved, arrays=arrays)
        return replace(server, weights=weights)


def test_differences_of_nothing_must_not_move_the_server() -> None:
    check_laws(MovesTwice(), only=("14",))
    with pytest.raises(LawError, match="MovesTwice breaks law 14"):
        check_laws(MovesTwice(shrink=0.1), only=("14",))
