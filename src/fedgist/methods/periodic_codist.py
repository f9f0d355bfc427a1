"""PeriodicCodist: pools train separately, and periodically learn from each other's predictions.

Lichtarge, Amid, Kumar, Yang, Anil, Mathews, "Heterogeneous federated learning using knowledge
codistillation", algorithm 1 (https://arxiv.org/abs/2310.02549). See
docs/methods/periodic_codist.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from fedgist.core.bounds import NonNegative, PositiveInt
from fedgist.core.method import (
    Batch,
    Context,
    Method,
    Net,
    Nothing,
    Order,
    Part,
    Replies,
    Task,
)
from fedgist.core.objectives.target import Target
from fedgist.core.tree import tree
from fedgist.methods.common import codistillation
from fedgist.methods.common.averaging import Averages, Weights, proximal_loss
from fedgist.methods.common.codistillation import Distillation, Students
from fedgist.methods.common.server_optimizer import ServerMoments, ServerOptimizer
from fedgist.methods.common.server_steps import ServerSteps
from fedgist.methods.common.server_training import is_server_stage


@tree
class Server:
    """Server state: the pools' models and moments, and the students of a distillation."""

    averages: Averages
    moments: dict[str, ServerMoments]
    students: Students


@dataclass(frozen=True)
class PeriodicCodist(Method):
    """Periodic codistillation; the default period and number of steps are the paper's.

    Every ``period`` rounds the students of a distillation replace the pools' models, and the state
    of the server's optimizers is reset.
    """

    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    """The server's optimizer."""
    distillation: Distillation = field(default_factory=lambda: Distillation(steps=200))
    """How the pools' models learn from each other at the server."""
    period: PositiveInt = 200
    """Number of rounds between two distillations."""
    mu: NonNegative = 0.0
    """Weight of FedProx's proximal term. 0 leaves it out. Raise it if local models drift apart."""

    keeps: ClassVar[Part] = "none"
    targets: ClassVar[frozenset[Target]] = frozenset({"class", "words"})

    @property
    def exchange(self) -> ServerSteps:
        """Weights in both directions; the server steps along the clients' mean update."""
        return ServerSteps(self.server)

    def check(self, task: Task) -> None:
        """Raise MethodError unless there are pools with their rates, and public data."""
        self.server.check(task.starts)
        self.distillation.check(task)

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"train"`` and, every ``period`` rounds, the stages of distillation (line 4)."""
        due = ctx.round > 0 and ctx.round % self.period == 0
        return super().stages(ctx) + (self.distillation.stages() if due else ())

    def init_server(self, ctx: Context) -> Server:
        """Return the common initial weights."""
        start = self.exchange.init_server(ctx)
        students = codistillation.begin(start.averages.weights, ctx)
        return Server(start.averages, start.moments, students)

    def orders(
        self, server: Server, selected: Sequence[Order], ctx: Context
    ) -> Sequence[Order] | None:
        """Return all selected clients; a distillation is the server's own work."""
        return None if is_server_stage(ctx.stage) else selected

    def loss(self, net: Net, batch: Batch, own: Nothing, down: Weights, ctx: Context) -> Tensor:
        """Return the task's loss, plus ``mu / 2 |w - w^t|^2``: a scalar, ().

        ``batch.x`` is ``(batch, *input)``.
        """
        return proximal_loss(self.mu, net, batch, down, ctx)

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Step in each pool (line 3), or continue the distillation (lines 5 to 8)."""
        if not is_server_stage(ctx.stage):
            return self.exchange.server_update(server, replies, ctx)
        frozen, students, stages = server.averages.weights, server.students, self.stages(ctx)
        if ctx.stage == stages[1]:
            students = codistillation.begin(frozen, ctx)  # lines 5 and 6
        students = codistillation.learn(students, frozen, self.distillation, ctx)  # line 7
        server = replace(server, students=students)
        if ctx.stage != stages[-1]:
            return server
        return self.exchange.replaced(server, students.weights, ctx)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Return all learning rates and, after a distillation, the students' losses."""
        losses = server.students.mean_losses() if len(self.stages(ctx)) > 1 else {}
        rates = self.exchange.rates(ctx) | self.distillation.rates(ctx)
        return rates | {f"distillation/{name}": value for name, value in losses.items()}
