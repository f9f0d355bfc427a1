"""Small methods for the laws, which use parts of the interface that no registered method uses.

These methods serve no other purpose: with them, the laws test every part of the interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.bounds import PositiveInt
from fedgist.core.counts import COUNTS
from fedgist.core.message import message
from fedgist.core.method import (
    Batch,
    ClientInfo,
    Context,
    Count,
    Exchange,
    Method,
    Net,
    Nothing,
    Order,
    Part,
    Phase,
    Replies,
)
from fedgist.core.training import Optimizer
from fedgist.core.tree import Tree, tree
from fedgist.methods.common.averaging import Averaging
from fedgist.methods.common.linear_head import class_sums


@message(reduce="sum")
class ClassMeans:
    """Sums by class, (classes, width), and the number of rows of each class, (classes,)."""

    total: Tensor
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum")
class Scales:
    """The clients' largest mean features, summed, (), and the number of clients, ()."""

    largest: Tensor
    clients: Tensor


@tree
class ScaledMeans:
    """Server state: the mean largest feature, (), and class means in units of it."""

    scale: Tensor
    means: ClassMeans


@dataclass(frozen=True)
class TwoStages(Method):
    """A method whose clients first agree on a scale, and then send class means in its unit.

    Stages ``"scale"`` and ``"means"`` have different messages. Only every second selected client
    takes part in ``"means"``. Even rounds end with a stage at the server only.
    """

    keeps: ClassVar[Part] = "all"

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return two stages, and in even rounds a third one without clients."""
        if ctx.round == 0:
            return ()
        return ("scale", "means", "rest") if ctx.round % 2 == 0 else ("scale", "means")

    def init_server(self, ctx: Context) -> ScaledMeans:
        """Return a scale of 1 and no means."""
        width = next(iter(ctx.task.architectures.values())).feature_width
        classes = ctx.task.num_classes
        total = torch.zeros(classes, width, device=ctx.key.device)
        return ScaledMeans(total.new_ones(()), ClassMeans(total, torch.zeros_like(total[:, 0])))

    def orders(
        self, server: ScaledMeans, selected: Sequence[Order], ctx: Context
    ) -> Sequence[Order] | None:
        """Return all orders for the scale, every other one for the means, None for the rest."""
        if ctx.stage == "rest":
            return None
        return selected[::2] if ctx.stage == "means" else selected

    def download(self, server: ScaledMeans, order: Order, ctx: Context) -> ClassMeans | Nothing:
        """Return the means in the unit of the scale; nothing before there is a scale."""
        if ctx.stage == "scale":
            return Nothing()
        return ClassMeans(server.means.total / server.scale, server.means.rows)

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return phases for the second stage only: the head learns, then the body."""
        if ctx.stage == "scale":
            return ()
        slow = Optimizer("momentum", lr=0.01)
        head = Phase(("head",), steps=2, loss=self.smoothed, optimizer=slow, remembers="epoch")
        return (head, Phase(("body",)))

    def smoothed(self, net: Net, batch: Batch, own: Nothing, down: object, ctx: Context) -> Tensor:
        """Return the task's loss at half the logits, (): the loss of one phase only."""
        return ctx.task.objective.loss(net(batch.x) / 2, batch)

    def summarize(
        self, net: Net, batch: Batch, own: Nothing, down: object, ctx: Context
    ) -> ClassMeans:
        """Return class sums of features."""
        z, classes = net.features(batch.x), ctx.task.num_classes
        ones = torch.ones_like(z[:, :1])
        rows = class_sums(ones, batch.y, batch.mask, classes)[:, 0]
        return ClassMeans(class_sums(z, batch.y, batch.mask, classes), rows)

    def upload(
        self, net: Net, own: Nothing, sums: ClassMeans, down: object, ctx: Context
    ) -> tuple[Scales | ClassMeans, Nothing]:
        """Return the largest mean in the first stage, the sums in the second."""
        if ctx.stage == "scale":
            means = sums.total / sums.rows.clamp(min=1.0).unsqueeze(1)
            scale = means.abs().max()
            return Scales(scale, torch.ones_like(scale)), own
        return sums, own

    def server_update(self, server: ScaledMeans, replies: Replies, ctx: Context) -> ScaledMeans:
        """Store the mean scale or the means; in its own stage, halve the means."""
        if ctx.stage == "rest":
            old = server.means
            return ScaledMeans(server.scale, ClassMeans(old.total / 2, old.rows / 2))
        total = replies.total()
        if isinstance(total, Scales):
            return ScaledMeans(total.largest / total.clients + 1e-3, server.means)
        return ScaledMeans(server.scale, total)

    def report(self, server: ScaledMeans, ctx: Context) -> Mapping[str, float]:
        """Return the scale."""
        return {"scale": float(server.scale)}


