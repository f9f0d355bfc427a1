"""FLESD: clients send what their encoders say of public rows, and a student learns all of it.

Shi, Yu, Liu, Pang, Li, Wang 2021, "Towards communication-efficient and privacy-preserving federated
representation learning", algorithm 1. See docs/methods/flesd.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedgist.core.averaging import Weights
from fedgist.core.bounds import Fraction
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
from fedgist.core.sampling import drawn_clients
from fedgist.core.server_training import is_server_stage
from fedgist.core.similarity_distillation import (
    NOTHING,
    ROWS_AT_ONCE,
    Ensemble,
    Outlook,
    SimilarityDistillation,
    Student,
    representations,
)
from fedgist.core.tree import map_leaves, tree
from fedgist.errors import MethodError

MOST = 127  # of an int8


@message(reduce="each")
class Representations:
    """R_k (N, d), float32 or float16, and a digest of the rows that they are of, ()."""

    values: Tensor
    digest: Tensor


@message(reduce="each")
class Quantized:
    """R_k as int8 (N, d) times a scale of each row, (N,), and the digest of the rows, ()."""

    values: Tensor
    scales: Tensor
    digest: Tensor


@message(reduce="each")
class Similarities:
    """M_k (N, N), and the digest of the rows, ()."""

    values: Tensor
    digest: Tensor


@message(reduce="each")
class Nearest:
    """Of each row of M_k the largest similarities (N, k), where they are (N, k), and the digest."""

    values: Tensor
    places: Tensor
    digest: Tensor


Sent: TypeAlias = Representations | Quantized | Similarities | Nearest


@tree
class Server:
    """Server state: the student, whose arrays are the global model, and what clients sent."""

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

    def check(self, task: Task) -> None:
        """Raise MethodError unless there are public rows, a student, and readers of settings."""
        if task.objective.text:
            raise MethodError(
                "flesd compares rows by one representation each; texts have one at each place"
            )
        if task.public is None:
            raise MethodError(
                "flesd needs public data: give [data.public] with client, rows or a name"
            )
        if self.student and self.student not in task.starts:
            known = ", ".join(task.starts)
            raise MethodError(
                f"method.student = {self.student!r} is no architecture; there are: {known}"
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
        """Return the global model's start (line 2), and room for what clients send."""
        task, n, device = ctx.task, len(ctx.task.public_rows), ctx.key.device
        # a site of another architecture works out what it will be sent: nothing
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
        """Return ``fraction_train`` of all clients, but for the one whose rows are public."""
        others = [client for client in online if client.id != ctx.task.public_client]
        key = ctx.draw("select", ctx.stage)
        return drawn_clients(others, ctx.task.training, ctx.task.num_clients, key)

    def orders(
        self, server: Server, selected: Sequence[Order], ctx: Context
    ) -> Sequence[Order] | None:
        """Return all that were selected; the distillation is the server's own work."""
        return None if is_server_stage(ctx.stage) else selected

    def download(self, server: Server, order: Order, ctx: Context) -> Weights:
        """Return the global weights, or nothing for clients of another architecture."""
        return Weights(server.student.arrays if order.architecture == self._name(ctx.task) else {})

    def receive(self, net: Net, own: Nothing, down: Weights, ctx: Context) -> tuple[Net, Nothing]:
        """Start from the global weights, or go on from its own."""
        return net.having(down.arrays), own

    def upload(
        self, net: Net, own: Nothing, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Sent, Nothing]:
        """Return what the encoder says of the public rows."""
        r, digest = representations(net, ctx.task, self.of), torch.tensor(ctx.task.public_digest)
        if self.sends == "similarities":
            if self.top == 1.0:
                return Similarities(r @ r.mT, digest), own  # eq. 4
            return Nearest(*_nearest(r, math.ceil(self.top * len(r))), digest), own
        if self.wire == "int8":
            scales = r.abs().amax(1).clamp(min=torch.finfo(r.dtype).tiny) / MOST
            values = (r / scales.unsqueeze(1)).round().to(torch.int8)
            return Quantized(values, scales, digest), own
        return Representations(r.to(getattr(torch, self.wire)), digest), own

    def objection(self, message: Sent, ctx: Context) -> str:
        """Object to what is said of other rows than the server's."""
        if int(message.digest) == ctx.task.public_digest:
            return ""
        why = (
            "it has other public data than the server: the same rows are needed, in the same order"
        )
        return why + ", normalized alike"

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Take what clients sent (line 10), or go on with the distillation (lines 11 to 18)."""
        if not is_server_stage(ctx.stage):
            return replace(server, ensemble=self._heard(server, replies))
        if not server.ensemble.count():  # nobody answered
            zero = torch.zeros_like(server.student.steps)
            return replace(server, student=replace(server.student, losses=zero, steps=zero))
        start, student, stages = self._start(ctx.task), server.student, self.stages(ctx)
        if ctx.stage == stages[1]:
            student = self.distillation.begin(start.having(student.arrays), self.of, ctx)
        student = self.distillation.learn(student, server.ensemble, start, self.of, ctx)
        ensemble = server.ensemble
        if ctx.stage == stages[-1]:
            ensemble = _emptied(ensemble)  # nothing of a client is kept
        return Server(student, ensemble)

    def forget(self, server: Server, client: int, ctx: Context) -> Server:
        """Drop what clients sent: within a round it is not known whose is whose."""
        return replace(server, ensemble=_emptied(server.ensemble))

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the global model."""
        return {self._name(ctx.task): self._start(ctx.task).having(server.student.arrays)}

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Return the mean loss of the last distillation."""
        steps = float(server.student.steps)
        return {"distillation": float(server.student.losses) / steps} if steps else {}

    def _heard(self, server: Server, replies: Replies) -> Ensemble:
        """Return an ensemble of the replies alone."""
        new = _emptied(server.ensemble)
        for place, reply in enumerate(replies):
            sent: Sent = reply.message
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
    """Return room for as much as an ensemble holds."""
    empty: Ensemble = map_leaves(torch.zeros_like, ensemble)
    return replace(empty, total=torch.full_like(ensemble.total, NOTHING))


def _nearest(r: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's largest similarities (eq. 4) and whose they are, (N, count)."""
    found = [(piece @ r.mT).topk(count, dim=1) for piece in torch.split(r, ROWS_AT_ONCE)]
    values, places = (torch.cat([part[i] for part in found]) for i in (0, 1))
    order = places.argsort(1)
    return values.gather(1, order), places.gather(1, order).to(torch.int32)


def _add(total: Tensor, sent: Similarities | Nearest, temperature: float) -> None:
    """Add ``exp(M_k / tau_T)`` (eq. 5) to sums whose logarithms ``total`` (N, N) are, in place."""
    for at in torch.split(torch.arange(len(total)), ROWS_AT_ONCE):
        rows, values = total[at], sent.values[at] / temperature
        if isinstance(sent, Similarities):
            total[at] = torch.logaddexp(rows, values)
        else:
            places = sent.places[at].long()
            both = torch.logaddexp(rows.gather(1, places), values)
            total[at] = rows.scatter(1, places, both)


def _most_asked(task: Task) -> int:
    """Return how many clients are asked in a round, at most."""
    training = task.training
    if training.pools or training.sampling == "poisson":
        return task.num_clients * max(1, len(training.pools))
    return max(1, round(training.fraction_train * task.num_clients))
