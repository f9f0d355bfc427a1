"""Weighted averages of weights against numpy's, one architecture at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedgist.core.method import Context, Count, Order, Replies, Reply, Task, Training
from fedgist.core.nets.net import Net, split_head
from fedgist.core.nets.parts import Part
from fedgist.core.objectives.classes import Classes
from fedgist.core.random import key
from fedgist.core.replies import Subtotal, gather
from fedgist.methods.common.averaging import Averages, Averaging, Weighted, Weights

ROWS = (7.0, 1.0, 30.0, 4.0)


def net(seed: int, hidden: int = 3) -> Net:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))

    return split_head(build, (2,), 2).start(seed)


def reply(client: int, architecture: str, value: Weighted) -> Reply:
    return Reply(Order(client, architecture), 1, "train", value)


OPEN: Any = SimpleNamespace(privacy=None)  # all of a task that is looked at
NO_CONTEXT = Context(key(0), OPEN, 1, "train")


def weighted(net: Net, count: Count, part: Part = "all") -> Weighted:
    message = Averaging(part).upload(net, None, count, Weights({}), NO_CONTEXT)[0]
    assert isinstance(message, Weighted)
    return message


def averaged(server: Averages, replies: Replies) -> Averages:
    return Averaging().server_update(server, replies, NO_CONTEXT)


def numpy_mean(
    nets: list[Net], rows: list[float], name: str
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    values = np.stack([n.state()[name].double().numpy() for n in nets])
    return np.asarray(np.average(values, axis=0, weights=rows))


def test_the_average_is_numpys_weighted_mean_within_each_architecture() -> None:
    # rejects a plain mean, and one over all clients, whatever their architecture
    nets = [net(0), net(1, 5), net(2), net(3, 5)]
    kinds = ["small", "large", "small", "large"]
    replies = Replies(
        each=tuple(
            reply(i, k, weighted(n, Count(torch.tensor(r))))
            for i, (k, n, r) in enumerate(zip(kinds, nets, ROWS, strict=True))
        )
    )
    server = Averages({"small": Weights(net(9).state()), "large": Weights(net(9, 5).state())})
    new = averaged(server, replies)
    for offset, kind in enumerate(("small", "large")):
        arrays = new.weights[kind].arrays
        assert set(arrays) == set(nets[offset].state())
        for name, array in arrays.items():
            expected = numpy_mean(nets[offset::2], list(ROWS[offset::2]), name)
            np.testing.assert_allclose(array.numpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_totals_average_like_the_replies_they_are_made_of() -> None:
    a, b = (weighted(net(i), Count(torch.tensor(r))) for i, r in enumerate(ROWS[:2]))
    added = Weighted({n: a.arrays[n] + b.arrays[n] for n in a.arrays}, a.rows + b.rows)
    server = Averages({"one": Weights(net(9).state())})
    whole = averaged(server, gather([Subtotal("one", (0, 1), 1, "train", added)], ()))
    split_up = averaged(server, Replies(each=(reply(0, "one", a), reply(1, "one", b))))
    torch.testing.assert_close(whole.weights["one"].arrays, split_up.weights["one"].arrays)


def test_an_architecture_that_nobody_answered_for_keeps_its_weights() -> None:
    server = Averages({"heard": Weights(net(0).state()), "silent": Weights(net(1, 5).state())})
    value = weighted(net(2), Count(torch.tensor(3.0)))
    new = averaged(server, Replies(each=(reply(0, "heard", value),)))
    assert new.weights["silent"] is server.weights["silent"]
    for name, array in new.weights["heard"].arrays.items():
        torch.testing.assert_close(array, net(2).state()[name])


def test_only_the_part_asked_for_is_sent() -> None:
    def names(value: dict[str, Tensor]) -> set[str]:
        return set(value)

    start_net = net(0)
    head = weighted(start_net, Count(torch.tensor(2.0)), "head")
    assert names(head.arrays) == {"2.weight", "2.bias"}
    torch.testing.assert_close(head.arrays["2.weight"], 2 * start_net.params["2.weight"])
    training = Training(num_rounds=1, batch_size=8)
    ctx = Context(
        key(0),
        Task((2,), 2, 1, {"one": start_net.arch}, {"one": start_net}, training, Classes(2)),
        0,
        "",
    )
    assert names(Averaging("body").init_server(ctx).weights["one"].arrays) == set(
        start_net.state("body")
    )
    assert (
        Averaging().init_server(ctx).weights["one"].arrays["0.weight"]
        is start_net.params["0.weight"]
    )


class Counts(nn.Module):
    """A user's module with buffers that are no floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor(5))
        self.register_buffer("uses", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.where(self.get_buffer("uses"), x, 0.0))
        return out


def test_buffers_that_count_or_mask_keep_their_types_and_what_all_agree_on() -> None:
    start_net = split_head(Counts, (2,), 2).start(0)
    server = Averages({"one": Weights(start_net.state())})
    replies = tuple(
        reply(i, "one", weighted(start_net, Count(torch.tensor(r)))) for i, r in enumerate(ROWS)
    )
    arrays = averaged(server, Replies(each=replies)).weights["one"].arrays
    assert {n: a.dtype for n, a in arrays.items()} == {
        n: a.dtype for n, a in start_net.state().items()
    }
    assert (int(arrays["seen"]), arrays["uses"].tolist()) == (5, [True, False])
    assert start_net.with_arrays(arrays)(torch.ones(1, 2)).shape == (1, 2)


def test_buffers_that_clients_disagree_on_are_rounded() -> None:
    # rejects truncation, and a mask that is true as soon as anybody's is
    start_net = split_head(Counts, (2,), 2).start(0)
    client_nets = [
        start_net.with_arrays(
            {"seen": torch.tensor(3 + (i > 0)), "uses": torch.tensor([i > 0, i == 0])}
        )
        for i in range(4)
    ]
    replies = tuple(
        reply(i, "one", weighted(n, Count(torch.tensor(ROWS[i]))))
        for i, n in enumerate(client_nets)
    )
    new = (
        averaged(Averages({"one": Weights(start_net.state())}), Replies(each=replies))
        .weights["one"]
        .arrays
    )
    assert (int(new["seen"]), new["uses"].tolist()) == (4, [True, False])  # as 35 rows of 42 have
