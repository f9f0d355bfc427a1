"""FD, federated distillation: clients share the mean logits of each class and learn from them.

Jeong, Oh, Kim, Park, Bennis, Kim 2018, "Communication-efficient on-device machine learning:
Federated distillation and augmentation under non-IID private data", section 2
(https://arxiv.org/abs/1811.11479). See docs/methods/fd.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.bounds import NonNegative
from fedgist.core.losses import weighted_mean
from fedgist.core.message import message
from fedgist.core.method import Batch, Context, Method, Net, Nothing, Order, Part, Replies, Task
from fedgist.core.objectives.target import Target
from fedgist.core.tree import tree
from fedgist.core.wire_form import FLAGS, rows_where
from fedgist.methods.common.latest_messages import LatestMessages, check_pools
from fedgist.methods.common.linear_head import class_means, class_sums


@message(reduce="each")
class ClassLogits:
    """Mean logits by class, (classes, classes), and a mask of the classes present, (classes,)."""

    mean: Tensor = field(metadata=rows_where("there"))
    there: Tensor = field(metadata=FLAGS)


@message(reduce="each")
class DenseClassLogits:
    """Mean logits by class, (classes, classes), all of which are sent: zeros for absent classes.

    A receiver cannot tell such zeros from logits, so clients learn from the zeros as well.
    """

    mean: Tensor

    @property
    def there(self) -> Tensor:
        """Mask of classes present (classes,): all ones, or all zeros for an empty message."""
        some = (self.mean != 0).flatten(-2).any(-1, keepdim=True)
        return some.expand(self.mean.shape[:-1]).to(self.mean.dtype)


AnyLogits = ClassLogits | DenseClassLogits


@tree
class Board:
    """Server state: each client's newest logits, their sums and counts by class, and their means.

    ``total`` is (classes, classes) and ``count`` (classes,).
    """

    newest: LatestMessages
    total: Tensor
    count: Tensor
    everyone: ClassLogits


@tree
class LogitSums:
    """Sums of logits by class, (classes, classes), and the numbers of rows, (classes,)."""

    total: Tensor
    rows: Tensor


@dataclass(frozen=True)
class FD(Method):
    """Federated distillation by mean logits of each class."""

    gamma: NonNegative = 1.0
    """Weight of the distance between a client's logits and the mean logits of the class."""
    leave_own_out: bool = True
    """Whether a client learns from the mean over the other clients only, as in Jeong et al."""
    declare_classes: bool = True
    """Whether a message says by one bit per class which classes it has.

    If false, missing classes are sent as zeros. Differential privacy needs false.
    """

    keeps: ClassVar[Part] = "all"
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})
    accepts_late: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        """Raise MethodError if a client may be in several pools."""
        check_pools(task, "fd")

    def init_server(self, ctx: Context) -> Board:
        """Return a board without any client's logits."""
        classes, device = ctx.task.num_classes, ctx.key.device
        mean, there = torch.zeros(classes, classes, device=device), torch.zeros(classes).to(device)
        newest = LatestMessages.of_nobody(self._message(mean, there), ctx.task.num_clients)
        return Board(newest, mean, there, ClassLogits(mean, there))

    def _message(self, mean: Tensor, there: Tensor) -> AnyLogits:
        return ClassLogits(mean, there) if self.declare_classes else DenseClassLogits(mean)

    def download(self, server: Board, order: Order, ctx: Context) -> AnyLogits:
        """Return each class's mean logits over the clients that have the class.

        With ``leave_own_out``, the client's own logits are not part of the mean.
        """
        mean = server.everyone
        if self.leave_own_out:
            own_logits = take_logits(self._newest(server.newest), order.client)
            total = server.total - own_logits.mean * own_logits.there.unsqueeze(1)
            mean = ClassLogits(*class_means(total, server.count - own_logits.there))
        return self._message(mean.mean, mean.there)

    def _newest(self, newest: LatestMessages) -> AnyLogits:
        kind = ClassLogits if self.declare_classes else DenseClassLogits
        logits: AnyLogits = newest.messages(kind)
        return logits

    def loss(self, net: Net, batch: Batch, own: Nothing, down: AnyLogits, ctx: Context) -> Tensor:
        """Return the task's loss plus gamma times the mean squared distance to the teacher, ().

        ``batch.x`` is ``(batch, *input)``. The teacher of a row is the mean logits of its class,
        (classes,). A row of a class without a teacher has distance 0.
        """
        logits = net(batch.x)
        distance = (logits - down.mean[batch.y]).square().mean(1) * down.there[batch.y]
        return ctx.task.objective.loss(logits, batch) + self.gamma * weighted_mean(
            distance, batch.mask, batch.weight
        )

    def summarize(
        self, net: Net, batch: Batch, own: Nothing, down: AnyLogits, ctx: Context
    ) -> LogitSums:
        """Return the sums of logits by class over a batch."""
        logits, rows = net(batch.x), (batch.y, batch.mask, ctx.task.num_classes, batch.weight)
        counts = class_sums(torch.ones_like(logits[:, :1]), *rows)
        return LogitSums(class_sums(logits, *rows), counts[:, 0])

    def upload(
        self, net: Net, own: Nothing, sums: LogitSums, down: AnyLogits, ctx: Context
    ) -> tuple[AnyLogits, Nothing]:
        """Return the mean logits of each class that the client has."""
        return self._message(*class_means(sums.total, sums.rows)), own

    def server_update(self, server: Board, replies: Replies, ctx: Context) -> Board:
        """Store each client's newest logits, and average them by class."""
        return self._board(server.newest.with_replies(replies))

    def forget(self, server: Board, client: int, ctx: Context) -> Board:
        """Return the board without a client's logits."""
        return self._board(server.newest.without(client))

    def _board(self, newest: LatestMessages) -> Board:
        logits = self._newest(newest)
        total, count = logits.mean.sum(0), logits.there.sum(0)
        return Board(newest, total, count, ClassLogits(*class_means(total, count)))


def take_logits(stack: AnyLogits, client: int) -> ClassLogits:
    """Return one client's logits from a stack of all, (clients, classes, classes)."""
    return ClassLogits(stack.mean[client], stack.there[client])
