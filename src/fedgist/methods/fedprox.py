"""FedProx: FedAvg with a proximal term that keeps clients near the global weights.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020, "Federated optimization in heterogeneous
networks", algorithm 2 (MLSys 2020, https://arxiv.org/abs/1812.06127). See docs/methods/fedprox.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedgist.core.bounds import NonNegative
from fedgist.core.method import Batch, Context, Exchange, Method, Net, Nothing, Part
from fedgist.methods.common.averaging import Averaging, Weights, proximal_loss


@dataclass(frozen=True)
class FedProx(Method):
    """Federated averaging with a proximal term of weight ``mu``."""

    mu: NonNegative = 0.01
    """Weight of the proximal term. Raise it if local models drift apart. 0 is FedAvg."""

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Weights, ctx: Context) -> Tensor:
        """Return ``F_k(w) + mu / 2 |w - w^t|^2`` (eq. 2), a scalar ().

        ``batch.x`` is ``(batch, *input)``.
        """
        return proximal_loss(self.mu, net, batch, down, ctx)
