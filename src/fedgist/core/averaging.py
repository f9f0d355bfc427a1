"""Weighted averages of weights, one per architecture: what averaging methods exchange.

McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data",
algorithm 1: ``w = sum_k n_k w_k / sum_k n_k``, over the clients of one architecture.

A method that averages names it in one line, and defines only what it does differently::

    exchange: ClassVar[Exchange] = Averaging("body")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedgist.core.message import message
from fedgist.core.net import Net
from fedgist.core.parts import Part
from fedgist.core.replies import Count, Order, Replies
from fedgist.core.task import Context
from fedgist.core.tree import Tree, tree


@message(reduce="sum")
class Weights:
    """Parameters and buffers by name, from the server."""

    arrays: dict[str, Tensor]


@message(reduce="sum", over="architecture")
class Weighted:
    """``n w`` and ``n``: a client's arrays times its rows, and its rows."""

    arrays: dict[str, Tensor]
    rows: Tensor


@tree
class Averages:
    """Server state: the weights of each architecture."""

    weights: dict[str, Weights]


@dataclass(frozen=True)
class Averaging:
    """The exchange of averaging methods: the server sends a part of the net and averages it."""

    part: Part = "all"

    def init_server(self, ctx: Context) -> Averages:
        """Return every architecture's common start."""
        starts = ctx.task.starts.items()
        return Averages({name: Weights(net.state(self.part)) for name, net in starts})

    def download(self, server: Averages, order: Order, ctx: Context) -> Weights:
        """Return the weights of the client's architecture."""
        return server.weights[order.architecture]

    def receive(self, net: Net, own: Tree, down: Weights, ctx: Context) -> tuple[Net, Tree]:
        """Start from the global weights."""
        return net.having(down.arrays), own

    def upload(
        self, net: Net, own: Tree, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Weighted, Tree]:
        """Return n_k w_k and n_k."""
        arrays = {name: sums.rows * array for name, array in net.state(self.part).items()}
        return Weighted(arrays, sums.rows), own

    def server_update(self, server: Averages, replies: Replies, ctx: Context) -> Averages:
        """Average within each architecture that answered; the others keep their weights."""
        weights = dict(server.weights)
        for name in replies.architectures:
            total = replies.by(name).total()
            weights[name] = mean(total.arrays, total.rows, server.weights[name])
        return Averages(weights)

    def models(self, server: Averages, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture, where all of it is averaged."""
        if self.part != "all":
            return {}
        starts = ctx.task.starts
        return {name: starts[name].having(w.arrays) for name, w in server.weights.items()}


def mean(total: Mapping[str, Tensor], rows: Tensor, old: Weights) -> Weights:
    """Return sums of n w, divided by ``rows``, in the types of the ``old`` arrays.

    Integers and Booleans are rounded.
    """
    means = {name: array / rows.clamp(min=1.0) for name, array in total.items()}
    return Weights({name: _like(value, old.arrays[name]) for name, value in means.items()})


def _like(value: Tensor, old: Tensor) -> Tensor:
    return value.to(old.dtype) if old.is_floating_point() else value.round().to(old.dtype)
