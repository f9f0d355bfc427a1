"""FLESD: clients send their encoders' representations of public rows, and a student distills them.

Shi, Yu, Liu, Pang, Li, Wang 2021, "Towards communication-efficient and privacy-preserving federated
representation learning", algorithm 1 and equations 4 to 9 (https://arxiv.org/abs/2109.14611). The N
x N matrix of similarities is never stored as a whole: its rows are computed when they are needed,
for the rows in the queue. See docs/methods/flesd.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, normalize, pad

from fedgist.core import random
from fedgist.core.bounds import Fraction, NonNegative, Positive, PositiveInt, Share, Temperature
from fedgist.core.message import message
from fedgist.core.method import (
    ClientInfo,
    Context,
    Count,
    Method,
    Net,
    Nothing,
    Order,
    Replies,
    Task,
)
from fedgist.core.nets.layers import Pass
from fedgist.core.objectives.target import Target
from fedgist.core.optim import OptimizerState
from fedgist.core.sampling import drawn_clients
from fedgist.core.training import Optimizer
from fedgist.core.tree import map_leaves, take, tree
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Weights
from fedgist.methods.common.server_training import (
    after_steps,
    check_finite,
    check_rows,
    fresh_memory,
    gradient_step,
    is_server_stage,
    stages_of,
    steps_in,
)

ENCODED_AT_ONCE = 256  # the batch size of an encoder in evaluation
NOTHING = torch.finfo(torch.float32).min  # the logarithm of a similarity that no client sent
Outlook = Literal["projection", "features"]  # the outputs of a net that are compared


def embedding(net: Net, x: Tensor, of: Outlook) -> Tensor:
    """Return the normalized output of a net for ``x`` (batch, ...): (batch, d)."""
    return normalize(net(x) if of == "projection" else net.features(x), dim=-1)


def representations(net: Net, task: Task, of: Outlook) -> Tensor:
    """Return R (N, d), the embeddings of all public rows, one row each (the paper has columns).

    The public rows are not augmented. The function can be stacked: all clients share the public
    rows.
    """
    public = task.public_rows
    device = next(iter(net.params.values())).device
    if device.type == "meta":  # only shapes are needed
        x = torch.empty(len(public), *task.input_shape, device=device)
        return embedding(net, x, of)
    pieces = torch.split(torch.arange(len(public), device=device), ENCODED_AT_ONCE)
    batches = (take(public.batch(piece.unsqueeze(0)), 0).x for piece in pieces)
    return torch.cat([embedding(net, x, of) for x in batches])


@tree
class Queue:
    """The anchors: embeddings of public rows (m, d), oldest first, and their rows' numbers (m,)."""

    anchors: Tensor
    places: Tensor

    def taking(self, newest: Tensor, rows: Tensor) -> Queue:
        """Return the queue after ``newest`` (batch, d) of ``rows`` (batch,) replaced the oldest."""
        size = len(self.places)
        anchors, places = torch.cat([self.anchors, newest]), torch.cat([self.places, rows])
        return Queue(anchors[-size:], places[-size:])


@tree
class Student:
    """The state of a distillation: the student's arrays, its optimizer and the momentum encoder.

    ``momentum`` are the parameters of the momentum encoder. ``order`` () is the key of the batches.
    ``losses`` () is the sum of the losses over ``steps`` ().
    """

    arrays: dict[str, Tensor]
    memory: OptimizerState
    momentum: dict[str, Tensor]
    queue: Queue
    order: Tensor
    losses: Tensor
    steps: Tensor


@tree
class Lesson:
    """Augmented public rows ``x`` (batch, ...), their numbers ``rows`` (batch,), and a key ()."""

    rows: Tensor
    x: Tensor
    mask: Tensor
    key: Tensor

    @property
    def run(self) -> Pass:
        """A new training pass of a net on these rows."""
        return Pass(self.mask, self.key, whole=True)


