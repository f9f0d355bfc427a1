"""FedLog: clients share sums of features, and the server solves for one linear head exactly.

Yu, Zhang, Poupart, "FedLog: Personalized federated classification with less communication and more
flexibility" (https://arxiv.org/abs/2407.08337). The paper's symbols are those of
methods/common/conjugate_head.py. For numbers and for several labels, the same algebra has other
statistics: methods/common/solved_head.py. See docs/methods/fedlog.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.bounds import NonNegative
from fedgist.core.message import Nothing
from fedgist.core.method import Batch, Context, Method, Net, Order, Part, Phase, Replies, Task
from fedgist.core.objectives.target import Target
from fedgist.core.privacy import of_records
from fedgist.core.tree import tree
from fedgist.errors import MethodError
from fedgist.methods.common import sum_memory
from fedgist.methods.common.conjugate_head import ClassSums
from fedgist.methods.common.linear_head import (
    COSINE,
    WIRES,
    LinearHead,
    one_feature_width,
    unit_rows,
)
from fedgist.methods.common.solved_head import check_target, solved_head, statistics
from fedgist.methods.common.sum_memory import ClientSums, Memory, Remembered


@tree
class Server:
    """Server state: the head, (outputs, m + 1), and the sums that determine the head."""

    eta: Tensor
    sums: Remembered


@dataclass(frozen=True)
class FedLog(Method):
    """FedLog with the exact head; the defaults are the paper's."""

    nu: NonNegative = 1.0
    """Pseudo-count of the prior of the head; of numbers, the ridge penalty. 0 is a flat prior."""
    head_start: Literal["random", "exchange"] = "random"
    """The first head: random numbers, or the result of one exchange with the untrained bodies."""
    wire: Literal["float32", "float64"] = "float32"
    """Type of the numbers that clients send: float64 doubles the bytes and keeps all digits."""
    memory: Memory = "auto"
    """What the server remembers of clients that are absent from a round.

    A number multiplies the old sums in each round (0 is the paper's algorithm). ``auto`` uses 1
    minus the fraction of clients that answered. ``class`` keeps the sums of classes that nobody
    sent. ``newest`` keeps the newest sums of every client.
    """

    private_head: Literal["exact", "cosine"] = "exact"
    """The head with privacy of records, over frozen bodies: the paper's, or another one.

    ``cosine`` compares rows with the directions of class sums, all rows having the clip's length.
    """

    keeps: ClassVar[Part] = "body"
    targets: ClassVar[frozenset[Target]] = frozenset({"class", "numbers", "labels"})
    record_terms: ClassVar[int] = 1

    @property
    def accepts_late(self) -> bool:
        """Whether late uploads are used: only with a memory of each client's newest sums."""
        return self.memory == "newest"

    def check(self, task: Task) -> None:
        """Raise MethodError unless all bodies have one feature width and all heads a bias.

        Heads of numbers and labels are refused under privacy, and where they would not be exact.
        """
        one_feature_width(task, "fedlog")
        check_target(task, "fedlog")
        sum_memory.check(self.memory, task, "fedlog")
        if self.private_head == "cosine" and any(start.body for start in task.starts.values()):
            raise MethodError("method.private_head = 'cosine' is for frozen bodies: use 'exact'")

    def notes(self, task: Task) -> tuple[str, ...]:
        """Return a note if all bodies are frozen: then another head is better."""
        if self.private_head == "cosine" and not of_records(task.privacy):
            return ("method.private_head is read with privacy.unit = 'record' alone",)
        frozen = all(s.arch.frozen is not None and not s.body for s in task.starts.values())
        if not frozen or task.objective.target != "class":
            return ()
        better = "method.name = 'analytic' finds a better head of their features in one exchange"
        return (f"all bodies are frozen: {better}",)

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"train"``; in round 0 ``"exchange"``, if ``head_start`` is ``"exchange"``."""
        if ctx.round == 0:
            return ("exchange",) if self.head_start == "exchange" else ()
        return ("train",)

    def init_server(self, ctx: Context) -> Server:
        """Return a random head (Alg. 1) and no sums."""
        width = one_feature_width(ctx.task, "fedlog")
        eta = random.normal(ctx.draw("head"), (ctx.task.num_classes, width + 1))
        if ctx.task.objective.target != "class":  # outputs of the size of standardized numbers
            eta = eta / math.sqrt(width + 1)
        shape = solved_head(ctx.task, width).shape
        zeros = torch.zeros(shape, dtype=WIRES[self.wire], device=eta.device)
        return Server(eta, sum_memory.start(self.memory, zeros, ctx))

    def download(self, server: Server, order: Order, ctx: Context) -> LinearHead | Nothing:
        """Return the head; in the exchange before training, nothing."""
        return Nothing() if ctx.stage == "exchange" else LinearHead(server.eta)

    def receive(
        self, net: Net, own: Nothing, down: LinearHead | Nothing, ctx: Context
    ) -> tuple[Net, Nothing]:
        """Return the net with the head installed."""
        return (net if isinstance(down, Nothing) else net.with_head(down.weight, down.bias)), own

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return one phase in which only the body learns (eq. 12)."""
        if ctx.stage == "exchange":
            return ()
        return (Phase(("body",)),)

    def summarize(
        self, net: Net, batch: Batch, own: Nothing, down: LinearHead | Nothing, ctx: Context
    ) -> ClassSums:
        """Return S over a batch (eq. 2)."""
        alike = self.private_head == "cosine"
        return ClassSums(statistics(net, batch, ctx.task, alike=alike).to(WIRES[self.wire]))

    def upload(
        self, net: Net, own: Nothing, sums: ClassSums, down: LinearHead | Nothing, ctx: Context
    ) -> tuple[ClassSums | ClientSums, Nothing]:
        """Return S over all local rows."""
        return sum_memory.sent(self.memory, sums), own

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Return the MAP head (eq. 14) of the remembered sums."""
        return self._solved(
            server, sum_memory.remember(self.memory, server.sums, replies, ctx), ctx
        )

    def forget(self, server: Server, client: int, ctx: Context) -> Server:
        """Return the head of the sums without one client's."""
        return self._solved(server, sum_memory.forget(self.memory, server.sums, client), ctx)

    def _solved(self, server: Server, sums: Remembered, ctx: Context) -> Server:
        s, privacy = sums.total.to(torch.float64), ctx.task.privacy
        if self.private_head == "cosine" and privacy is not None:
            weight = COSINE / privacy.clip * unit_rows(s[:, 1:])
            eta = torch.cat([torch.zeros_like(weight[:, :1]), weight], dim=1)
            return Server(eta.to(server.eta.dtype), sums)
        eta = solved_head(ctx.task, server.eta.shape[1] - 1).solve(s, self.nu)
        return Server(eta.to(server.eta.dtype), sums)
