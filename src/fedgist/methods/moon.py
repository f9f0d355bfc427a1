"""MOON: features are pulled toward those of the global model, and away from those of before.

Li, He, Song 2021, "Model-contrastive federated learning", algorithm 1 (CVPR 2021,
https://arxiv.org/abs/2103.16257). See docs/methods/moon.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedgist.core.bounds import NonNegative, Positive
from fedgist.core.losses import weighted_mean
from fedgist.core.method import Batch, Context, Count, Exchange, Method, Net, Part
from fedgist.core.nets.second_net import SecondNet
from fedgist.core.objectives.target import OF_ROWS, Target
from fedgist.core.tree import Tree, tree
from fedgist.methods.common.averaging import Averaging, Weights


@tree
class Before:
    """A client's net after its last round."""

    net: SecondNet


@dataclass(frozen=True)
class Moon(Method):
    """Federated averaging with a contrast of features between three models."""

    mu: NonNegative = 1.0
    """Weight of the contrast. The paper takes 5 on CIFAR-10 and 1 on CIFAR-100."""
    temperature: Positive = 0.5
    """Temperature of the contrast's cosines, tau."""

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()
    targets: ClassVar[frozenset[Target]] = OF_ROWS

    def init_client(self, net: Net, ctx: Context) -> Before:
        """Return the first net: in round 1 it is the global one, and nothing pulls."""
        return Before(SecondNet.of(net))

    def loss(self, net: Net, batch: Batch, own: Before, down: Weights, ctx: Context) -> Tensor:
        """Return the task's loss plus ``mu`` times the model-contrastive loss (eq. 3), ().

        ``batch.x`` is ``(batch, *input)``. The contrast is ``-ln(e^(s_glob / tau) /
        (e^(s_glob / tau) + e^(s_prev / tau)))``, with the cosine s of a row's features to those of
        the two other models, which are as they predict.
        """
        z = net.features(batch.x)
        others = (net.with_arrays(down.arrays), own.net.beside(net, "net"))
        near, far = (
            cosine_similarity(z, other.in_evaluation().features(batch.x).detach(), dim=1)
            for other in others
        )
        each = softplus((far - near) / self.temperature)
        contrast = weighted_mean(each, batch.mask, batch.weight)
        return ctx.task.objective.loss(net.logits(z), batch) + self.mu * contrast

    def upload(
        self, net: Net, own: Before, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Tree, Before]:
        """Return FedAvg's message, and this round's net for the next one."""
        message, _ = self.exchange.upload(net, own, sums, down, ctx)
        return message, Before(SecondNet.of(net))
