"""Per-FedAvg: shared weights from which one gradient step of a client makes a good model.

Fallah, Mokhtari, Ozdaglar 2020, "Personalized federated learning with theoretical guarantees: a
model-agnostic meta-learning approach", algorithm 1 (NeurIPS 2020,
https://arxiv.org/abs/2002.07948). See docs/methods/per_fedavg.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgist.core.batch import dealt
from fedgist.core.bounds import NonNegative, Positive
from fedgist.core.method import (
    Batch,
    Context,
    Exchange,
    Method,
    Net,
    Nothing,
    Part,
    Phase,
    Task,
)
from fedgist.core.nets.inner_gradient import gradient_and_value
from fedgist.core.objectives.target import EVERY_TARGET, Target
from fedgist.core.training import Optimizer
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Averaging, Weights


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Federated averaging by ``grad F_k(w - alpha grad F_k(w))``; a client tests after a step."""

    alpha: NonNegative = 0.01
    """Learning rate of the step that makes a client's own model."""
    hessian: Literal["none", "differences"] = "none"
    """The factor of second derivatives, ``1 - alpha grad^2 F_k(w)``.

    ``none`` leaves it out (FO in the paper). ``differences`` takes it from two more gradients (HF).
    """
    difference: Positive = 0.001
    """For ``differences``: the distance of the two gradients, in gradients, delta."""

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging(equal=True)
    targets: ClassVar[frozenset[Target]] = EVERY_TARGET - {"views"}  # rows are dealt out one by one

    @property
    def batches(self) -> int:
        """D and D' or, with second derivatives, D'' as well."""
        return 2 if self.hessian == "none" else 3

    def check(self, task: Task) -> None:
        """Raise MethodError under private local steps."""
        if task.privacy is not None and task.privacy.steps is not None:
            raise MethodError(
                f"privacy.unit = {task.privacy.unit!r}: Per-FedAvg's local steps are not sums of "
                "rows' gradients; use unit = 'client'"
            )

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Take steps of two independent batches each, or of three."""
        return (Phase(batches=self.batches),)

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Weights, ctx: Context) -> Tensor:
        """Return a loss with the gradient ``(1 - alpha grad^2 F(w, D'')) grad F(w', D')``, ().

        ``w' = w - alpha grad F(w, D)``. ``batch.x`` is ``(batch, *input)`` and holds D, D' and, for
        differences, D''. The value is ``F(w', D')``.
        """
        if net.buffers:
            with torch.no_grad():
                net(batch.x)  # running statistics, of w
        first, second, *third = dealt(batch, self.batches)

        def of(rows: Batch, params: dict[str, Tensor]) -> dict[str, Tensor]:
            return gradient_and_value(lambda other: _loss(other, rows, ctx), net, params)[0]

        inner = of(first, net.params)
        at = {name: p - self.alpha * inner[name] for name, p in net.params.items()}
        value = _loss(net.with_arrays(at), second, ctx)
        if not third:
            return value
        outer = of(second, at)
        ahead, behind = (
            of(third[0], {k: p + sign * self.difference * outer[k] for k, p in net.params.items()})
            for sign in (1, -1)
        )
        scale = self.alpha / (2 * self.difference)
        curved = [(scale * (ahead[k] - behind[k]) * p).sum() for k, p in net.params.items()]
        bend = torch.stack(curved).sum()
        return value - (bend - bend.detach())

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        """Take the step that makes the client's own model, on one of its batches."""
        own = Optimizer("sgd", lr=self.alpha)
        return (Phase(steps=1, loss=super().loss, optimizer=own),)


def _loss(net: Net, rows: Batch, ctx: Context) -> Tensor:
    return ctx.task.objective.loss(net.for_rows(rows.mask)(rows.x), rows)
