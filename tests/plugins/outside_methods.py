"""A package from outside: a method that fedgist knows nothing of. Tests name it by its module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgist.core.bounds import NonNegative
from fedgist.core.message import message
from fedgist.core.method import Batch, Context, Method, Net, Nothing, Order, Replies
from fedgist.methods.common.linear_head import class_sums


@message(reduce="sum")
class Means:
    """Class sums of features, (classes, width), and rows, (classes,)."""

    total: Tensor
    rows: Tensor


@dataclass(frozen=True)
class ShareMeans(Method):
    """Clients are pulled to everybody's class means."""

    pull: NonNegative = 0.1

    def init_server(self, ctx: Context) -> Means:
        width = next(iter(ctx.task.architectures.values())).feature_width
        return Means(torch.zeros(ctx.task.num_classes, width), torch.zeros(ctx.task.num_classes))

    def download(self, server: Means, order: Order, ctx: Context) -> Means:
        return server

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Means, ctx: Context) -> Tensor:
        z = net.features(batch.x)
        means = down.total / down.rows.clamp(min=1.0).unsqueeze(1)
        far = (z - means[batch.y]).square().sum(1)
        pulled = torch.where(batch.mask, far, 0.0).sum() / batch.mask.sum().clamp(min=1)
        return ctx.task.objective.loss(net.logits(z), batch) + self.pull * pulled

    def summarize(self, net: Net, batch: Batch, own: Nothing, down: Any, ctx: Context) -> Means:
        z, classes = net.features(batch.x), ctx.task.num_classes
        rows = class_sums(torch.ones_like(z[:, :1]), batch.y, batch.mask, classes)[:, 0]
        return Means(class_sums(z, batch.y, batch.mask, classes), rows)

    def upload(
        self, net: Net, own: Nothing, sums: Means, down: Any, ctx: Context
    ) -> tuple[Means, Nothing]:
        return sums, own

    def server_update(self, server: Means, replies: Replies, ctx: Context) -> Means:
        total: Means = replies.total()
        return total
