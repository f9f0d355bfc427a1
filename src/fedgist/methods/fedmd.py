"""FedMD: clients learn the mean of all clients' scores on public rows, then their own rows.

Li, Wang 2019, "FedMD: heterogenous federated learning via model distillation", algorithm 1
(https://arxiv.org/abs/1910.03581). See docs/methods/fedmd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.bounds import NonNegativeInt, PositiveInt
from fedgist.core.message import message
from fedgist.core.method import (
    Batch,
    Context,
    Count,
    Method,
    Net,
    Nothing,
    Order,
    Part,
    Phase,
    Replies,
    Task,
)
from fedgist.core.objectives.target import Target
from fedgist.core.tree import Tree
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import mean_of

FIRST = 2  # the first round with a consensus


@message(reduce="sum")
class Scores:
    """The logits of this round's public rows, (rows, classes)."""

    logits: Tensor


@message(reduce="sum")
class Consensus:
    """The mean logits of the public rows of a round, (rows, classes), and its number, ().

    The number is 0 before any client has answered.
    """

    mean: Tensor
    number: Tensor


@dataclass(frozen=True)
class FedMD(Method):
    """Clients of any architecture send scores of public rows, and learn from the mean of all."""

    rows: NonNegativeInt = 0
    """Public rows that are scored in a round, drawn anew each time. 0: all."""
    digest_epochs: PositiveInt = 1
    """Passes over these rows in which a client learns the mean scores."""
    digest_batch_size: PositiveInt = 128
    """Public rows in a step."""

    keeps: ClassVar[Part] = "all"
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})

    def check(self, task: Task) -> None:
        """Raise MethodError unless there are so many public rows."""
        if self.rows > len(task.public_rows):
            raise MethodError(
                f"method.rows = {self.rows}: there are {len(task.public_rows)} public rows"
            )

    def count(self, task: Task) -> int:
        """Return the number of public rows of a round."""
        return self.rows or len(task.public_rows)

    def chosen(self, number: Tensor, task: Task) -> Tensor:
        """Return the public rows of a round, (rows,): server and clients draw the same."""
        key = random.key(task.public_digest, "public").to(number.device)
        order = random.permutation(random.fold(key, number.long()), len(task.public_rows))
        return order[: self.count(task)]

    def init_server(self, ctx: Context) -> Consensus:
        """Return no consensus."""
        shape, device = (self.count(ctx.task), ctx.task.num_classes), ctx.key.device
        return Consensus(torch.zeros(shape, device=device), torch.zeros((), device=device))

    def download(self, server: Consensus, order: Order, ctx: Context) -> Consensus:
        """Return the consensus."""
        return server

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Digest the consensus, from round 2 on; then revisit the client's own rows."""
        if ctx.round < FIRST:
            return (Phase(),)
        steps = self.digest_epochs * -(-self.count(ctx.task) // self.digest_batch_size)
        return Phase(steps=steps, loss=self.digest), Phase()

    def digest(self, net: Net, batch: Batch, own: Nothing, down: Consensus, ctx: Context) -> Tensor:
        """Return the mean absolute distance of the logits of public rows to the consensus, ().

        A step draws public rows; the client's ``batch`` is not read.
        """
        count = self.count(ctx.task)
        size = min(self.digest_batch_size, count)
        places = random.integers(ctx.draw("digest"), (size,), count)
        rows = self.chosen(down.number, ctx.task)[places]
        present = torch.ones(size, dtype=torch.bool, device=rows.device)
        logits = net.for_rows(present)(ctx.task.public_rows.seen(rows))
        return (logits - down.mean[places]).abs().mean() * (down.number > 0)

    def upload(
        self, net: Net, own: Tree, sums: Count, down: Consensus, ctx: Context
    ) -> tuple[Scores, Tree]:
        """Return the client's logits of this round's public rows."""
        number = torch.full((), float(ctx.round), device=ctx.key.device)
        logits = net(ctx.task.public_rows.seen(self.chosen(number, ctx.task)))
        return Scores(logits), own

    def server_update(self, server: Consensus, replies: Replies, ctx: Context) -> Consensus:
        """Return the mean over the clients that answered."""
        mean = mean_of({"logits": replies.total().logits}, replies, ctx)
        return Consensus(mean["logits"], torch.full_like(server.number, float(ctx.round)))
