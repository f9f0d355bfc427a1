"""FedAdam and its relatives: the server takes the clients' mean update for a gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan 2021, "Adaptive federated
optimization", algorithm 2. See docs/methods/fedadam.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedgist.core import server_optimizer
from fedgist.core.averaging import Averages, Averaging, Weights, averaged
from fedgist.core.bounds import NonNegative
from fedgist.core.losses import proximal
from fedgist.core.method import Batch, Context, Exchange, Method, Net, Nothing, Order, Part, Replies
from fedgist.core.server_optimizer import ServerMoments, ServerOptimizer
from fedgist.core.tree import tree

AVERAGE = Averaging()


@tree
class Server:
    """Server state: the weights of each architecture, and its optimizer's moments."""

    averages: Averages
    moments: dict[str, ServerMoments]


@dataclass(frozen=True)
class FedAdam(Method):
    """Federated averaging with an adaptive optimizer at the server, one for each architecture.

    ``server`` is that optimizer; ``mu`` the weight of FedProx's proximal term at the clients.
    """

    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    mu: NonNegative = 0.0

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = AVERAGE

    def init_server(self, ctx: Context) -> Server:
        """Return the common starts, and moments without memory."""
        starts = ctx.task.starts.items()
        moments = {name: server_optimizer.init(self.server, net.params) for name, net in starts}
        return Server(AVERAGE.init_server(ctx), moments)

    def download(self, server: Server, order: Order, ctx: Context) -> Weights:
        """Return the weights of the client's architecture."""
        return AVERAGE.download(server.averages, order, ctx)

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Weights, ctx: Context) -> Tensor:
        """Return the task's loss, plus ``mu / 2 |w - w^t|^2``."""
        task_loss = ctx.task.objective.loss(net(batch.x), batch)
        return task_loss + self.mu * proximal(net.params, down.arrays) if self.mu else task_loss

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Step along ``Delta = mean - w`` in each architecture that answered (lines 9 to 14).

        Buffers (the statistics of batch norm) are averaged.
        """
        weights, moments = dict(server.averages.weights), dict(server.moments)
        for name in replies.architectures:
            old = weights[name]
            mean = averaged(replies.by(name), old, ctx)
            params = {n: old.arrays[n] for n in ctx.task.starts[name].params}
            grads = {n: p - mean.arrays[n] for n, p in params.items()}
            lr = self.server.rate(name, ctx.round, ctx.task.training.num_rounds)
            stepped, moments[name] = server_optimizer.step(
                self.server, lr, params, grads, moments[name]
            )
            weights[name] = Weights(mean.arrays | stepped)
        return Server(Averages(weights), moments)

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture."""
        return AVERAGE.models(server.averages, ctx)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Return the server's learning rate, of each architecture where there are several."""
        rounds, names = ctx.task.training.num_rounds, list(ctx.task.starts)
        rates = {name: self.server.rate(name, ctx.round, rounds) for name in names}
        if len(rates) == 1:
            return {"lr": rates[names[0]]}
        return {f"lr/{name}": rate for name, rate in rates.items()}
