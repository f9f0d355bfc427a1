"""FD against rounds written with plain modules and loops over rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgist.core.method import ClientInfo, Order
from fedgist.engines.plans.plan import Plan
from fedgist.methods.fd import FD
from fedgist.testing.small_worlds import CLASSES, SIZES, federation, trace, world
from fedgist.world.world import World

ONE_STEP = {"local_epochs": 1, "batch_size": max(SIZES), "lr": 0.2}


def plain_rounds(
    small_world: World, rounds: int, gamma: float, *, left_out: bool, declared: bool = True
) -> list[Tensor]:
    """FD with full-batch gradient steps; return the clients' first weights."""
    start = small_world.server.task.starts["mlp"].params
    x, y = (small_world.data.x - 0.5) / 2.0, small_world.data.y
    clients = []
    for client in range(len(SIZES)):
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        for p, value in zip(net.parameters(), start.values(), strict=True):
            p.data.copy_(value)
        rows = small_world.population.train[client]
        clients.append((net, x[rows], y[rows]))
    sent: list[dict[int, Tensor]] = [{} for _ in clients]
    for _ in range(rounds):
        told = list(sent)
        for number, (net, rows, labels) in enumerate(clients):
            out = net(rows)
            loss = F.cross_entropy(out, labels)
            for logits, k in zip(out, labels.tolist(), strict=True):
                others = [
                    means[k]
                    for i, means in enumerate(told)
                    if k in means and not (left_out and i == number)
                ]
                if others:
                    loss = loss + gamma * F.mse_loss(logits, torch.stack(others).mean(0)) / len(out)
            grads = torch.autograd.grad(loss, [*net.parameters()])
            with torch.no_grad():
                for p, g in zip(net.parameters(), grads, strict=True):
                    p.sub_(0.2 * g)
                out = net(rows)
            empty = {} if declared else {k: torch.zeros(CLASSES) for k in range(CLASSES)}
            sent[number] = empty | {k: out[labels == k].mean(0) for k in set(labels.tolist())}
    return [next(net.parameters()).detach() for net, *_ in clients]


@pytest.mark.parametrize("left_out", [True, False])
@pytest.mark.parametrize("declared", [True, False])
def test_rounds_are_those_of_plain_modules(*, left_out: bool, declared: bool) -> None:
    # rejects means over rows of all clients, teachers that are the sum, and one's own logits
    options = {"gamma": 2.0, "leave_own_out": left_out, "declare_classes": declared}
    small_world = world("fd", options=options, train=ONE_STEP)
    state = trace(small_world, Plan(2), rounds=3).state
    asked = {"left_out": left_out, "declared": declared}
    expected = plain_rounds(small_world, 3, 2.0, **asked)
    assert torch.allclose(state["clients/mlp/net/1.weight"], torch.stack(expected), atol=1e-5)
    for changed in ({"left_out": not left_out}, {"declared": not declared}):
        other = plain_rounds(small_world, 3, 2.0, **asked | changed)
        assert not torch.allclose(torch.stack(other), torch.stack(expected), atol=1e-3)


def test_the_first_round_has_no_teacher() -> None:
    with_teacher, alone = (
        trace(world(name, options=options, train=ONE_STEP), Plan(5), rounds=1).state
        for name, options in (("fd", {"gamma": 50.0}), ("local", {}))
    )
    for name in ("clients/mlp/net/1.weight", "clients/mlp/net/3.bias"):
        if name in alone:
            assert torch.equal(with_teacher[name], alone[name])


def test_a_class_that_is_not_there_costs_a_bit_or_its_zeros() -> None:
    labels = np.split(world().data.y.numpy(), np.cumsum(SIZES)[:-1])
    there = sum(len(set(own.tolist())) for own in labels)
    one_row, flags = 4 * CLASSES, 1
    for declared, size in ((True, there * one_row + 5 * flags), (False, 5 * CLASSES * one_row)):
        fed = federation(world("fd", options={"declare_classes": declared}))
        assert fed.advance()[0]["comm/up_bytes"] == size
        fed.engine.close()


def test_who_is_away_is_heard_by_what_it_sent_last() -> None:
    fed = federation(world("fd", options={"leave_own_out": False}))
    fed.advance()
    before = fed.server.newest.arrays["mean"].clone()
    online = {2: [0, 2], 3: [2]}
    for number, ids in online.items():
        some = [ClientInfo(c, ("mlp",)) for c in ids]
        object.__setattr__(fed.side, "online", lambda _, some=some: some)
        fed.advance()
        assert fed.round == number
    fed.engine.close()
    after = fed.server.newest
    assert after.round.tolist() == [2, 1, 3, 1, 1]
    assert torch.equal(after.arrays["mean"][[1, 3, 4]], before[[1, 3, 4]])
    assert not torch.equal(after.arrays["mean"][[0, 2]], before[[0, 2]])
    assert torch.allclose(fed.server.total, after.arrays["mean"].sum(0))


def test_a_client_alone_has_no_teacher_but_itself() -> None:
    ctx_world = world("fd")
    fed = federation(ctx_world)
    object.__setattr__(fed.side, "online", lambda _: [ClientInfo(2, ("mlp",))])
    fed.advance()
    down = fed.method.download(fed.server, Order(2, "mlp"), fed.context("train", 2))
    fed.engine.close()
    assert not down.there.any()
    assert not down.mean.any()
    everyone = FD(leave_own_out=False)
    down = everyone.download(fed.server, Order(2, "mlp"), fed.context("train", 2))
    assert down.there.any()
