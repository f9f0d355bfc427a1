"""MergedCodist: in every round, pools step along the clients' update and a distilled update.

Lichtarge, Amid, Kumar, Yang, Anil, Mathews, "Heterogeneous federated learning using knowledge
codistillation", algorithm 2 (https://arxiv.org/abs/2310.02549). See docs/methods/merged_codist.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core.bounds import NonNegative, NonNegativeInt, Share
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
from fedgist.errors import MethodError
from fedgist.methods.common import codistillation
from fedgist.methods.common.averaging import Averages, Weights, proximal_loss
from fedgist.methods.common.codistillation import Distillation, Students
from fedgist.methods.common.server_optimizer import ServerMoments, ServerOptimizer
from fedgist.methods.common.server_steps import PseudoGradient, ServerSteps, norm
from fedgist.methods.common.server_training import is_server_stage


@tree
class Server:
    """Server state: the pools' models and moments, the clients' updates, and the students.

    ``grads`` and ``buffers`` hold the aggregated update of this round's clients by pool.
    ``answered`` () is 1 for a pool with replies.
    """

    averages: Averages
    moments: dict[str, ServerMoments]
    grads: dict[str, dict[str, Tensor]]
    buffers: dict[str, dict[str, Tensor]]
    answered: dict[str, Tensor]
    students: Students


@dataclass(frozen=True)
class MergedCodist(Method):
    """Merged codistillation; the default number of steps in a round is the paper's."""

    alpha: Share = 0.5
    """Weight of the clients' update. The distillation has the weight 1 - alpha.

    With 1 nothing is distilled, and the method is FedAdam.
    """
    first_alpha: Share = 1.0
    """Weight in round 1, if ``alpha_rounds`` is above 0.

    It moves evenly to ``alpha``, which it reaches in round ``alpha_rounds`` + 1.
    """
    alpha_rounds: NonNegativeInt = 0
    """Number of first rounds in which the weight moves evenly from ``first_alpha`` to ``alpha``."""
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    """The server's optimizer."""
    distillation: Distillation = field(default_factory=lambda: Distillation(steps=32))
    """How the pools' models learn from each other at the server."""
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
        if self.first_alpha != 1.0 and not self.alpha_rounds:
            raise MethodError("method.first_alpha is read only with method.alpha_rounds above 0")
        self.server.check(task.starts)
        self.distillation.check(task)

    def alpha_of(self, number: int) -> float:
        """Return alpha in round ``number``."""
        left = max(0.0, 1.0 - (number - 1) / self.alpha_rounds) if self.alpha_rounds else 0.0
        return left * self.first_alpha + (1.0 - left) * self.alpha

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"train"`` and, if alpha is below 1, the stages of a distillation."""
        distills = ctx.round > 0 and self.alpha_of(ctx.round) < 1.0
        return super().stages(ctx) + (self.distillation.stages() if distills else ())

    def init_server(self, ctx: Context) -> Server:
        """Return the common initial weights, and gradients of zeros."""
        start, zero = self.exchange.init_server(ctx), torch.zeros((), device=ctx.key.device)
        starts = ctx.task.starts.items()
        return Server(
            start.averages,
            start.moments,
            {name: {n: torch.zeros_like(p) for n, p in net.params.items()} for name, net in starts},
            {name: dict(net.buffers) for name, net in starts},
            dict.fromkeys(ctx.task.starts, zero),
            codistillation.begin(start.averages.weights, ctx),
        )

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
        """Store the clients' updates (line 3), or continue the distillation (lines 4 to 9)."""
        if not is_server_stage(ctx.stage):
            return self._heard(server, replies, ctx)
        frozen, students, stages = server.averages.weights, server.students, self.stages(ctx)
        if ctx.stage == stages[1]:
            students = codistillation.begin(frozen, ctx)  # lines 4 and 5
        if any(bool(flag) for flag in server.answered.values()):  # or nothing to merge
            students = codistillation.learn(students, frozen, self.distillation, ctx)  # line 6
        server = replace(server, students=students)
        return self._merged(server, ctx) if ctx.stage == stages[-1] else server

    def _heard(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Store the updates of pools that answered; without distillation, step along them."""
        if len(self.stages(ctx)) == 1:
            return self.exchange.server_update(server, replies, ctx)
        updates = self.exchange.updates(server, replies, ctx)
        answered = torch.ones((), device=ctx.key.device)
        return replace(
            server,
            grads=server.grads | {name: update.grads for name, update in updates.items()},
            buffers=server.buffers | {name: update.buffers for name, update in updates.items()},
            answered=server.answered | dict.fromkeys(updates, answered),
        )

    def _merged(self, server: Server, ctx: Context) -> Server:
        """Step along g and delta, scaled to the norm of g (lines 7 to 9).

        A pool without replies is unchanged.
        """
        alpha = self.alpha_of(ctx.round)
        for name in (name for name, flag in server.answered.items() if bool(flag)):
            old = server.averages.weights[name].arrays
            student, g = server.students.weights[name].arrays, server.grads[name]
            merged = merge(g, {n: old[n] - student[n] for n in g}, alpha)
            buffers = server.buffers.get(name, {})  # a checkpoint holds no empty tables
            server = self.exchange.step(server, name, PseudoGradient(merged, buffers), ctx)
        silent = dict.fromkeys(server.answered, torch.zeros((), device=ctx.key.device))
        return replace(server, answered=silent)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Return the server's learning rates, alpha and, if distilled, the students' losses."""
        losses = server.students.mean_losses() if len(self.stages(ctx)) > 1 else {}
        rates = self.exchange.rates(ctx) | self.distillation.rates(ctx)
        rates |= {"alpha": self.alpha_of(max(ctx.round, 1))}
        return rates | {f"distillation/{name}": value for name, value in losses.items()}


def merge(g: Mapping[str, Tensor], delta: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Return ``alpha g + (1 - alpha) delta |g| / |delta|`` (line 8); ``alpha g`` if delta is 0."""
    long = norm(delta)
    scale = torch.where(long > 0, norm(g) / long.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    factor = ((1.0 - alpha) * scale).to(next(iter(g.values())).dtype)
    return {name: alpha * g[name] + factor * delta[name] for name in g}
