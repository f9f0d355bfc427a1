"""FedProto: clients share class means of features, and learn features near the global means.

A class is that of a row, a label that a row has, or the class of a pixel.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang 2022, "FedProto: Federated prototype learning across
heterogeneous clients", algorithm 1 (AAAI 2022, https://arxiv.org/abs/2105.00243). See
docs/methods/fedproto.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgist.core.bounds import NonNegative
from fedgist.core.counts import COUNTS
from fedgist.core.message import message
from fedgist.core.method import Batch, Context, Method, Net, Nothing, Order, Part, Replies, Task
from fedgist.core.objectives.target import Target
from fedgist.core.privacy import bounded, counted, least_count, total_floor
from fedgist.core.tree import tree
from fedgist.core.wire_form import NONZERO, rows_where
from fedgist.errors import MethodError
from fedgist.methods.common.linear_head import (
    class_means,
    members,
    one_feature_width,
    weights_of,
    with_constant,
)
from fedgist.methods.common.prototypes import Prototypes, by_nearest, near_prototypes


@message(reduce="sum")
class ClassTotals:
    """A client's features by class, (classes, m), and the weight of each class, (classes,).

    A row of ``total`` is either a class sum, with its number of rows as weight, or a class mean of
    weight 1.
    """

    total: Tensor = field(metadata=rows_where("weight"))
    weight: Tensor = field(metadata=NONZERO | COUNTS)


@tree
class OwnClasses:
    """Mask of the classes of a client's rows, (classes,): 1 or 0. It stays at the client."""

    present: Tensor


Own = OwnClasses | Nothing


@dataclass(frozen=True)
class FedProto(Method):
    """FedProto; the defaults are the paper's."""

    lam: NonNegative = 1.0
    """Weight of the distance between features and the prototype of their class (lambda)."""
    aggregate: Literal["weighted", "plain"] = "weighted"
    """How prototypes are averaged over clients.

    ``weighted``: by the number of rows of the class. ``plain``: every client that has the class
    counts the same, as in the authors' code.
    """
    inference: Literal["prototype", "logits"] = "prototype"
    """How clients predict: by the nearest global prototype, or by their own head (``logits``)."""
    inference_classes: Literal["all", "own"] = "all"
    """Which prototypes are candidates: all, or those of the client's own training classes.

    ``own`` is what the authors' code does.
    """

    keeps: ClassVar[Part] = "all"
    targets: ClassVar[frozenset[Target]] = frozenset({"class", "labels", "pixels"})

    @property
    def record_terms(self) -> int:
        """One per-row sum if class sums and counts are sent; 0 if means are sent."""
        return int(self.aggregate == "weighted")

    def check(self, task: Task) -> None:
        """Raise MethodError unless all bodies have one feature width.

        Several labels have no nearest prototype, and only one class per row is private.
        """
        one_feature_width(task, "fedproto", shares="class means")
        target = task.objective.target
        if target != "class" and task.privacy is not None:
            raise MethodError(
                "method fedproto: the sensitivity of its sums is not known for objective "
                f"{task.objective.name}; privacy needs one class for each row"
            )
        if target == "labels" and self.inference == "prototype":
            raise MethodError(
                "method.inference = 'prototype': a row may have several labels; use 'logits'"
            )

    def init_server(self, ctx: Context) -> Prototypes:
        """Return no prototypes."""
        width = one_feature_width(ctx.task, "fedproto", shares="class means")
        return Prototypes.of_nobody(ctx.task.num_classes, width, ctx.key.device)

    def init_client(self, net: Net, ctx: Context) -> OwnClasses | Nothing:
        """Return no classes: the first upload of a client sets them."""
        if self.inference_classes == "all":
            return Nothing()
        return OwnClasses(torch.zeros(ctx.task.num_classes, device=ctx.key.device))

    def download(self, server: Prototypes, order: Order, ctx: Context) -> Prototypes:
        """Return the global prototypes."""
        return server

    def loss(self, net: Net, batch: Batch, own: Own, down: Prototypes, ctx: Context) -> Tensor:
        """Return the task's loss plus lambda times the distance to the prototypes, ().

        ``batch.x`` is ``(batch, *input)``, and a prototype is (m,). The distance is the mean square
        over the features, and over the labels or the pixels of a row. Where a class has no
        prototype it is 0.
        """
        return near_prototypes(self.lam, net, batch, down, ctx)

    def summarize(
        self, net: Net, batch: Batch, own: Own, down: Prototypes, ctx: Context
    ) -> ClassTotals:
        """Return class sums and counts over a batch."""
        z, privacy = net.features(batch.x), ctx.task.privacy
        phi = with_constant(bounded(z, privacy).flatten(0, -2))
        rows = counted(z, batch, privacy)
        weights = weights_of(rows, phi).repeat_interleave(len(phi) // len(batch.y)).unsqueeze(1)
        sums = (members(rows, ctx.task).to(phi.dtype) * weights).T @ phi
        return ClassTotals(sums[:, 1:], sums[:, 0])

    def upload(
        self, net: Net, own: Own, sums: ClassTotals, down: Prototypes, ctx: Context
    ) -> tuple[ClassTotals, Own]:
        """Return sums and counts, or means of weight 1; absent classes are left out."""
        if isinstance(own, OwnClasses):
            own = OwnClasses((sums.weight > 0).to(sums.weight.dtype))
        if self.aggregate == "weighted":
            return sums, own
        return ClassTotals(*class_means(sums.total, sums.weight)), own

    def server_update(self, server: Prototypes, replies: Replies, ctx: Context) -> Prototypes:
        """Return the new mean of each class that was sent, and the old mean of other classes."""
        total: ClassTotals = replies.total()
        privacy = ctx.task.privacy
        floor, least = total_floor(privacy, len(replies)), least_count(privacy)
        new, sent = class_means(total.total, total.weight, floor, least)
        mean = torch.where(sent.unsqueeze(1) > 0, new, server.mean)
        return Prototypes(mean, torch.maximum(sent, server.exists))

    def predict(self, net: Net, own: Own, down: Prototypes, x: Tensor, ctx: Context) -> Tensor:
        """Return minus the squared distances to the prototypes, or the head's logits.

        The result is (batch, classes), or the same at each pixel. Classes without a prototype rank
        below all others. With ``inference_classes = "own"``, so do classes without rows at the
        client. If no candidate class has a prototype, the head predicts.
        """
        if self.inference == "logits":
            return net(x)
        exists = down.exists > 0
        if isinstance(own, OwnClasses):
            exists = exists & (own.present > 0)
        return by_nearest(net, x, down.mean, exists)
