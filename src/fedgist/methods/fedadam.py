"""FedAdam and related methods: the clients' mean update is the gradient of a server's optimizer.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan 2021, "Adaptive federated
optimization", algorithm 2 (ICLR 2021, https://arxiv.org/abs/2003.00295). See
docs/methods/fedadam.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedgist.core.bounds import NonNegative
from fedgist.core.method import Batch, Context, Method, Net, Nothing, Part, Task
from fedgist.methods.common.averaging import Weights, proximal_loss
from fedgist.methods.common.server_optimizer import ServerOptimizer
from fedgist.methods.common.server_steps import ServerSteps, Stepped


@dataclass(frozen=True)
class FedAdam(Method):
    """Federated averaging with an adaptive server optimizer for each architecture."""

    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    """The server's optimizer."""
    mu: NonNegative = 0.0
    """Weight of FedProx's proximal term. 0 leaves it out. Raise it if local models drift apart."""

    keeps: ClassVar[Part] = "none"

    @property
    def exchange(self) -> ServerSteps:
        """Weights in both directions; the server steps along the clients' mean update."""
        return ServerSteps(self.server)

    def check(self, task: Task) -> None:
        """Raise InputError unless each architecture has a learning rate."""
        self.server.check(task.starts)

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Weights, ctx: Context) -> Tensor:
        """Return the task's loss, plus ``mu / 2 |w - w^t|^2``: a scalar, ().

        ``batch.x`` is ``(batch, *input)``.
        """
        return proximal_loss(self.mu, net, batch, down, ctx)

    def report(self, server: Stepped, ctx: Context) -> Mapping[str, float]:
        """Return the server's learning rates."""
        return self.exchange.rates(ctx)
