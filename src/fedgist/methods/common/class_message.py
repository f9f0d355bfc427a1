"""Class means of one client as a message, for servers that learn from each client's by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.message import message
from fedgist.core.nets.net import Net
from fedgist.core.replies import Replies
from fedgist.core.task import Context
from fedgist.core.tree import tree
from fedgist.core.wire_form import FLAGS, rows_where
from fedgist.methods.common.linear_head import class_means, class_sums, with_constant


@message(reduce="each")
class ClassMeans:
    """A client's mean features of each class, (classes, m), and a mask of them, (classes,)."""

    mean: Tensor = field(metadata=rows_where("there"))
    there: Tensor = field(metadata=FLAGS)

    @staticmethod
    def of(sums: FeatureSums) -> ClassMeans:
        """Return the means of sums."""
        return ClassMeans(*class_means(sums.total, sums.rows))


@tree
class FeatureSums:
    """Sums of features by class, (classes, m), and the numbers of rows, (classes,)."""

    total: Tensor
    rows: Tensor

    @staticmethod
    def of(net: Net, batch: Batch, ctx: Context) -> FeatureSums:
        """Return the sums over a batch, whose ``x`` is ``(batch, *input)``."""
        phi = with_constant(net.features(batch.x))
        sums = class_sums(phi, batch.y, batch.mask, ctx.task.num_classes, batch.weight)
        return FeatureSums(sums[:, 1:], sums[:, 0])


def lessons(replies: Replies) -> tuple[Tensor, Tensor]:
    """Return all class means that clients sent, (means, m), and their classes, (means,)."""
    sent = [reply.message for reply in replies]
    there = [m.there.nonzero().flatten() for m in sent]
    means = [m.mean[classes] for m, classes in zip(sent, there, strict=True)]
    return torch.cat(means), torch.cat(there)


def steps(ctx: Context, means: int, epochs: int, batch_size: int) -> Iterator[Tensor]:
    """Yield the means of each step of the server, (batch,): passes in an order of their own."""
    for epoch in range(epochs):
        yield from torch.split(random.permutation(ctx.draw("order", epoch), means), batch_size)
