"""FedProx: FedAvg whose clients are held near the global weights by a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020, "Federated optimization in heterogeneous
networks", algorithm 2. See docs/methods/fedprox.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedgist.core.averaging import Averages, Weighted, Weights, average, start, weighted
from fedgist.core.losses import cross_entropy, proximal
from fedgist.core.message import Nothing
from fedgist.core.method import Batch, Context, Count, Method, Order, Replies
from fedgist.core.net import Net, Part


@dataclass(frozen=True)
class FedProx(Method):
    """Federated averaging with a proximal term of weight ``mu``."""

    mu: float = 0.01

    keeps: ClassVar[Part] = "none"

    def __post_init__(self) -> None:
        if self.mu < 0:
            msg = f"method.mu must be at least 0, not {self.mu}"
            raise ValueError(msg)

    def init_server(self, ctx: Context) -> Averages:
        """Every architecture's common start."""
        return start(ctx)

    def download(self, server: Averages, order: Order, ctx: Context) -> Weights:
        """The weights of the client's architecture."""
        return server.weights[order.architecture]

    def receive(self, net: Net, own: Nothing, down: Weights, ctx: Context) -> tuple[Net, Nothing]:
        """Start from the global weights."""
        return net.having(down.arrays), own

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Weights, ctx: Context) -> Tensor:
        """F_k(w) + mu / 2 |w - w^t|^2 (eq. 2)."""
        return cross_entropy(net(batch.x), batch.y, batch.mask) + self.mu * proximal(
            net.params, down.arrays
        )

    def upload(
        self, net: Net, own: Nothing, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Weighted, Nothing]:
        """n_k w_k and n_k."""
        return weighted(net, sums), own

    def server_update(self, server: Averages, replies: Replies, ctx: Context) -> Averages:
        """W = sum_k n_k w_k / n."""
        return average(server, replies)
