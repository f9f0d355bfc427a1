"""FedDF: averages of each architecture learn the mean scores of all clients' models.

Lin, Kong, Stich, Jaggi 2020, "Ensemble distillation for robust model fusion in federated learning",
algorithms 1 and 3 (NeurIPS 2020, https://arxiv.org/abs/2006.07242). See docs/methods/feddf.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedgist.core import random
from fedgist.core.bounds import Positive, PositiveInt
from fedgist.core.counts import COUNTS
from fedgist.core.message import message
from fedgist.core.method import Context, Count, Method, Net, Order, Part, Replies, Reply, Task
from fedgist.core.nets.layers import Pass
from fedgist.core.objectives.target import Target
from fedgist.core.training import Optimizer
from fedgist.core.tree import Tree, map_leaves, tree
from fedgist.methods.common import codistillation
from fedgist.methods.common.averaging import Averages, Averaging, Weights, averaged
from fedgist.methods.common.codistillation import Students
from fedgist.methods.common.server_training import (
    after_steps,
    check_finite,
    check_rows,
    gradient_step,
    is_server_stage,
    stages_of,
    steps_in,
)

AVERAGING = Averaging()
AT_ONCE = 256  # public rows whose scores a model computes at once


@message(reduce="each")
class Model:
    """A client's ``n w`` by name, and its number of rows n, ()."""

    arrays: dict[str, Tensor]
    rows: Tensor = field(metadata=COUNTS)


@tree
class Server:
    """Server state: averages, the clients' mean logits of public rows, and the students.

    ``scores`` are (public rows, classes), of round ``round``, ().
    """

    averages: Averages
    scores: Tensor
    round: Tensor
    students: Students


@tree
class Lesson:
    """A step's public rows (batch, *input), their target (batch, classes), the students' keys."""

    x: Tensor
    target: Tensor
    keys: dict[str, Tensor]


@dataclass(frozen=True)
class Distillation:
    """Settings of the distillation of a round."""

    steps: PositiveInt = 1000
    """Number of Adam steps."""
    batch_size: PositiveInt = 128
    """Number of public rows in a step."""
    lr: Positive = 1e-3
    """Learning rate. It falls to 0 by half a cosine, every 25 steps."""

    def optimizer(self, step: int) -> Optimizer:
        """Return the optimizer from this step on."""
        return Optimizer("adam", lr=self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2)


