"""Ensemble similarity distillation: what encoders say of public rows, and a student that learns it.

Shi, Yu, Liu, Pang, Li, Wang 2021, "Towards communication-efficient and privacy-preserving federated
representation learning" (FLESD), equations 4 to 9. Of representations the N x N matrix of
similarities is never made: its rows are worked out as they are needed, at the places in the queue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, normalize

from fedgist.core import random
from fedgist.core.bounds import NonNegative, Positive, PositiveInt, Share, Temperature
from fedgist.core.layers import Pass
from fedgist.core.net import Net
from fedgist.core.optim import OptimizerState
from fedgist.core.optimizer import Optimizer
from fedgist.core.server_training import (
    check_finite,
    descended,
    fresh_memory,
    stages_of,
    steps_in,
)
from fedgist.core.task import Context, Task
from fedgist.core.tree import map_leaves, take, tree
from fedgist.errors import MethodError

ROWS_AT_ONCE = 256  # that an encoder looks at together
NOTHING = torch.finfo(torch.float32).min  # the logarithm of a similarity that nobody sent
Outlook = Literal["projection", "features"]  # which of a net's numbers are compared


def embedding(net: Net, x: Tensor, of: Outlook) -> Tensor:
    """Return what a net makes of ``x`` (batch, ...), with length 1: (batch, d)."""
    return normalize(net(x) if of == "projection" else net.features(x), dim=-1)


def representations(net: Net, task: Task, of: Outlook) -> Tensor:
    """Return R (N, d), the embeddings of all public rows: a row each, where the paper has columns.

    They are not augmented. It can be stacked: the public rows are the same for everybody.
    """
    public = task.public_rows
    if any(p.is_meta for p in net.params.values()):  # only the form is asked for
        x = torch.empty(len(public), *task.input_shape, device="meta")
        return embedding(net, x, of)
    pieces = torch.split(torch.arange(len(public)), ROWS_AT_ONCE)
    batches = (take(public.batch(piece.unsqueeze(0)), 0).x for piece in pieces)
    return torch.cat([embedding(net, x, of) for x in batches])


@tree
class Queue:
    """The anchors: embeddings of public rows (m, d), oldest first, and whose they are, (m,)."""

    anchors: Tensor
    places: Tensor

    def taking(self, newest: Tensor, rows: Tensor) -> Queue:
        """Return the queue after ``newest`` (batch, d), which are of ``rows``, took the oldest."""
        size = len(self.places)
        anchors, places = torch.cat([self.anchors, newest]), torch.cat([self.places, rows])
        return Queue(anchors[-size:], places[-size:])


@tree
class Student:
    """The student on its way: its arrays, its optimizer's memory, and the encoder that follows it.

    ``momentum`` are the parameters of the latter; ``order`` is the key of the batches; ``losses``
    is their sum over ``steps``.
    """

    arrays: dict[str, Tensor]
    memory: OptimizerState
    momentum: dict[str, Tensor]
    queue: Queue
    order: Tensor
    losses: Tensor
    steps: Tensor


@tree
class Ensemble:
    """What clients sent of the public rows.

    ``slots`` (clients, N, d) are their representations, narrower ones filled up with zeros, and
    ``filled`` (clients,) is 1 where there is one; ``total`` (N, N) is ``ln sum_k exp(M_k / tau_T)``
    of similarities that were sent themselves, ``NOTHING`` where none was. One of both is empty.
    """

    slots: Tensor
    filled: Tensor
    total: Tensor

    def count(self) -> int:
        """Return of how many clients it is."""
        return int(self.filled.sum())

    def logarithms(self, rows: Tensor, places: Tensor, temperature: float) -> Tensor:
        """Return ``ln M_ij`` (eqs. 4 to 6) for i in ``rows`` and j in ``places``, up to a summand.

        The exponentials themselves would vanish where ``temperature`` is low.
        """
        if self.total.numel():
            return self.total[rows][:, places]
        out = torch.full((len(rows), len(places)), NOTHING, device=self.slots.device)
        for slot in self.slots[: self.count()]:
            out = torch.logaddexp(out, slot[rows] @ slot[places].mT / temperature)
        return out


@dataclass(frozen=True)
class SimilarityDistillation:
    """How a student learns the similarities of the ensemble, by Adam on the public rows.

    Each batch is compared with a queue of anchors. An encoder that follows the student by
    ``momentum`` makes the anchors.
    """

    epochs: PositiveInt = 200
    """Number of passes over the public rows in one distillation."""
    batch_size: PositiveInt = 128
    """Number of public rows per step."""
    lr: Positive = 1e-3
    """Learning rate of the distillation."""
    weight_decay: NonNegative = 0.0
    """Weight decay of the distillation."""
    target_temperature: Temperature = 0.1
    """Temperature of the ensemble's similarities (tau_T in the paper)."""
    temperature: Temperature = 0.1
    """Temperature of the student's similarities (tau_S in the paper)."""
    momentum: Share = 0.999
    """Momentum (zeta) of the encoder that makes the anchors.

    Lower it for short distillations: with 0.999 the encoder needs thousands of steps.
    """
    queue: PositiveInt = 2048
    """Maximum number of anchors."""
    own_anchor: bool = True
    """Whether every row is also its own anchor, as in the paper.

    If true, the queue takes a batch before the loss. If false, it takes the batch after the step.
    """

    def check(self, task: Task) -> None:
        """Raise MethodError if the public rows are too few for anchors."""
        rows = len(task.public_rows)
        if self.own_anchor and self.queue < min(self.batch_size, rows):
            raise MethodError(
                f"method.distillation.queue = {self.queue} must hold a batch of "
                f"{self.batch_size} rows, where each is its own anchor"
            )
        if rows <= (1 if self.own_anchor else self.batch_size):
            raise MethodError(
                f"method.distillation.batch_size = {self.batch_size} leaves no anchors: "
                f"there are {rows} public rows"
            )

    def steps(self, task: Task) -> int:
        """Return how many steps a distillation has."""
        return self.epochs * self._steps_per_epoch(task)

    def stages(self, task: Task) -> tuple[str, ...]:
        """Return the stages that a distillation is cut into."""
        return stages_of(self.steps(task))

    def anchors(self, task: Task) -> int:
        """Return how many anchors there are, at most one for each row.

        Without ``own_anchor`` none of a batch's rows is among those just before it.
        """
        rows = len(task.public_rows)
        return min(self.queue, rows if self.own_anchor else rows - self.batch_size)

    def idle(self, net: Net | None, task: Task, width: int, device: torch.device) -> Student:
        """Return a student before its first distillation, without arrays where it is not known."""
        params = {} if net is None else dict(net.params)
        anchors = torch.zeros(self.anchors(task), width, device=device)
        queue = Queue(anchors, torch.zeros(len(anchors), dtype=torch.int64, device=device))
        zero, key = (
            torch.zeros((), device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )
        arrays = {} if net is None else net.state()
        return Student(arrays, fresh_memory(params), params, queue, key, zero, zero)

    def begin(self, net: Net, of: Outlook, ctx: Context) -> Student:
        """Return a student that is ``net``, the encoder that follows it, and a full queue."""
        public, m = ctx.task.public_rows, self.anchors(ctx.task)
        places = random.permutation(ctx.draw("queue"), len(public))[:m]
        anchors = [
            self._anchors(net, piece, ctx.draw("queue", number), of, ctx.task)
            for number, piece in enumerate(torch.split(places, self.batch_size))
        ]
        zero = torch.zeros((), device=ctx.key.device)
        queue, memory = Queue(torch.cat(anchors), places), fresh_memory(net.params)
        key = ctx.draw("order")
        return Student(net.state(), memory, dict(net.params), queue, key, zero, zero)

    def learn(
        self, student: Student, ensemble: Ensemble, start: Net, of: Outlook, ctx: Context
    ) -> Student:
        """Return the student after the steps of a stage; ``start`` is any net of its kind."""
        student = replace(student, memory=map_leaves(torch.clone, student.memory))
        for number in steps_in(ctx.stage, self.steps(ctx.task)):
            student = self.step(student, ensemble, start, of, number, ctx)
        check_finite(student.arrays, "the student", ctx)
        return student

    def step(
        self,
        student: Student,
        ensemble: Ensemble,
        start: Net,
        of: Outlook,
        number: int,
        ctx: Context,
    ) -> Student:
        """Return the student after one step."""
        rows, key = self.rows_of(student, number, ctx.task), ctx.draw("step", number)
        x, run = self._views(rows, key, ctx.task)
        net, queue = start.having(student.arrays), student.queue
        if self.own_anchor:
            follower = net.having(student.momentum)
            queue = queue.taking(self._anchors(follower, rows, key, of, ctx.task), rows)
        hidden = self.hidden(rows, queue.places)
        target = self.target(ensemble, rows, queue.places, hidden)

        def loss(net: Net) -> Tensor:
            return self.divergence(embedding(net, x, of), queue.anchors, hidden, target)

        optimizer = Optimizer("adam", lr=self.lr, weight_decay=self.weight_decay)
        arrays, value = descended(net, loss, run, optimizer, student.memory)
        zeta = self.momentum
        momentum = {n: zeta * old + (1 - zeta) * arrays[n] for n, old in student.momentum.items()}
        if not self.own_anchor:
            follower = start.having(arrays | momentum)
            queue = queue.taking(self._anchors(follower, rows, key, of, ctx.task), rows)
        return replace(
            student,
            arrays=arrays,
            momentum=momentum,
            queue=queue,
            losses=student.losses + value,
            steps=student.steps + 1,
        )

    def hidden(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return which anchors a row is not compared with, (batch, m): other copies of itself.

        With ``own_anchor`` its newest copy, among the last of the queue, is not hidden.
        """
        same = rows.unsqueeze(1) == places
        if self.own_anchor:
            same[:, -len(rows) :] = False
        return same

    def target(self, ensemble: Ensemble, rows: Tensor, places: Tensor, hidden: Tensor) -> Tensor:
        """Return ``p^i_j`` (eq. 7), (batch, m), over the anchors that are not hidden."""
        logs = ensemble.logarithms(rows, places, self.target_temperature)
        logs = logs.masked_fill(hidden, NOTHING)
        return torch.softmax(logs, 1) * (logs.amax(1, keepdim=True) > NOTHING)

    def divergence(self, made: Tensor, anchors: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the mean ``KL(p^i || q^i)`` (eqs. 8 and 9) of embeddings ``made`` (batch, d)."""
        q = made @ anchors.mT / self.temperature
        q = q.masked_fill(hidden, torch.finfo(q.dtype).min)
        return kl_div(log_softmax(q, 1), target, reduction="none").sum(1).mean()

    def _steps_per_epoch(self, task: Task) -> int:
        return -(-len(task.public_rows) // self.batch_size)

    def rows_of(self, student: Student, number: int, task: Task) -> Tensor:
        """Return the rows of a step: each epoch goes through all in an order of its own."""
        epoch, place = divmod(number, self._steps_per_epoch(task))
        order = random.permutation(random.fold(student.order, epoch), len(task.public_rows))
        return torch.split(order, self.batch_size)[place]

    def _views(self, rows: Tensor, key: Tensor, task: Task) -> tuple[Tensor, Pass]:
        """Return augmented rows, and the pass in which a net looks at them."""
        batch = take(task.public_rows.batch(rows.unsqueeze(0), key.unsqueeze(0)), 0)
        return batch.x, Pass(batch.mask, random.fold(key, "pass"), whole=True)

    def _anchors(self, net: Net, rows: Tensor, key: Tensor, of: Outlook, task: Task) -> Tensor:
        """Return a net's embeddings of augmented rows, normed as in training: (batch, d)."""
        x, run = self._views(rows, key, task)
        with torch.no_grad():
            return embedding(replace(net, run=run), x, of)
