"""FedROD: a generic head that counts all classes alike, and a personal head beside it.

Chen, Chao 2022, "On bridging generic and personalized federated learning for image classification",
eq. 9 to 11 (ICLR 2022, https://arxiv.org/abs/2107.00778). See docs/methods/fedrod.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.method import Batch, Context, Exchange, Method, Net, Part, Phase, Task
from fedgist.core.nets.layers import linear
from fedgist.core.objectives.target import Target
from fedgist.core.privacy import of_records
from fedgist.core.tree import tree
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Averaging, Weights

LEAST = 1e-30  # in place of no rows, whose logarithm is not finite


@tree
class Personal:
    """A client's personal head: weight (classes, m) and bias (classes,)."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class FedROD(Method):
    """Federated averaging by a balanced loss; clients add a head of their own to its logits."""

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})
    counts_classes: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        """Raise MethodError if single rows are protected: the loss reads counts of classes."""
        if of_records(task.privacy):
            raise MethodError(
                "privacy.unit = 'record': FedROD's loss reads each client's rows of every class; "
                "use unit = 'client'"
            )

        if task.training.label_smoothing:
            raise MethodError(
                f"train.label_smoothing = {task.training.label_smoothing}: FedROD's balanced loss "
                "has no minimum if classes that a client lacks have a smoothed share: use 0"
            )

    def init_client(self, net: Net, ctx: Context) -> Personal:
        """Return a personal head of zeros: the client predicts as the generic head does."""
        weight, _ = net.head
        return Personal(torch.zeros_like(weight), torch.zeros_like(weight[:, 0]))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Train the net and the personal head side by side."""
        return (Phase(("all", "own.weight", "own.bias")),)

    def loss(self, net: Net, batch: Batch, own: Personal, down: Weights, ctx: Context) -> Tensor:
        """Return the balanced loss of the generic head plus the loss of both heads' sum, ().

        ``batch.x`` is ``(batch, *input)``. The first adds ln n_c to the logits of class c (Ren et
        al. 2020). The second trains the personal head alone.
        """
        assert batch.class_counts is not None  # the method counts classes
        z = net.features(batch.x)
        logits, objective = net.logits(z), ctx.task.objective
        balanced = objective.loss(logits + batch.class_counts.clamp(min=LEAST).log(), batch)
        both = logits.detach() + linear(z.detach(), own.weight, own.bias)
        return balanced + objective.loss(both, batch)

    def predict(self, net: Net, own: Personal, down: Weights, x: Tensor, ctx: Context) -> Tensor:
        """Return the sum of both heads' logits (batch, classes) of ``x``, ``(batch, *input)``."""
        z = net.features(x)
        return net.logits(z) + linear(z, own.weight, own.bias)