@tree
class Ensemble:
    """The clients' uploads on the public rows: representations or similarities; the other is empty.

    ``slots`` (clients, N, d) are representations, padded with zeros to one width. ``filled``
    (clients,) is 1 for a used slot. ``total`` (N, N) is ``ln sum_k exp(M_k / tau_T)`` of
    similarities that clients sent, with ``NOTHING`` for pairs that no client sent.
    """

    slots: Tensor
    filled: Tensor
    total: Tensor

    def count(self) -> int:
        """Return the number of clients in the ensemble, which waits for a GPU."""
        return int(self.filled.sum())

    def first(self, count: int) -> Ensemble:
        """Return the ensemble with its first ``count`` slots only."""
        return replace(self, slots=self.slots[:count], filled=self.filled[:count])

    def logarithms(self, rows: Tensor, places: Tensor, temperature: float) -> Tensor:
        """Return ``ln M_ij`` (eqs. 4 to 6), (rows, places), up to a summand; every slot is used.

        i are the ``rows`` (rows,) and j the ``places`` (places,). The exponentials themselves would
        underflow at a low ``temperature``.
        """
        if self.total.numel():
            return self.total[rows][:, places]
        out = torch.full((len(rows), len(places)), NOTHING, device=self.slots.device)
        for slot in self.slots:
            out = torch.logaddexp(out, slot[rows] @ slot[places].mT / temperature)
        return out


