"""FedLog-C: FedLog with a contrastive loss, for which clients download the class sums.

Yu, Zhang, Poupart, "FedLog: Personalized federated classification with less communication and more
flexibility", eq. 15 (https://arxiv.org/abs/2407.08337). The paper's symbols are those of
methods/common/conjugate_head.py. See docs/methods/fedlog_c.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedgist.core.bounds import NonNegative
from fedgist.core.losses import weighted_mean
from fedgist.core.message import Nothing
from fedgist.core.method import Batch, Context, Method, Net, Order, Part, Phase, Replies, Task
from fedgist.core.objectives.target import Target
from fedgist.core.privacy import LEAST_WEIGHT, least_count, total_floor
from fedgist.errors import MethodError
from fedgist.methods.common import sum_memory
from fedgist.methods.common.conjugate_head import (
    ClassSums,
    feature_sums,
    map_head,
    random_pseudo_sums,
)
from fedgist.methods.common.linear_head import class_means, one_feature_width
from fedgist.methods.common.sum_memory import ClientSums, Memory, Remembered


@dataclass(frozen=True)
class FedLogC(Method):
    """FedLog with a contrastive loss: the server sends the total S, clients solve for the head.

    The paper gives neither ``alpha`` nor ``beta``. The defaults were chosen on validation data.
    """

    alpha: NonNegative = 0.1
    """Weight of the pull of a row's features toward the mean of its class.

    The right value depends on the size of the features.
    """
    beta: NonNegative = 1e-4
    """Weight of the push of a row's features away from the means of the other classes."""
    nu: NonNegative = 1.0
    """Pseudo-count of the prior of the head. 0 is a flat prior."""
    head_start: Literal["exchange", "random"] = "exchange"
    """The first total.

    ``exchange``: from one exchange with the untrained bodies. ``random``: a total without rows that
    gives a random head.
    """
    memory: Memory = "auto"
    """What the server remembers of clients that are absent from a round.

    A number multiplies the old sums in each round (0 is the paper's algorithm). ``auto`` uses 1
    minus the fraction of clients that answered. ``class`` keeps the sums of classes that nobody
    sent. ``newest`` keeps the newest sums of every client.
    """

    keeps: ClassVar[Part] = "body"
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})
    record_terms: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the bounds, and that a random head has a prior."""
        super().__post_init__()
        if self.head_start == "random" and self.nu == 0:
            raise MethodError(
                "method.head_start = 'random' needs method.nu above 0, not 0: its first head is "
                "the prior's"
            )

    @property
    def accepts_late(self) -> bool:
        """Whether late uploads are used: only with a memory of each client's newest sums."""
        return self.memory == "newest"

    def check(self, task: Task) -> None:
        """Raise MethodError unless all bodies have one feature width and all heads a bias."""
        one_feature_width(task, "fedlog_c")
        sum_memory.check(self.memory, task, "fedlog_c")

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"train"``; in round 0 ``"exchange"``, if ``head_start`` is ``"exchange"``."""
        if ctx.round == 0:
            return ("exchange",) if self.head_start == "exchange" else ()
        return ("train",)

    def init_server(self, ctx: Context) -> Remembered:
        """Return a pseudo-sum with a random head and no rows."""
        shape = (ctx.task.num_classes, one_feature_width(ctx.task, "fedlog_c") + 1)
        start = random_pseudo_sums(ctx.draw("head"), shape, self.nu)
        return sum_memory.start(self.memory, start, ctx)

    def download(self, server: Remembered, order: Order, ctx: Context) -> ClassSums | Nothing:
        """Return the remembered total; in the exchange before training, nothing."""
        return Nothing() if ctx.stage == "exchange" else ClassSums(server.total)

    def receive(
        self, net: Net, own: Nothing, down: ClassSums | Nothing, ctx: Context
    ) -> tuple[Net, Nothing]:
        """Return the net with the MAP head (eq. 14) of the total installed."""
        if isinstance(down, Nothing):
            return net, own
        eta = map_head(down.total.to(torch.float64), self.nu).to(down.total.dtype)
        return net.with_head(eta[:, 1:], eta[:, 0]), own

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return one phase in which only the body learns."""
        if ctx.stage == "exchange":
            return ()
        return (Phase(("body",)),)

    def loss(self, net: Net, batch: Batch, own: Nothing, down: ClassSums, ctx: Context) -> Tensor:
        """Return the task's loss plus alpha times the pull minus beta times the push (eq. 15), ().

        ``batch.x`` is ``(batch, *input)``.
        """
        z = net.features(batch.x)
        task_loss = ctx.task.objective.loss(net.logits(z), batch)
        privacy = ctx.task.privacy
        floor, least = total_floor(privacy, ctx.task.num_clients), least_count(privacy)
        rows = batch.y, batch.mask
        pull, push = pull_and_push(z, *rows, down.total, batch.weight, floor, least)
        return task_loss + self.alpha * pull - self.beta * push

    def summarize(
        self, net: Net, batch: Batch, own: Nothing, down: ClassSums | Nothing, ctx: Context
    ) -> ClassSums:
        """Return S over a batch (eq. 2)."""
        return feature_sums(net, batch, ctx.task)

    def upload(
        self, net: Net, own: Nothing, sums: ClassSums, down: ClassSums | Nothing, ctx: Context
    ) -> tuple[ClassSums | ClientSums, Nothing]:
        """Return S over all local rows."""
        return sum_memory.sent(self.memory, sums), own

    def server_update(self, server: Remembered, replies: Replies, ctx: Context) -> Remembered:
        """Return the total, including the remembered sums of absent clients."""
        return sum_memory.remember(self.memory, server, replies, ctx)

    def forget(self, server: Remembered, client: int, ctx: Context) -> Remembered:
        """Return the total without one client's sums."""
        return sum_memory.forget(self.memory, server, client)


