"""FedAvg's own functions: two clients in closed form."""

from __future__ import annotations

import torch

from fedgist.core import random
from fedgist.core.message import Nothing, payload_bytes
from fedgist.core.method import Context, Count, Order, Replies, Task, Training
from fedgist.core.nets.net import Architecture, Net, split_head
from fedgist.core.objectives.classes import Classes
from fedgist.core.replies import Subtotal, gather
from fedgist.core.tree import map_leaves
from fedgist.methods.common.averaging import Weighted
from fedgist.methods.fedavg import FedAvg
from fedgist.models import MODELS

A = split_head(lambda: MODELS["mlp"]((4,), 3, hidden=[5]), (4,), 3, name="a")
B = split_head(lambda: MODELS["logistic"]((4,), 3), (4,), 3, name="b")
ORDERS = {name: Order(0, name) for name in "ab"}


TRAINING = Training(num_rounds=1, batch_size=8)


def replies(total: Weighted, clients: int) -> Replies:
    return gather([Subtotal("a", tuple(range(clients)), 1, "train", total)], ())


def context(*archs: Architecture) -> Context:
    starts = {a.name: a.start(0) for a in archs}
    task = Task((4,), 3, 2, {a.name: a for a in archs}, starts, TRAINING, Classes(3))
    return Context(random.key(0), task, 1, "train")


def filled(net: Net, value: float) -> Net:
    return map_leaves(lambda leaf: torch.full_like(leaf, value), net)


def test_two_clients_weigh_by_their_rows() -> None:
    # rejects (w1 + w2) / 2: with rows 3 and 1 the mean of 1 and 5 is 2, not 3
    method, ctx = FedAvg(), context(A)
    server = method.init_server(ctx)
    down = method.download(server, ORDERS["a"], ctx)
    total: Weighted | None = None
    for value, rows in ((1.0, 3.0), (5.0, 1.0)):
        up, _ = method.upload(
            filled(A.start(0), value), Nothing(), Count(torch.tensor(rows)), down, ctx
        )
        total = up if total is None else map_leaves(torch.add, total, up)
    assert total is not None
    new = method.server_update(server, replies(total, 2), ctx)
    net, _ = method.receive(A.start(5), Nothing(), method.download(new, ORDERS["a"], ctx), ctx)
    assert all(torch.equal(p, torch.full_like(p, 2.0)) for p in net.params.values())


def test_one_client_gets_its_own_weights_back() -> None:
    method, ctx = FedAvg(), context(A)
    server, trained = method.init_server(ctx), A.start(9)
    up, _ = method.upload(trained, Nothing(), Count(torch.tensor(7.0)), server.weights["a"], ctx)
    new = method.server_update(server, replies(up, 1), ctx)
    torch.testing.assert_close(new.weights["a"].arrays, trained.params)


def test_everybody_starts_from_the_common_start_of_its_architecture() -> None:
    method, ctx = FedAvg(), context(A, B)
    server = method.init_server(ctx)
    for arch in (A, B):
        net, _ = method.receive(
            arch.start(8), Nothing(), method.download(server, ORDERS[arch.name], ctx), ctx
        )
        assert all(torch.equal(p, arch.start(0).params[n]) for n, p in net.params.items())


def test_a_client_sends_its_weights_and_one_count() -> None:
    method, ctx = FedAvg(), context(A)
    up, _ = method.upload(
        A.start(0), Nothing(), Count(torch.tensor(2.0)), method.init_server(ctx).weights["a"], ctx
    )
    assert payload_bytes(up) == 4 * (4 * 5 + 5 + 5 * 3 + 3 + 1)
