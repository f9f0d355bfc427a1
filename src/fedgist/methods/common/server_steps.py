"""The exchange of adaptive federated optimization: server steps along the clients' mean update.

Reddi et al. 2021, "Adaptive federated optimization", algorithm 2
(https://arxiv.org/abs/2003.00295). A method names this exchange in one line, as it does
:class:`~fedgist.methods.common.averaging.Averaging`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, replace
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from fedgist.core.nets.net import Net
from fedgist.core.replies import Count, Order, Replies
from fedgist.core.task import Context
from fedgist.core.tree import Tree, tree
from fedgist.methods.common import server_optimizer
from fedgist.methods.common.averaging import Averages, Averaging, Moved, Weighted, Weights, averaged
from fedgist.methods.common.server_optimizer import ServerMoments, ServerOptimizer

AVERAGE = Averaging()


@tree
class Stepped:
    """Server state: the weights of each architecture, and the moments of its optimizer."""

    averages: Averages
    moments: dict[str, ServerMoments]


class Steps(Protocol):
    """The interface of a server state with :class:`Stepped`'s fields, and possibly others."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    @property
    def averages(self) -> Averages:
        """Return the weights of each architecture."""

    @property
    def moments(self) -> dict[str, ServerMoments]:
        """Return the moments of each architecture's optimizer."""


S = TypeVar("S", bound=Steps)


@dataclass(frozen=True)
class PseudoGradient:
    """The aggregated update of all clients with one architecture.

    ``grads`` are the pseudo-gradient, w - mean, by parameter. ``buffers`` are the means of the
    buffers, which no optimizer changes.
    """

    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class ServerSteps:
    """The exchange: clients send weights, and the server steps along their mean update."""

    optimizer: ServerOptimizer

    def init_server(self, ctx: Context) -> Stepped:
        """Return the common initial weights, and fresh moments."""
        starts = ctx.task.starts.items()
        moments = {name: server_optimizer.init(self.optimizer, net.params) for name, net in starts}
        return Stepped(AVERAGE.init_server(ctx), moments)

    def download(self, server: Steps, order: Order, ctx: Context) -> Weights:
        """Return the weights of the client's architecture."""
        return AVERAGE.download(server.averages, order, ctx)

    def receive(self, net: Net, own: Tree, down: Weights, ctx: Context) -> tuple[Net, Tree]:
        """Return the net with the global weights."""
        return AVERAGE.receive(net, own, down, ctx)

    def upload(
        self, net: Net, own: Tree, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Weighted | Moved, Tree]:
        """Return n_k w_k and n_k, or only w_k - w if privacy protects clients."""
        return AVERAGE.upload(net, own, sums, down, ctx)

    def server_update(self, server: S, replies: Replies, ctx: Context) -> S:
        """Step in each architecture that answered (lines 9 to 14); the others are unchanged."""
        for name, update in self.updates(server, replies, ctx).items():
            server = self.step(server, name, update, ctx)
        return server

    def updates(self, server: Steps, replies: Replies, ctx: Context) -> dict[str, PseudoGradient]:
        """Return the aggregated update of each architecture that answered."""
        by_architecture = {}
        for name in replies.architectures:
            old = server.averages.weights[name]
            mean, params = averaged(replies.by(name), old, ctx).arrays, ctx.task.starts[name].params
            grads = {n: old.arrays[n] - mean[n] for n in params}
            by_architecture[name] = PseudoGradient(
                grads, {n: a for n, a in mean.items() if n not in params}
            )
        return by_architecture

    def step(self, server: S, name: str, update: PseudoGradient, ctx: Context) -> S:
        """Return the state after one step of the architecture ``name``."""
        old = server.averages.weights[name].arrays
        params = {n: old[n] for n in update.grads}
        lr = self.optimizer.rate(name, ctx.round, ctx.task.training.num_rounds)
        stepped, moments = server_optimizer.step(
            self.optimizer, lr, params, update.grads, server.moments[name]
        )
        weights = server.averages.weights | {name: Weights(old | update.buffers | stepped)}
        return replace(server, averages=Averages(weights), moments=server.moments | {name: moments})

    def replaced(self, server: S, weights: Mapping[str, Weights], ctx: Context) -> S:
        """Return the state with other weights, and fresh moments for all architectures."""
        averages = Averages({**server.averages.weights, **weights})
        return replace(server, averages=averages, moments=self.init_server(ctx).moments)

    def models(self, server: Steps, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture."""
        return AVERAGE.models(server.averages, ctx)

    def rates(self, ctx: Context) -> dict[str, float]:
        """Return the server's learning rate; with several architectures, one rate for each."""
        rounds, names = ctx.task.training.num_rounds, list(ctx.task.starts)
        rates = {name: self.optimizer.rate(name, max(ctx.round, 1), rounds) for name in names}
        if len(rates) == 1:
            return {"lr": rates[names[0]]}
        return {f"lr/{name}": rate for name, rate in rates.items()}


def norm(arrays: Mapping[str, Tensor]) -> Tensor:
    """Return the norm over all arrays, in float64, ()."""
    return torch.stack([a.double().square().sum() for a in arrays.values()]).sum().sqrt()