@dataclass(frozen=True)
class SimilarityDistillation:
    """Settings of the similarity distillation of a student, by Adam on the public rows.

    Each batch is compared with a queue of anchors. A momentum encoder, which follows the student,
    makes the anchors.
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
        check_rows(task, self.batch_size, rest=True)

    def steps(self, task: Task) -> int:
        """Return the number of steps of a distillation."""
        return self.epochs * -(-len(task.public_rows) // self.batch_size)

    def stages(self, task: Task) -> tuple[str, ...]:
        """Return the stages of a distillation."""
        return stages_of(self.steps(task))

    def anchors(self, task: Task) -> int:
        """Return the number of anchors, at most one per row.

        Without ``own_anchor``, no row of a batch is among the anchors just before the batch.
        """
        rows = len(task.public_rows)
        return min(self.queue, rows if self.own_anchor else rows - self.batch_size)

    def idle(self, net: Net | None, task: Task, width: int, device: torch.device) -> Student:
        """Return a student before its first distillation, without arrays if ``net`` is None."""
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
        """Return a student that equals ``net``, its momentum encoder, and a full queue."""
        public, m = ctx.task.public_rows, self.anchors(ctx.task)
        places = random.permutation(ctx.draw("queue"), len(public))[:m]
        anchors = [
            _anchors(net, _lesson(piece, ctx.draw("queue", number), ctx.task), of)
            for number, piece in enumerate(torch.split(places, self.batch_size))
        ]
        zero = torch.zeros((), device=ctx.key.device)
        queue, memory = Queue(torch.cat(anchors), places), fresh_memory(net.params)
        key = ctx.draw("order")
        return Student(net.state(), memory, dict(net.params), queue, key, zero, zero)

    def learn(
        self, student: Student, ensemble: Ensemble, start: Net, of: Outlook, ctx: Context
    ) -> Student:
        """Return the student after a stage; ``start`` is any net of the student's architecture.

        Every slot of the ``ensemble`` is used.
        """
        student = replace(student, memory=map_leaves(torch.clone, student.memory))

        def step(student: Student, lesson: Lesson) -> Student:
            return self.step(student, ensemble, start, of, lesson)

        numbers = steps_in(ctx.stage, self.steps(ctx.task))
        student = after_steps(step, student, self.lessons(student, numbers, ctx))
        check_finite(student.arrays, "the student", ctx)
        return student

    def lessons(self, student: Student, numbers: Iterable[int], ctx: Context) -> Iterator[Lesson]:
        """Yield the lessons of these steps: each epoch has its own random order of all rows."""
        public = len(ctx.task.public_rows)
        per_epoch = -(-public // self.batch_size)
        epochs: dict[int, tuple[Tensor, ...]] = {}
        for number in numbers:
            epoch, place = divmod(number, per_epoch)
            if epoch not in epochs:
                order = random.permutation(random.fold(student.order, epoch), public)
                epochs[epoch] = torch.split(order, self.batch_size)
            yield _lesson(epochs[epoch][place], ctx.draw("step", number), ctx.task)

    def step(
        self,
        student: Student,
        ensemble: Ensemble,
        start: Net,
        of: Outlook,
        lesson: Lesson,
    ) -> Student:
        """Return the student after one step; its optimizer's state is updated in place."""
        rows, net, queue = lesson.rows, start.with_arrays(student.arrays), student.queue
        if self.own_anchor:
            follower = net.with_arrays(student.momentum)
            queue = queue.taking(_anchors(follower, lesson, of), rows)
        hidden = self.hidden(rows, queue.places)
        target = self.target(ensemble, rows, queue.places, hidden)

        def loss(net: Net) -> Tensor:
            return self.divergence(embedding(net, lesson.x, of), queue.anchors, hidden, target)

        optimizer = Optimizer("adam", lr=self.lr, weight_decay=self.weight_decay)
        arrays, value = gradient_step(net, loss, lesson.run, optimizer, student.memory)
        zeta = self.momentum
        momentum = {n: zeta * old + (1 - zeta) * arrays[n] for n, old in student.momentum.items()}
        if not self.own_anchor:
            follower = start.with_arrays(arrays | momentum)
            queue = queue.taking(_anchors(follower, lesson, of), rows)
        return replace(
            student,
            arrays=arrays,
            momentum=momentum,
            queue=queue,
            losses=student.losses + value,
            steps=student.steps + 1,
        )

    def hidden(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return which anchors are excluded for a row, (batch, m): other copies of the same row.

        ``rows`` are (batch,) and ``places`` (m,). With ``own_anchor`` the newest copy, at the end
        of the queue, is not excluded.
        """
        same = rows.unsqueeze(1) == places
        if self.own_anchor:
            same[:, -len(rows) :] = False
        return same

    def target(self, ensemble: Ensemble, rows: Tensor, places: Tensor, hidden: Tensor) -> Tensor:
        """Return ``p^i_j`` (eq. 7), (batch, m), over the anchors that are not excluded.

        ``rows`` are (batch,), ``places`` (m,) and ``hidden`` (batch, m).
        """
        logs = ensemble.logarithms(rows, places, self.target_temperature)
        logs = logs.masked_fill(hidden, NOTHING)
        return torch.softmax(logs, 1) * (logs.amax(1, keepdim=True) > NOTHING)

    def divergence(self, made: Tensor, anchors: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the mean ``KL(p^i || q^i)`` (eqs. 8 and 9), (), of embeddings ``made`` (batch, d).

        ``anchors`` are (m, d); ``hidden`` and ``target`` are (batch, m).
        """
        q = made @ anchors.mT / self.temperature
        q = q.masked_fill(hidden, torch.finfo(q.dtype).min)
        return kl_div(log_softmax(q, 1), target, reduction="none").sum(1).mean()


def _lesson(rows: Tensor, key: Tensor, task: Task) -> Lesson:
    """Return augmented public rows, of these numbers (batch,)."""
    batch = take(task.public_rows.batch(rows.unsqueeze(0), key.unsqueeze(0)), 0)
    return Lesson(rows, batch.x, batch.mask, random.fold(key, "pass"))


def _anchors(net: Net, lesson: Lesson, of: Outlook) -> Tensor:
    """Return a net's embeddings of the rows, (batch, d), with training batch norm."""
    with torch.no_grad():
        return embedding(replace(net, run=lesson.run), lesson.x, of)


MOST = 127  # of an int8


@message(reduce="each")
class PublicRepresentations:
    """R_k (N, d), float32 or float16, and a digest of the public rows, ()."""

    values: Tensor
    digest: Tensor


@message(reduce="each")
class Quantized:
    """R_k as int8 (N, d) times a scale of each row, (N,), and a digest of the public rows, ()."""

    values: Tensor
    scales: Tensor
    digest: Tensor


@message(reduce="each")
class Similarities:
    """M_k (N, N), and a digest of the public rows, ()."""

    values: Tensor
    digest: Tensor


@message(reduce="each")
class Nearest:
    """The k largest similarities of each row, their columns (both (N, k)), and the digest, ()."""

    values: Tensor
    places: Tensor
    digest: Tensor


Upload: TypeAlias = PublicRepresentations | Quantized | Similarities | Nearest


@tree
class Server:
    """Server state: the student, whose arrays are the global model, and the clients' uploads."""

    student: Student
    ensemble: Ensemble


@dataclass(frozen=True)
class FLESD(Method):
    """Federated learning by ensemble similarity distillation."""

    student: str = ""
    """Architecture of the global model. The default is the first architecture."""
    of: Outlook = "projection"
    """Which outputs of an encoder are compared: the projection, or the features below it."""
    sends: Literal["representations", "similarities"] = "representations"
    """What clients send: representations of the public rows, or the matrix of similarities."""
    wire: Literal["float32", "float16", "int8"] = "float32"
    """Number format of the representations in messages. Smaller numbers cost fewer bytes."""
    top: Fraction = 1.0
    """With ``similarities``: fraction of the largest similarities of each row that are sent."""
    distillation: SimilarityDistillation = field(default_factory=SimilarityDistillation)
    """How the global model learns the clients' similarities."""

    keeps: ClassVar[str] = "all"
    targets: ClassVar[frozenset[Target]] = frozenset({"class", "views"})

    def check(self, task: Task) -> None:
        """Raise MethodError without public rows or a student, or if a setting has no effect."""
        if task.public is None:
            raise MethodError(
                "flesd needs public data: give [data.public] with client, rows or a name"
            )
        if self.student and self.student not in task.starts:
            choices = ", ".join(task.starts)
            raise MethodError(
                f"method.student = {self.student!r} is no architecture; there are: {choices}"
            )
        if self.sends == "representations" and self.top != 1.0:
            raise MethodError("method.top is read only with method.sends = 'similarities'")
        if self.sends == "similarities" and self.wire != "float32":
            raise MethodError("method.wire is read only with method.sends = 'representations'")
        if self.top * len(task.public) <= 1.0:
            raise MethodError(
                f"method.top = {self.top:g} of {len(task.public)} rows is a row itself alone"
            )
        self.distillation.check(task)

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"train"`` and the stages of the distillation."""
        return super().stages(ctx) + (self.distillation.stages(ctx.task) if ctx.round else ())

    def init_server(self, ctx: Context) -> Server:
        """Return the initial global model (line 2), and an empty ensemble."""
        task, n, device = ctx.task, len(ctx.task.public_rows), ctx.key.device
        # a site of another architecture predicts its download: nothing
        net = task.starts.get(self._name(task))
        sent = self.sends == "similarities"
        slots = (0, 0, 0) if sent else (_most_asked(task), n, self._widest(task))
        ensemble = Ensemble(
            torch.zeros(slots, device=device),
            torch.zeros(_most_asked(task), device=device),
            torch.full((n, n) if sent else (0, 0), NOTHING, device=device),
        )
        return Server(
            self.distillation.idle(net, task, 0 if net is None else self._width(net), device),
            ensemble,
        )

    def select(self, server: Server, online: Sequence[ClientInfo], ctx: Context) -> list[Order]:
        """Return ``fraction_train`` of all clients, without the client whose rows are public."""
        others = [client for client in online if client.id != ctx.task.public_client]
        key = ctx.draw("select", ctx.stage)
        return drawn_clients(others, ctx.task, key)

    def orders(
        self, server: Server, selected: Sequence[Order], ctx: Context
    ) -> Sequence[Order] | None:
        """Return all selected clients; the distillation is the server's own work."""
        return None if is_server_stage(ctx.stage) else selected

    def download(self, server: Server, order: Order, ctx: Context) -> Weights:
        """Return the global weights, or nothing for clients of another architecture."""
        return Weights(server.student.arrays if order.architecture == self._name(ctx.task) else {})

    def receive(self, net: Net, own: Nothing, down: Weights, ctx: Context) -> tuple[Net, Nothing]:
        """Return the net with the global weights, or unchanged if there are none."""
        return net.with_arrays(down.arrays), own

    def upload(
        self, net: Net, own: Nothing, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Upload, Nothing]:
        """Return the encoder's representations of the public rows, or their similarities."""
        r, digest = representations(net, ctx.task, self.of), torch.tensor(ctx.task.public_digest)
        if self.sends == "similarities":
            if self.top == 1.0:
                return Similarities(r @ r.mT, digest), own  # eq. 4
            return Nearest(*_nearest(r, math.ceil(self.top * len(r))), digest), own
        if self.wire == "int8":
            scales = r.abs().amax(1).clamp(min=torch.finfo(r.dtype).tiny) / MOST
            values = (r / scales.unsqueeze(1)).round().to(torch.int8)
            return Quantized(values, scales, digest), own
        return PublicRepresentations(r.to(getattr(torch, self.wire)), digest), own

    def objection(self, message: Upload, ctx: Context) -> str:
        """Object to an upload about other public rows than the server's."""
        if int(message.digest) == ctx.task.public_digest:
            return ""
        why = (
            "it has other public data than the server: the same rows are needed, in the same order"
        )
        return why + ", normalized alike"

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Store the uploads (line 10), or continue the distillation (lines 11 to 18)."""
        if not is_server_stage(ctx.stage):
            return replace(server, ensemble=self._heard(server, replies))
        if not (count := server.ensemble.count()):  # no client answered
            zero = torch.zeros_like(server.student.steps)
            return replace(server, student=replace(server.student, losses=zero, steps=zero))
        start, student, stages = self._start(ctx.task), server.student, self.stages(ctx)
        if ctx.stage == stages[1]:
            student = self.distillation.begin(start.with_arrays(student.arrays), self.of, ctx)
        student = self.distillation.learn(
            student, server.ensemble.first(count), start, self.of, ctx
        )
        ensemble = server.ensemble
        if ctx.stage == stages[-1]:
            ensemble = _emptied(ensemble)  # the server keeps no client's upload
        return Server(student, ensemble)

    def forget(self, server: Server, client: int, ctx: Context) -> Server:
        """Drop all uploads: within a round the server does not know which client sent which."""
        return replace(server, ensemble=_emptied(server.ensemble))

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the global model."""
        return {self._name(ctx.task): self._start(ctx.task).with_arrays(server.student.arrays)}

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Return the mean loss of the last distillation."""
        steps = float(server.student.steps)
        return {"distillation": float(server.student.losses) / steps} if steps else {}

    def _heard(self, server: Server, replies: Replies) -> Ensemble:
        """Return an ensemble of these replies only."""
        new = _emptied(server.ensemble)
        for place, reply in enumerate(replies):
            sent: Upload = reply.message
            new.filled[place] = 1.0
            if isinstance(sent, Similarities | Nearest):
                _add(new.total, sent, self.distillation.target_temperature)
                continue
            values = sent.values.to(torch.float32)
            if isinstance(sent, Quantized):
                values = values * sent.scales.unsqueeze(1)
            new.slots[place] = pad(values, (0, new.slots.shape[2] - values.shape[1]))
        return new

    def _name(self, task: Task) -> str:
        return self.student or task.main

    def _start(self, task: Task) -> Net:
        return task.starts[self._name(task)]

    def _width(self, net: Net) -> int:
        return net.arch.num_classes if self.of == "projection" else net.arch.feature_width

    def _widest(self, task: Task) -> int:
        return max(self._width(net) for net in task.starts.values())


def _emptied(ensemble: Ensemble) -> Ensemble:
    """Return an empty ensemble of the same shapes."""
    empty: Ensemble = map_leaves(torch.zeros_like, ensemble)
    return replace(empty, total=torch.full_like(ensemble.total, NOTHING))


def _nearest(r: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's largest similarities (eq. 4) and their columns, both (N, count)."""
    best = [(piece @ r.mT).topk(count, dim=1) for piece in torch.split(r, ENCODED_AT_ONCE)]
    values, places = (torch.cat([part[i] for part in best]) for i in (0, 1))
    order = places.argsort(1)
    return values.gather(1, order), places.gather(1, order).to(torch.int32)


def _add(total: Tensor, sent: Similarities | Nearest, temperature: float) -> None:
    """Add ``exp(M_k / tau_T)`` (eq. 5) to sums whose logarithms ``total`` (N, N) are, in place."""
    for at in torch.split(torch.arange(len(total), device=total.device), ENCODED_AT_ONCE):
        rows, values = total[at], sent.values[at] / temperature
        if isinstance(sent, Similarities):
            total[at] = torch.logaddexp(rows, values)
        else:
            places = sent.places[at].long()
            both = torch.logaddexp(rows.gather(1, places), values)
            total[at] = rows.scatter(1, places, both)


def _most_asked(task: Task) -> int:
    """Return the largest possible number of clients in a round."""
    training = task.training
    if task.pools or training.sampling == "poisson":
        return task.num_clients * max(1, len(task.pools))
    return max(1, round(training.fraction_train * task.num_clients))
