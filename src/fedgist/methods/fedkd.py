"""FedKD: a mentor at each client and a small shared mentee, whose changes are sent as factors.

Wu, Wu, Lyu, Huang, Xie 2022, "Communication-efficient federated learning via knowledge
distillation" (Nature Communications 13, 2032, https://arxiv.org/abs/2108.13323). See
docs/methods/fedkd.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.bounds import Share
from fedgist.core.counts import COUNTS
from fedgist.core.losses import kl, weighted_mean
from fedgist.core.message import message
from fedgist.core.method import (
    Batch,
    Context,
    Count,
    Method,
    Net,
    Order,
    Part,
    Phase,
    Replies,
    Task,
)
from fedgist.core.nets.second_net import SecondNet
from fedgist.core.objectives.target import Target
from fedgist.core.tree import map_leaves, tree
from fedgist.core.wire_form import FLAGS, rows_where
from fedgist.methods.common.averaging import Weights
from fedgist.methods.common.latest_messages import check_pools

Arrays = dict[str, Tensor]

LEAST = 1e-6  # of a sum of losses that divides


@tree
class Factors:
    """A change of arrays by name: matrices as products of factors, where these are smaller.

    A matrix (a, b) is the sum of the products of ``left`` (rank, a) and ``right`` (rank, b), of the
    rows where ``kept`` (rank,) is 1, or it is ``whole`` (1, a, b), where ``unfactored`` (1,) is 1.
    Other arrays are whole. What is not sent is 0.
    """

    left: Arrays = field(metadata=rows_where("kept"))
    right: Arrays = field(metadata=rows_where("kept"))
    kept: Arrays = field(metadata=FLAGS)
    whole: Arrays = field(metadata=rows_where("unfactored"))
    unfactored: Arrays = field(metadata=FLAGS)

    @staticmethod
    def of(change: Mapping[str, Tensor], energy: float) -> Factors:
        """Return the fewest factors with more than this share of each matrix's squares.

        ``change`` holds arrays of any shape. The first dimension of an array is a matrix's first,
        all others together are its second.
        """
        found = Factors({}, {}, {}, {}, {})
        for name, array in change.items():
            one = torch.ones_like(array.flatten()[:1])
            if array.dim() > 1:
                u, s, v = _svd(array.flatten(1))
                squares = s.square()
                before = squares.cumsum(0) - squares
                kept = ((before <= energy * squares.sum()) & (s > 0)).to(array.dtype)
                larger = kept.sum() * (len(u) + v.shape[1]) >= array.numel()
                one = one * (larger | ~array.isfinite().all())
                kept = kept * (1 - one)
                found.kept[name] = kept
                found.left[name] = (u * s).T * kept.unsqueeze(1)
                found.right[name] = v * kept.unsqueeze(1)
            sent = one.view(1, *[1] * array.dim()) > 0
            found.whole[name] = torch.where(sent, array.unsqueeze(0), 0.0)
            found.unfactored[name] = one
        return found

    def change(self) -> Arrays:
        """Return the change, arrays of any shape by name."""
        out = {name: array[0] for name, array in self.whole.items()}
        for name, left in self.left.items():
            out[name] = out[name] + (left.T @ self.right[name]).view_as(out[name])
        return out


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U (a, rank), the singular values (rank,), and V^T (rank, b); 0 for numbers lost.

    Of both signs of a pair, the one is taken whose largest number in V is positive.
    """
    finite = torch.where(matrix.isfinite().all(), matrix, 0.0)
    u, s, v = torch.linalg.svd(finite, full_matrices=False)
    sign = v.gather(1, v.abs().argmax(1, keepdim=True)).sign()
    return u * sign.T, s, v * sign


@message(reduce="each")
class Update:
    """The change of a client's mentee, and the client's number of rows, ()."""

    change: Factors
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum")
class Download:
    """The change of the shared mentee, or all of it.

    ``model`` (1, ...) by name is sent if ``there`` (1,) is 1. Otherwise the client holds the mentee
    ``version`` - 1, ().
    """

    change: Factors
    model: Arrays = field(metadata=rows_where("there"))
    there: Tensor = field(metadata=FLAGS)
    version: Tensor


@tree
class Server:
    """Server state: the shared mentee, its last change, and who holds the mentee before it.

    ``hold`` (clients,) is 1 for clients that do. ``version`` () counts the changes.
    """

    weights: Weights
    sent: Factors
    hold: Tensor
    version: Tensor


@tree
class Pupil:
    """A client's mentee, and the map (own features, mentee's features) between hidden states.

    ``held`` is the shared mentee by name, in its ``version``, (); -1 is none.
    """

    mentee: SecondNet
    transform: Tensor
    held: Arrays
    version: Tensor


