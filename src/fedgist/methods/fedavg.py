"""FedAvg: clients train the global model, the server averages their weights by rows.

McMahan, Moore, Ramage, Hampson, Arcas 2017, "Communication-efficient learning of deep networks from
decentralized data", algorithm 1. With several architectures, the average is taken within each. See
docs/methods/fedavg.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedgist.core.averaging import Averages, Weighted, Weights, average, start, weighted
from fedgist.core.message import Nothing
from fedgist.core.method import Context, Count, Method, Order, Replies
from fedgist.core.net import Net, Part


@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging."""

    keeps: ClassVar[Part] = "none"

    def init_server(self, ctx: Context) -> Averages:
        """Every architecture's common start."""
        return start(ctx)

    def download(self, server: Averages, order: Order, ctx: Context) -> Weights:
        """The weights of the client's architecture."""
        return server.weights[order.architecture]

    def receive(self, net: Net, own: Nothing, down: Weights, ctx: Context) -> tuple[Net, Nothing]:
        """Start from the global weights."""
        return net.having(down.arrays), own

    def upload(
        self, net: Net, own: Nothing, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Weighted, Nothing]:
        """n_k w_k and n_k."""
        return weighted(net, sums), own

    def server_update(self, server: Averages, replies: Replies, ctx: Context) -> Averages:
        """W = sum_k n_k w_k / n."""
        return average(server, replies)
