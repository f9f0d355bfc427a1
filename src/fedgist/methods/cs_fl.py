"""CS-FL: clients send random measurements of a sparse update, later only the signs of them.

Li, Li, Varshney 2021, "Communication-efficient federated learning based on compressed sensing".
See docs/methods/cs_fl.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgist.core.averaging import Averages, Averaging, Weights
from fedgist.core.bounds import Fraction, Positive, PositiveInt, Share
from fedgist.core.compressed_sensing import (
    Measurement,
    binary_hard_thresholding,
    hard_thresholding,
    sparse,
)
from fedgist.core.message import message
from fedgist.core.method import Context, Count, Exchange, Method, Net, Order, Part, Replies
from fedgist.core.tree import tree
from fedgist.core.wire_form import SIGNS

FLOATS, ONE_BIT = "floats", "signs"  # the stages of the two phases


@message(reduce="sum")
class Model:
    """Weights and buffers by name, and the key of this round's measurements."""

    arrays: dict[str, Tensor]
    key: Tensor


@message(reduce="each")
class Measured:
    """A client's measurements, (m,), and its rows."""

    measurements: Tensor
    rows: Tensor


@message(reduce="sum", over="architecture")
class Weighed:
    """A client's measurements (m,) times its rows, and its rows."""

    measurements: Tensor
    rows: Tensor


@message(reduce="sum", over="architecture")
class Signs:
    """The signs of a client's measurements, (m,)."""

    signs: Tensor = field(metadata=SIGNS)


@tree
class Server:
    """Server state: the weights of each architecture, and the key of the next measurements."""

    averages: Averages
    key: Tensor


@tree
class Residual:
    """What a client has not sent yet of its updates, (n,)."""

    rest: Tensor


@dataclass(frozen=True)
class CSFL(Method):
    """CS-FL, its second phase being the paper's 1-bit CS-FL.

    ``reconstruct``: in the first phase the server reconstructs the update of each of the
    ``clients`` and averages these, or only sees the ``mean`` of their measurements. With
    ``error_feedback`` a client adds what it has not sent to its next update; without, it is lost.
    """

    sparsity: Fraction = 0.005  # share of the numbers of an update that are not 0
    dimension_reduction: Fraction = 0.1  # measurements per number
    reconstruct: Literal["clients", "mean"] = "clients"
    first_phase: Share = 1.0  # share of the rounds in which measurements travel as floats
    second_phase_lr: Positive = 1e-3  # how far the numbers move in a round of signs: mean square
    reconstruction_steps: PositiveInt = 50
    error_feedback: bool = True

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return the stage of the phase to which the round belongs."""
        if ctx.round == 0:
            return ()
        first = round(self.first_phase * ctx.task.training.num_rounds)
        return (FLOATS,) if ctx.round <= first else (ONE_BIT,)

    def init_server(self, ctx: Context) -> Server:
        """Return every architecture's common start."""
        return Server(self.exchange.init_server(ctx), ctx.draw("measurements"))

    def init_client(self, net: Net, ctx: Context) -> Residual:
        """Return an empty residual."""
        return Residual(torch.zeros_like(flat(net.state())))

    def download(self, server: Server, order: Order, ctx: Context) -> Model:
        """Return the weights of the client's architecture."""
        return Model(server.averages.weights[order.architecture].arrays, server.key)

    def upload(
        self, net: Net, own: Residual, sums: Count, down: Model, ctx: Context
    ) -> tuple[Measured | Weighed | Signs, Residual]:
        """Return measurements of the largest numbers of update and residual; keep the others.

        Without error feedback the residual stays empty.
        """
        update = flat(net.state()) - flat(down.arrays) + own.rest
        kept = sparse(update, self._count(update))
        measured = self._measurement(down.key, update)(kept)
        if self.error_feedback:
            own = Residual(update - kept)
        if ctx.stage == ONE_BIT:
            signs = torch.where(measured >= 0, 1.0, -1.0)
            return Signs(torch.where(measured.isnan(), measured, signs)), own
        if self.reconstruct == "mean":
            return Weighed(sums.rows * measured, sums.rows), own
        return Measured(measured, sums.rows), own

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Return each architecture's weights moved by what its measurements tell."""
        weights = dict(server.averages.weights)
        for name in replies.architectures:
            old = weights[name].arrays
            vector = flat(old)
            step = self._step(server.key, vector, replies.by(name), ctx)
            weights[name] = Weights(dict(old) | unflat(vector + step, old))
        return Server(Averages(weights), ctx.draw("next measurements"))

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture."""
        return self.exchange.models(server.averages, ctx)

    def _step(self, key: Tensor, like: Tensor, replies: Replies, ctx: Context) -> Tensor:
        """Return how the weights move, (n,)."""
        measure, count = self._measurement(key, like), self._count(like)
        steps = self.reconstruction_steps
        if ctx.stage == ONE_BIT:
            majority = replies.total().signs.sign()
            found = binary_hard_thresholding(measure, majority, count, steps)
            return self.second_phase_lr * found
        if self.reconstruct == "mean":
            total = replies.total()
            mean = total.measurements / total.rows.clamp(min=1.0)
            return hard_thresholding(measure, mean, count, steps)
        moved, rows = torch.zeros_like(like), torch.zeros_like(like[0])
        for reply in replies:
            sent: Measured = reply.message
            found = hard_thresholding(measure, sent.measurements, count, steps)
            moved, rows = moved + sent.rows * found, rows + sent.rows
        return moved / rows.clamp(min=1.0)

    def _count(self, vector: Tensor) -> int:
        return math.ceil(self.sparsity * len(vector))

    def _measurement(self, key: Tensor, vector: Tensor) -> Measurement:
        n = len(vector)
        return Measurement.draw(key, n, math.ceil(self.dimension_reduction * n))


def flat(arrays: Mapping[str, Tensor]) -> Tensor:
    """Return all arrays of floats as one vector, ordered by name; counters are left out.

    What came over a wire or from a checkpoint has its arrays in another order.
    """
    return torch.cat([arrays[name].flatten() for name in _floats(arrays)])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays of floats of which :func:`flat` makes this vector."""
    names = _floats(like)
    pieces = torch.split(vector, [like[name].numel() for name in names])
    return {n: piece.view(like[n].shape) for n, piece in zip(names, pieces, strict=True)}


def _floats(arrays: Mapping[str, Tensor]) -> list[str]:
    return sorted(name for name, array in arrays.items() if array.is_floating_point())
