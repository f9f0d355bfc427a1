"""FedDyn: a dynamic regularizer lets the clients' optima meet at that of all clients.

Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama 2021, "Federated learning based on dynamic
regularization", algorithm 1 (ICLR 2021, https://arxiv.org/abs/2111.04263). See
docs/methods/feddyn.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.bounds import Positive
from fedgist.core.losses import proximal
from fedgist.core.message import message
from fedgist.core.method import Batch, Context, Count, Method, Net, Order, Part, Replies
from fedgist.core.tree import tree
from fedgist.methods.common.averaging import Moved, Weights, mean_of, moved


@message(reduce="sum")
class Server:
    """The weights theta by name, parameters and buffers, and the server's state h."""

    arrays: dict[str, Tensor]
    state: dict[str, Tensor]


@tree
class Servers:
    """Weights and state of each architecture."""

    by_architecture: dict[str, Server]


@tree
class Gradient:
    """The gradient of a client's loss at its last model, by the names of parameters."""

    arrays: dict[str, Tensor]


@dataclass(frozen=True)
class FedDyn(Method):
    """Averages of clients whose losses are tilted by what they have learnt of each other."""

    alpha: Positive = 0.01
    """Weight of the regularizer. The paper takes 0.1, 0.01 or 0.001."""

    keeps: ClassVar[Part] = "none"
    needs_every_upload: ClassVar[bool] = True

    def init_server(self, ctx: Context) -> Servers:
        """Return the common initial weights, and h = 0."""
        starts = ctx.task.starts.items()
        return Servers({name: Server(net.state(), _zeros(net.params)) for name, net in starts})

    def init_client(self, net: Net, ctx: Context) -> Gradient:
        """Return 0, as the paper does."""
        return Gradient(_zeros(net.params))

    def download(self, server: Servers, order: Order, ctx: Context) -> Weights:
        """Return the weights of the client's architecture; h stays at the server."""
        return Weights(server.by_architecture[order.architecture].arrays)

    def receive(self, net: Net, own: Gradient, down: Weights, ctx: Context) -> tuple[Net, Gradient]:
        """Return the net with the weights."""
        return net.with_arrays(down.arrays), own

    def loss(self, net: Net, batch: Batch, own: Gradient, down: Weights, ctx: Context) -> Tensor:
        """Return ``L_k(theta) - <g_k, theta> + alpha / 2 |theta - theta^(t-1)|^2`` (eq. 1), ().

        ``batch.x`` is ``(batch, *input)``. The linear term has its gradient, and adds nothing to
        the value.
        """
        tilt = torch.stack([(own.arrays[k] * w).sum() for k, w in net.params.items()]).sum()
        value = ctx.task.objective.loss(net(batch.x), batch)
        return value - (tilt - tilt.detach()) + self.alpha * proximal(net.params, down.arrays)

    def upload(
        self, net: Net, own: Gradient, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Moved, Gradient]:
        """Return ``theta_k - theta^(t-1)``; keep ``g_k - alpha (theta_k - theta^(t-1))``."""
        gone = moved(net.state(), down)
        gradient = {k: g - self.alpha * gone[k] for k, g in own.arrays.items()}
        return Moved(gone), Gradient(gradient)

    def server_update(self, server: Servers, replies: Replies, ctx: Context) -> Servers:
        """Return ``h - alpha / m sum(theta_k - theta)``, and ``mean(theta_k) - h / alpha``.

        m are all clients of the architecture. Buffers move to the clients' mean.
        """
        new = dict(server.by_architecture)
        for name in replies.architectures:
            old, some = new[name], replies.by(name)
            total = some.total().arrays
            mean = mean_of(total, some, ctx)
            share = self.alpha / ctx.task.clients_with[name]
            state = {k: h - share * total[k] for k, h in old.state.items()}
            arrays = {k: v + mean[k] if k in mean else v for k, v in old.arrays.items()}
            arrays |= {k: arrays[k] - h / self.alpha for k, h in state.items()}
            new[name] = Server(arrays, state)
        return Servers(new)

    def models(self, server: Servers, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture."""
        starts = ctx.task.starts
        return {k: starts[k].with_arrays(s.arrays) for k, s in server.by_architecture.items()}


def _zeros(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(array) for name, array in arrays.items()}
