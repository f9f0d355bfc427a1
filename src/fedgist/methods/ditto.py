"""Ditto: FedAvg, and beside it a personal model of each client near the shared one.

Li, Hu, Beirami, Smith 2021, "Ditto: fair and robust federated learning through personalization",
algorithm 1 (ICML 2021, https://arxiv.org/abs/2012.04221). See docs/methods/ditto.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedgist.core.bounds import NonNegative, NonNegativeInt
from fedgist.core.losses import proximal
from fedgist.core.method import Batch, Context, Exchange, Method, Net, Part, Phase
from fedgist.core.nets.second_net import SecondNet
from fedgist.core.tree import tree
from fedgist.methods.common.averaging import Averaging, Weights


@tree
class Personal:
    """A client's personal model v."""

    v: SecondNet


@dataclass(frozen=True)
class Ditto(Method):
    """Federated averaging, and personal models by ``F_k(v) + lam / 2 |v - w|^2``."""

    lam: NonNegative = 0.1
    """Pull of the personal models toward the shared one. 0 is local training; large is FedAvg."""
    personal_epochs: NonNegativeInt = 0
    """Passes over the rows in which the personal model trains. 0: ``train.local_epochs``."""

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def init_client(self, net: Net, ctx: Context) -> Personal:
        """Return a personal model with the net's first weights."""
        return Personal(SecondNet.of(net))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Train the shared model, then the personal one."""
        own = Phase(("own.v.params",), self.personal_epochs or None, loss=self.personal)
        return Phase(("all",)), own

    def personal(
        self, net: Net, batch: Batch, own: Personal, down: Weights, ctx: Context
    ) -> Tensor:
        """Return ``F_k(v) + lam / 2 |v - w^t|^2``, (); ``batch.x`` is ``(batch, *input)``.

        ``w^t`` is the download of the round.
        """
        value = ctx.task.objective.loss(own.v.beside(net, "v")(batch.x), batch)
        return value + self.lam * proximal(own.v.params, down.arrays)

    def predict(self, net: Net, own: Personal, down: Weights, x: Tensor, ctx: Context) -> Tensor:
        """Return the personal model's logits (batch, classes) of ``x``, ``(batch, *input)``."""
        return own.v.beside(net, "v")(x)
