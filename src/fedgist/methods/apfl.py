"""APFL: each client predicts with a mixture of the shared model and one of its own.

Deng, Kamani, Mahdavi 2020, "Adaptive personalized federated learning", algorithm 1 and eq. 10
(https://arxiv.org/abs/2003.13461). See docs/methods/apfl.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.bounds import Share
from fedgist.core.method import Batch, Context, Count, Exchange, Method, Net, Part, Phase
from fedgist.core.nets.second_net import SecondNet
from fedgist.core.training import Optimizer
from fedgist.core.tree import Tree, tree
from fedgist.methods.common.averaging import Averaging, Weights


@tree
class Mixture:
    """A client's own model v and its share alpha, (), of the mixture."""

    v: SecondNet
    alpha: Tensor


@dataclass(frozen=True)
class APFL(Method):
    """Federated averaging, and mixtures ``alpha v + (1 - alpha) w`` that each client learns."""

    alpha: Share = 0.5
    """Share of the client's own model in its mixture, at first or, if not adaptive, always."""
    adaptive: bool = True
    """Whether each client learns its share: one step a round, on one batch."""

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def init_client(self, net: Net, ctx: Context) -> Mixture:
        """Return an own model with the net's first weights."""
        return Mixture(SecondNet.of(net), torch.tensor(self.alpha, device=ctx.key.device))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Take one step of the share (eq. 10), then train both models side by side."""
        both = Phase(("all", "own.v.params"), loss=self.both)
        if not self.adaptive:
            return (both,)
        plain = Optimizer("sgd", lr=ctx.task.training.lr)
        share = Phase(("own.alpha",), steps=1, loss=self.of_mixture, optimizer=plain)
        return share, both

    def of_mixture(
        self, net: Net, batch: Batch, own: Mixture, down: Weights, ctx: Context
    ) -> Tensor:
        """Return ``F_k(alpha v + (1 - alpha) w)``, (), of ``batch.x``, ``(batch, *input)``.

        No gradient flows to w.
        """
        return ctx.task.objective.loss(mixed(net, own)(batch.x), batch)

    def both(self, net: Net, batch: Batch, own: Mixture, down: Weights, ctx: Context) -> Tensor:
        """Return ``F_k(w)`` plus the loss of the mixture, (): each model learns from its own."""
        value = ctx.task.objective.loss(net(batch.x), batch)
        return value + self.of_mixture(net, batch, own, down, ctx)

    def upload(
        self, net: Net, own: Mixture, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Tree, Mixture]:
        """Return FedAvg's message, and a share between 0 and 1."""
        message, _ = self.exchange.upload(net, own, sums, down, ctx)
        return message, replace(own, alpha=own.alpha.clamp(0, 1))

    def predict(self, net: Net, own: Mixture, down: Weights, x: Tensor, ctx: Context) -> Tensor:
        """Return the mixture's logits (batch, classes) of ``x``, ``(batch, *input)``."""
        return mixed(net, own)(x)


def mixed(net: Net, own: Mixture) -> Net:
    """Return the model with parameters ``alpha v + (1 - alpha) w``; its buffers are v's."""
    alpha = own.alpha.clamp(0, 1)
    params = {k: alpha * v + (1 - alpha) * net.params[k].detach() for k, v in own.v.params.items()}
    return SecondNet(params, own.v.buffers).beside(net, "v")
