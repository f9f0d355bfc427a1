"""Weighted averages of weights, one per architecture: the arithmetic that averaging methods share.

McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data",
algorithm 1: ``w = sum_k n_k w_k / sum_k n_k``, over the clients of one architecture.
"""

from __future__ import annotations

from torch import Tensor

from fedgist.core.message import message
from fedgist.core.method import Context, Count, Replies
from fedgist.core.net import Net, Part
from fedgist.core.tree import tree


@message(reduce="sum")
class Weights:
    """Parameters and buffers by name, from the server."""

    arrays: dict[str, Tensor]


@message(reduce="sum")
class Weighted:
    """``n w`` and ``n``: a client's arrays times its rows, and its rows."""

    arrays: dict[str, Tensor]
    rows: Tensor


@tree
class Averages:
    """Server state: the weights of each architecture."""

    weights: dict[str, Weights]


def start(ctx: Context, part: Part = "all") -> Averages:
    """Return every architecture's common start."""
    return Averages({name: Weights(net.state(part)) for name, net in ctx.task.starts.items()})


def weighted(net: Net, count: Count, part: Part = "all") -> Weighted:
    """Return a client's contribution."""
    return Weighted({k: count.rows * v for k, v in net.state(part).items()}, count.rows)


def average(server: Averages, replies: Replies) -> Averages:
    """Average within each architecture that answered; the others keep their weights."""
    new = dict(server.weights)
    for name in replies.architectures:
        total = replies.by(name).total()
        rows = total.rows.clamp(min=1.0)
        old = server.weights[name].arrays
        new[name] = Weights({k: _like(v / rows, old[k]) for k, v in total.arrays.items()})
    return Averages(new)


def _like(mean: Tensor, old: Tensor) -> Tensor:
    """Give an average its old type: buffers that count or mask are rounded."""
    return mean.to(old.dtype) if old.is_floating_point() else mean.round().to(old.dtype)