@message(reduce="each")
class Sketch:
    """One client's class means with noise, (classes, width), and a mask of its classes."""

    means: Tensor
    present: Tensor


@tree
class Board:
    """Server state: the newest sketch of each client, zeros before its first."""

    means: Tensor  # (clients, classes, width)
    present: Tensor  # (clients, classes)


@tree
class Bias:
    """A client's own trainable bias of its logits, (classes,)."""

    bias: Tensor


@dataclass(frozen=True)
class Relay(Method):
    """A method that sends each client the mean of the other clients' newest sketches.

    Late sketches are used. The first sketches come in round 0. Each client trains its own bias
    together with its net, by an optimizer whose state lives for the whole run. Each client is
    tested again after fine-tuning.
    """

    pull: float = 0.1

    keeps: ClassVar[Part] = "all"
    accepts_late: ClassVar[bool] = True

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return ``"train"``, and in round 0 an exchange."""
        return ("exchange",) if ctx.round == 0 else ("train",)

    def init_server(self, ctx: Context) -> Board:
        """Return an empty board."""
        width = next(iter(ctx.task.architectures.values())).feature_width
        shape = (ctx.task.num_clients, ctx.task.num_classes)
        means = torch.zeros(*shape, width, device=ctx.key.device)
        return Board(means, torch.zeros_like(means[..., 0]))

    def init_client(self, net: Net, ctx: Context) -> Bias:
        """Return a bias of zeros."""
        return Bias(torch.zeros(ctx.task.num_classes, device=ctx.key.device))

    def download(self, server: Board, order: Order, ctx: Context) -> Sketch:
        """Return the mean of the other clients' sketches, class by class."""
        others = server.present.clone()
        others[order.client] = 0
        count = others.sum(0)
        total = (server.means * others.unsqueeze(2)).sum(0)
        return Sketch(total / count.clamp(min=1.0).unsqueeze(1), (count > 0).to(torch.float32))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return one phase in which net and bias learn together."""
        if ctx.stage == "exchange":
            return ()
        learned = ("all", "own.bias")
        return (Phase(learned, remembers="run"),)

    def loss(self, net: Net, batch: Batch, own: Bias, down: Sketch, ctx: Context) -> Tensor:
        """Return the task's loss plus a pull toward the others' means, if there are any."""
        z = net.features(batch.x)
        far = (z - down.means[batch.y]).square().sum(1) * down.present[batch.y]
        pull = torch.where(batch.mask, far, 0.0).sum() / batch.mask.sum().clamp(min=1)
        return ctx.task.objective.loss(net.logits(z) + own.bias, batch) + self.pull * pull

    def summarize(
        self, net: Net, batch: Batch, own: Bias, down: Sketch, ctx: Context
    ) -> ClassMeans:
        """Return class sums of features."""
        z, classes = net.features(batch.x), ctx.task.num_classes
        rows = class_sums(torch.ones_like(z[:, :1]), batch.y, batch.mask, classes)[:, 0]
        return ClassMeans(class_sums(z, batch.y, batch.mask, classes), rows)

    def upload(
        self, net: Net, own: Bias, sums: ClassMeans, down: Sketch, ctx: Context
    ) -> tuple[Sketch, Bias]:
        """Return the means with a little noise, drawn by the client's key."""
        means = sums.total / sums.rows.clamp(min=1.0).unsqueeze(1)
        noise = 0.01 * random.normal(ctx.draw("noise"), tuple(means.shape))
        present = (sums.rows > 0).to(torch.float32)
        return Sketch((means + noise) * present.unsqueeze(1), present), own

    def server_update(self, server: Board, replies: Replies, ctx: Context) -> Board:
        """Return the board with each client's newest sketch."""
        means, present = server.means.clone(), server.present.clone()
        for reply in replies:
            means[reply.order.client] = reply.message.means
            present[reply.order.client] = reply.message.present
        return Board(means, present)

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        """Return one more step of the head, in the last round only."""
        last = ctx.round == ctx.task.training.num_rounds
        return (Phase(("head",), steps=1),) if last else ()

    def predict(self, net: Net, own: Bias, down: Sketch, x: Tensor, ctx: Context) -> Tensor:
        """Return the logits with the client's bias."""
        return net(x) + own.bias