@dataclass(frozen=True)
class FedDF(Method):
    """Federated averaging within architectures, then distillation from all clients together."""

    distillation: Distillation = field(default_factory=Distillation)
    """How the averages learn from the clients' models at the server."""

    keeps: ClassVar[Part] = "none"
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})

    def check(self, task: Task) -> None:
        """Raise MethodError unless there are public rows enough for a batch."""
        check_rows(task, self.distillation.batch_size, rest=False)

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"train"`` and the stages of the distillation."""
        distills = stages_of(self.distillation.steps) if ctx.round > 0 else ()
        return super().stages(ctx) + distills

    def init_server(self, ctx: Context) -> Server:
        """Return the common initial weights, and no scores."""
        start, device = AVERAGING.init_server(ctx), ctx.key.device
        scores = torch.zeros(len(ctx.task.public_rows), ctx.task.num_classes, device=device)
        students = codistillation.begin(start.weights, ctx)
        return Server(start, scores, torch.zeros((), device=device), students)

    def orders(
        self, server: Server, selected: Sequence[Order], ctx: Context
    ) -> Sequence[Order] | None:
        """Return all selected clients; a distillation is the server's own work."""
        return None if is_server_stage(ctx.stage) else selected

    def download(self, server: Server, order: Order, ctx: Context) -> Weights:
        """Return the weights of the client's architecture."""
        return AVERAGING.download(server.averages, order, ctx)

    def receive(self, net: Net, own: Tree, down: Weights, ctx: Context) -> tuple[Net, Tree]:
        """Return the net with these weights."""
        return AVERAGING.receive(net, own, down, ctx)

    def upload(
        self, net: Net, own: Tree, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Model, Tree]:
        """Return n_k w_k and n_k."""
        return Model({name: sums.rows * a for name, a in net.state().items()}, sums.rows), own

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Average the models and score public rows by each, or continue the distillation."""
        if not is_server_stage(ctx.stage):
            return self._heard(server, replies, ctx)
        if float(server.round) != ctx.round:
            return server  # nobody answered
        stages, students = self.stages(ctx), server.students
        students = self._learned(students, server.scores, ctx)
        server = replace(server, students=students)
        if ctx.stage != stages[-1]:
            return server
        return replace(server, averages=Averages(students.weights))

    def _heard(self, server: Server, replies: Replies, ctx: Context) -> Server:
        weights, scores = dict(server.averages.weights), []
        for name in replies.architectures:
            some, old = replies.by(name), weights[name]
            weights[name] = averaged(some, old, ctx)
            scores += [_scores(reply, old, ctx) for reply in some if float(reply.message.rows) > 0]
        if not scores:
            return server
        number = torch.full_like(server.round, float(ctx.round))
        mean = torch.stack(scores).mean(0)
        return Server(Averages(weights), mean, number, codistillation.begin(weights, ctx))

    def _learned(self, students: Students, scores: Tensor, ctx: Context) -> Students:
        """Return the students after the steps of a stage."""
        nets, numbers = ctx.task.starts, steps_in(ctx.stage, self.distillation.steps)
        optimizer = self.distillation.optimizer(numbers[0])

        def step(students: Students, lesson: Lesson) -> Students:
            weights: dict[str, Weights] = {}
            losses: dict[str, Tensor] = {}
            mask = torch.ones(len(lesson.x), dtype=torch.bool, device=lesson.x.device)
            for name, old in students.weights.items():
                student, run = nets[name].with_arrays(old.arrays), Pass(mask, lesson.keys[name])

                def far(net: Net) -> Tensor:
                    logits = functional.log_softmax(net(lesson.x), -1)
                    return functional.kl_div(logits, lesson.target, reduction="batchmean")

                arrays, loss = gradient_step(student, far, run, optimizer, students.memory[name])
                weights[name], losses[name] = Weights(arrays), students.losses[name] + loss
            return replace(students, weights=weights, losses=losses)

        memory = {name: map_leaves(torch.clone, m) for name, m in students.memory.items()}
        students = replace(students, memory=memory, steps=students.steps + len(numbers))
        students = after_steps(step, students, self._lessons(scores, numbers, ctx))
        for name, learned in students.weights.items():
            check_finite(learned.arrays, f"the average of {name!r}", ctx)
        return students

    def _lessons(self, scores: Tensor, numbers: Sequence[int], ctx: Context) -> Iterator[Lesson]:
        public, names = ctx.task.public_rows, ctx.task.starts
        size = min(self.distillation.batch_size, len(public))
        for number in numbers:
            rows = random.permutation(ctx.draw("batch", number), len(public))[:size]
            keys = {name: ctx.draw("student", name, number) for name in names}
            yield Lesson(public.seen(rows), scores[rows].softmax(-1), keys)

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the model of each architecture."""
        return AVERAGING.models(server.averages, ctx)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Return each student's mean loss in the last distillation."""
        losses = server.students.mean_losses()
        return {f"distillation/{name}": value for name, value in losses.items()}


def _scores(reply: Reply, old: Weights, ctx: Context) -> Tensor:
    """Return the logits of all public rows by a client's model, (public rows, classes)."""
    model = averaged(Replies((), (reply,)), old, ctx)
    net = ctx.task.starts[reply.order.architecture].with_arrays(model.arrays)
    everything = torch.arange(len(ctx.task.public_rows), device=ctx.key.device)
    with torch.no_grad():
        seen = (ctx.task.public_rows.seen(rows) for rows in torch.split(everything, AT_ONCE))
        return torch.cat([net(x) for x in seen])