def pull_and_push(
    z: Tensor,
    y: Tensor,
    mask: Tensor,
    s: Tensor,
    weight: Tensor | None = None,
    floor: float = 0.0,
    least: float = LEAST_WEIGHT,
) -> tuple[Tensor, Tensor]:
    """Return the two sums of eq. 15, each divided by the number of rows, both ().

    ``z`` (batch, m) are features, ``y``, ``mask`` and, if given, ``weight`` are (batch,). ``s``
    (classes, m + 1) are the class sums. A class has more than ``floor`` rows, else it is left out,
    and its sum is divided by ``least`` of them at least. The pull is the mean over rows of ``|phi -
    mu_y|^2``. The push is the mean over rows of the sum, over the other classes y', of ``min(|phi -
    mu_y'|^2, r)``. r is the mean squared distance between two class means: without r, eq. 15 has no
    lower bound.
    """
    present = s[:, 0] > floor
    means, _ = class_means(s[:, 1:], s[:, 0], floor, least)
    distances = z.square().sum(1, keepdim=True) - 2 * z @ means.T + means.square().sum(1)
    own_class = one_hot(y, len(s)).to(z.dtype)
    pull = (distances * own_class * present).sum(1)
    push = (distances.clamp(max=mean_distance(means, present)) * (1 - own_class) * present).sum(1)
    return weighted_mean(pull, mask, weight), weighted_mean(push, mask, weight)


def mean_distance(means: Tensor, present: Tensor) -> Tensor:
    """Return the mean squared distance, (), between two different rows of ``means`` (classes, m).

    Only rows with ``present`` (classes,) are used. For k points the mean is 2 / (k - 1) times the
    sum of their squared distances to their center.
    """
    count, weight = present.sum(), present.unsqueeze(1).to(means.dtype)
    center = (means * weight).sum(0) / count.clamp(min=1)
    spread = ((means - center).square() * weight).sum()
    return 2 * spread / (count - 1).clamp(min=1)