@dataclass(frozen=True)
class SharedBodies(Method):
    """Averaged bodies within each architecture, with late sums; clients keep their heads."""

    keeps: ClassVar[Part] = "head"
    accepts_late: ClassVar[bool] = True
    exchange: ClassVar[Exchange] = Averaging("body")

    def select(self, server: Tree, online: Sequence[ClientInfo], ctx: Context) -> list[Order]:
        """Return orders for all clients but one, drawn independently in every round."""
        left_out = random.choice(ctx.draw("left out"), len(online), 1) if len(online) > 1 else []
        invited = [client for i, client in enumerate(online) if i not in left_out]
        return [Order(client.id, client.architectures[0]) for client in invited]


@message(reduce="sum")
class PublicLogits:
    """Sums of clients' logits of public rows, (rows, classes), and the number of clients, ()."""

    total: Tensor
    clients: Tensor = field(metadata=COUNTS)


@dataclass(frozen=True)
class Digest(Method):
    """A method whose clients learn their own labels and mean logits of public rows, as in FedMD.

    Li, Wang 2019, "FedMD: Heterogenous federated learning via model distillation". Each step draws
    ``rows`` public rows by the client's key.
    """

    rows: PositiveInt = 5

    def init_server(self, ctx: Context) -> PublicLogits:
        """Return sums of no client."""
        shape = len(ctx.task.public_rows), ctx.task.num_classes
        zero = torch.zeros((), device=ctx.key.device)
        return PublicLogits(zero.expand(shape).clone(), zero)

    def download(self, server: PublicLogits, order: Order, ctx: Context) -> PublicLogits:
        """Return the sums."""
        return server

    def loss(
        self, net: Net, batch: Batch, own: Nothing, down: PublicLogits, ctx: Context
    ) -> Tensor:
        """Return the task's loss plus the mean squared distance to the mean logits."""
        public = ctx.task.public_rows
        rows = random.integers(ctx.draw("public"), (self.rows,), len(public))
        present = torch.ones(self.rows, dtype=torch.bool, device=rows.device)
        logits = net.for_rows(present)(public.seen(rows))
        mean = down.total[rows] / down.clients.clamp(min=1.0)
        far = (logits - mean).square().mean() * (down.clients > 0)
        return ctx.task.objective.loss(net(batch.x), batch) + far

    def upload(
        self, net: Net, own: Nothing, sums: Count, down: PublicLogits, ctx: Context
    ) -> tuple[PublicLogits, Nothing]:
        """Return the client's logits of all public rows."""
        public = ctx.task.public_rows
        logits = net(public.seen(torch.arange(len(public), device=ctx.key.device)))
        return PublicLogits(logits, torch.ones((), device=logits.device)), own

    def server_update(self, server: PublicLogits, replies: Replies, ctx: Context) -> PublicLogits:
        """Return the new sums."""
        total: PublicLogits = replies.total()
        return total


EXAMPLES: Mapping[str, Method] = {
    "two_stages": TwoStages(),
    "relay": Relay(),
    "shared_bodies": SharedBodies(),
    "digest": Digest(),
}