@dataclass(frozen=True)
class FedKD(Method):
    """Mentors stay at clients; mentees learn with them, and their changes are averaged."""

    first_energy: Share = 0.95
    """Share of a change's squares that its factors have in round 1."""
    last_energy: Share = 0.98
    """Share of a change's squares that its factors have in the last round; linear in between."""

    keeps: ClassVar[Part] = "all"
    alters_inputs: ClassVar[bool] = True  # the mentee reads them, too
    trains_main: ClassVar[bool] = True
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})

    def check(self, task: Task) -> None:
        """Raise MethodError if a client may be in several pools."""
        check_pools(task, "fedkd")

    def energy(self, ctx: Context) -> float:
        """Return the share of squares of this round."""
        rounds = ctx.task.training.num_rounds
        part = (ctx.round - 1) / (rounds - 1) if rounds > 1 else 0.0
        return self.first_energy + (self.last_energy - self.first_energy) * part

    def init_server(self, ctx: Context) -> Server:
        """Return the start of the architecture that is named first, which nobody holds."""
        weights = Weights(ctx.task.starts[ctx.task.main].state())
        nothing = {name: torch.zeros_like(a) for name, a in _floats(weights.arrays).items()}
        nobody = torch.zeros(ctx.task.num_clients, device=ctx.key.device)
        return Server(weights, Factors.of(nothing, 0.0), nobody, nobody.sum())

    def init_client(self, net: Net, ctx: Context) -> Pupil:
        """Return a mentee that is not the server's yet, and a random map of hidden states."""
        start = ctx.task.starts[ctx.task.main]
        widths = net.arch.feature_width, start.arch.feature_width
        drawn = random.normal(ctx.draw("transform"), widths) / widths[1] ** 0.5
        drawn = drawn.to(ctx.key.device)
        version = torch.full((), -1.0, device=ctx.key.device)
        return Pupil(SecondNet.of(start), drawn, _floats(start.state()), version)

    def download(self, server: Server, order: Order, ctx: Context) -> Download:
        """Return the change of the mentee, or the mentee for a client that lacks the last one."""
        part = server.hold[order.client].unsqueeze(0)
        arrays = _floats(server.weights.arrays)
        model = {name: (1 - part) * array.unsqueeze(0) for name, array in arrays.items()}
        change = map_leaves(lambda leaf: leaf * part.view(1, *[1] * (leaf.dim() - 1)), server.sent)
        return Download(change, model, 1 - part, server.version)

    def receive(self, net: Net, own: Pupil, down: Download, ctx: Context) -> tuple[Net, Pupil]:
        """Return the client's mentor, and the shared mentee; a repeated change has no effect."""
        whole, change = down.there[0] > 0, down.change.change()
        held = {
            name: torch.where(
                whole,
                down.model[name][0],
                array + torch.where(own.version == down.version - 1, change[name], 0.0),
            )
            for name, array in own.held.items()
        }
        fits = whole | (own.version == down.version - 1) | (own.version == down.version)
        version = torch.where(fits, down.version, -1.0).view_as(own.version)
        buffers = {name: held.get(name, array) for name, array in own.mentee.buffers.items()}
        mentee = SecondNet({name: held[name] for name in own.mentee.params}, buffers)
        return net, replace(own, mentee=mentee, held=held, version=version)

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Train mentor, mentee and the map of hidden states side by side."""
        return (Phase(("all", "own.mentee.params", "own.transform")),)

    def loss(self, net: Net, batch: Batch, own: Pupil, down: Download, ctx: Context) -> Tensor:
        """Return the sum of both models' losses, (); ``batch.x`` is ``(batch, *input)``.

        What they learn from each other counts less while they are wrong: it is divided by the sum
        of their losses of the labels, through which no gradient flows.
        """
        other = own.mentee.beside(net, "mentee", ctx.task.starts[ctx.task.main])
        h, small = net.features(batch.x), other.features(batch.x)
        mine, theirs = net.logits(h), other.logits(small)
        labels = ctx.task.objective.loss(mine, batch) + ctx.task.objective.loss(theirs, batch)
        rows = batch.mask, batch.weight
        mutual = kl(theirs.detach().softmax(-1), mine, *rows)
        mutual = mutual + kl(mine.detach().softmax(-1), theirs, *rows)
        hidden = (h - small @ own.transform.T).square().mean(-1)
        mutual = mutual + weighted_mean(hidden, *rows)
        return labels + mutual / labels.detach().clamp(min=LEAST)

    def upload(
        self, net: Net, own: Pupil, sums: Count, down: Download, ctx: Context
    ) -> tuple[Update, Pupil]:
        """Return the factors of the mentee's change, NaN if the client did not hold the mentee."""
        now = _floats(own.mentee.params | own.mentee.buffers)
        there = own.version == down.version
        moved = {k: torch.where(there, now[k] - array, torch.nan) for k, array in own.held.items()}
        return Update(Factors.of(moved, self.energy(ctx)), sums.rows), own

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Move the mentee by the factors of the mean change, weighted by rows."""
        rows = torch.stack([reply.message.rows for reply in replies])
        parts = (rows / rows.sum().clamp(min=1.0)).unbind()
        mean = {name: torch.zeros_like(array) for name, array in server.sent.change().items()}
        for part, reply in zip(parts, replies, strict=True):
            change = reply.message.change.change()
            mean = {name: array + part * change[name] for name, array in mean.items()}
        sent = Factors.of(mean, self.energy(ctx))
        hold = torch.zeros_like(server.hold)
        hold[list(replies.clients)] = 1.0
        arrays, step = server.weights.arrays, sent.change()
        moved = Weights(arrays | {name: arrays[name] + step[name] for name in step})
        return Server(moved, sent, hold, server.version + 1)

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Return the share of squares that factors keep in this round."""
        return {"energy": self.energy(ctx)}

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the shared mentee."""
        name = ctx.task.main
        return {name: ctx.task.starts[name].with_arrays(server.weights.arrays)}


def _floats(arrays: Mapping[str, Tensor]) -> Arrays:
    return {name: array for name, array in arrays.items() if array.is_floating_point()}
