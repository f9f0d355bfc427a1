"""CS-FL: clients send random measurements of a sparse update, and later only the signs of these.

Li, Li, Varshney 2021, "Communication-efficient federated learning based on compressed sensing"
(IEEE Internet of Things Journal 8(20), pages 15531 to 15541). The measurements are a subsampled
randomized Hadamard transform (Ailon and Chazelle 2009, Tropp 2011): the signs of the numbers are
flipped at random, the vector is transformed, and some of its numbers are kept. The transform takes
n log n additions and no matrix. It gives the same bits for one vector and for a stack of vectors.
See docs/methods/cs_fl.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedgist.core import random
from fedgist.core.bounds import Fraction, Positive, PositiveInt, Share
from fedgist.core.counts import COUNTS
from fedgist.core.hadamard import hadamard
from fedgist.core.message import message
from fedgist.core.method import Context, Count, Exchange, Method, Net, Order, Part, Replies, Task
from fedgist.core.tree import tree
from fedgist.core.wire_form import FLAGS, SIGNS, rows_where
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Averages, Averaging, Weights

HALVINGS = 8  # of a step that does not reduce the error of a reconstruction
NEAR = 1e-10  # relative squared error at which a search ends: the rounding of single precision


@dataclass(frozen=True)
class Measurement:
    """A random linear map A from n numbers to m, with columns of length 1.

    ``flips`` (n,) are +1 or -1. ``places`` (m,) are the indices of the transform's kept numbers.
    """

    flips: Tensor
    places: Tensor

    @staticmethod
    def draw(key: Tensor, n: int, m: int) -> Measurement:
        """Draw a map from vectors (n,) to vectors (m,) by key."""
        flips = 2 * random.integers(random.fold(key, "flips"), (n,), 2) - 1
        places = random.permutation(random.fold(key, "places"), _length(n))[:m]
        return Measurement(flips.to(torch.float32), places)

    def __call__(self, x: Tensor) -> Tensor:
        """Return A x, (m,), for ``x`` (n,)."""
        n, m = len(self.flips), len(self.places)
        mixed = hadamard(pad(self.flips * x, (0, _length(n) - n)))
        return mixed[self.places] / math.sqrt(m)

    def adjoint(self, y: Tensor) -> Tensor:
        """Return A^T y, (n,), for ``y`` (m,)."""
        n, m = len(self.flips), len(self.places)
        whole = torch.zeros(_length(n), dtype=y.dtype, device=y.device)
        spread = whole.index_copy(0, self.places, y)
        return self.flips * hadamard(spread)[:n] / math.sqrt(m)


def sparse(x: Tensor, count: int) -> Tensor:
    """Return ``x`` (n,) with its ``count`` largest entries, by magnitude, and zeros elsewhere."""
    places = x.abs().topk(count).indices
    return torch.zeros_like(x).scatter(0, places, x.gather(0, places))


def hard_thresholding(measure: Measurement, y: Tensor, count: int, steps: int) -> Tensor:
    """Return a vector (n,) with ``count`` entries whose measurements are near ``y`` (m,).

    Iterative hard thresholding, normalized: each step is a gradient step on ``|y - A x|^2``, with
    the best step size for the entries in use. All but ``count`` entries are then dropped
    (Blumensath and Davies 2010). A step that increases the error is halved. The search ends if no
    halved step reduces the error, or if the error is small enough.
    """
    x = torch.zeros_like(measure.flips)
    rest, enough = y, NEAR * y.square().sum()
    for _ in range(steps):
        if bool(rest.square().sum() <= enough):
            break
        gradient = measure.adjoint(rest)
        in_use = x != 0 if bool(x.any()) else sparse(gradient, count) != 0
        slope = torch.where(in_use, gradient, 0.0)
        step = slope.square().sum() / measure(slope).square().sum().clamp(min=1e-30)
        for _ in range(HALVINGS):
            new = sparse(x + step * gradient, count)
            new_rest = y - measure(new)
            if nearer := bool(new_rest.square().sum() < rest.square().sum()):
                break
            step = step / 2
        if not nearer:
            break
        x, rest = new, new_rest
    return x


def stackable_thresholding(measure: Measurement, y: Tensor, count: int, steps: int) -> Tensor:
    """Return the vector (n,) of :func:`hard_thresholding`, by a fixed number of steps.

    ``y`` is (m,). There is no branch on numbers, so clients can be stacked, and a server that takes
    the same steps gets the same vector. No step is halved: the vector with the smallest error is
    returned.
    """
    best = x = torch.zeros_like(measure.flips)
    rest = y
    least = y.square().sum()
    for _ in range(steps):
        gradient = measure.adjoint(rest)
        in_use = torch.where(x.abs().amax() > 0, x, sparse(gradient, count)) != 0
        slope = torch.where(in_use, gradient, 0.0)
        step = slope.square().sum() / measure(slope).square().sum().clamp(min=1e-30)
        x = sparse(x + step * gradient, count)
        rest = y - measure(x)
        far = rest.square().sum()
        best, least = torch.where(far < least, x, best), torch.minimum(far, least)
    return best


def binary_hard_thresholding(measure: Measurement, y: Tensor, count: int, steps: int) -> Tensor:
    """Return a vector (n,) with ``count`` entries whose measurements have the signs ``y`` (m,).

    Binary iterative hard thresholding (Jacques, Laska, Boufounos, Baraniuk 2013): each step
    corrects the wrong signs, then all but ``count`` entries are dropped. The vector with the fewest
    wrong signs is returned. Signs do not determine a length: the mean square of the vector's
    entries is set to 1. A sign 0 is unknown.
    """
    root = math.sqrt(len(y))
    best = x = sparse(measure.adjoint(y), count) / root
    fewest = len(y) + 1
    for _ in range(steps + 1):
        wrong = torch.where(y == 0, 0.0, y - measure(x).sign())
        if (number := int((wrong != 0).sum())) < fewest:
            best, fewest = x, number
        x = sparse(x + measure.adjoint(wrong) / root, count)
    length = best.square().sum().sqrt().clamp(min=1e-30)
    return best * (math.sqrt(count) / length)


def _length(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


FLOATS, ONE_BIT = "floats", "signs"  # the stages of the two phases
DOWN_STEPS = 15  # of the reconstruction of the server's step at a client


@message(reduce="sum")
class Model:
    """Weights and buffers by name, and the key of this round's measurements."""

    arrays: dict[str, Tensor]
    key: Tensor


@message(reduce="sum")
class Change:
    """A client's download: the whole model, or measurements of the model's change.

    ``numbers`` (1, n) are sent if ``whole`` (1,) is 1. ``measurements`` (1, m) are sent if ``part``
    (1,) is 1: then the client holds the model ``version`` - 1, (), and ``change_key`` is the key of
    these measurements. ``key`` is the key of this round's uploads.
    """

    numbers: Tensor = field(metadata=rows_where("whole"))
    whole: Tensor = field(metadata=FLAGS)
    measurements: Tensor = field(metadata=rows_where("part"))
    part: Tensor = field(metadata=FLAGS)
    version: Tensor
    change_key: Tensor
    key: Tensor


@message(reduce="each")
class Measured:
    """A client's measurements, (m,), and its number of rows, ()."""

    measurements: Tensor
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum", over="architecture")
class Weighed:
    """A client's measurements (m,) times its number of rows, and that number, ()."""

    measurements: Tensor
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum", over="architecture")
class Signs:
    """The signs of a client's measurements, (m,)."""

    signs: Tensor = field(metadata=SIGNS)


@tree
class LastStep:
    """The last step that the server sent, by architecture, if downloads are measurements.

    ``measurements`` (m,) are those of the step, and ``key`` is their key. ``rest`` (n,) is the
    unsent part of the step. ``hold`` (clients,) is 1 for clients that hold the model before the
    step. ``version`` () counts the steps.
    """

    measurements: dict[str, Tensor]
    rest: dict[str, Tensor]
    key: Tensor
    hold: Tensor
    version: Tensor


@tree
class Server:
    """Server state: the weights of each architecture, and the key of the next measurements."""

    averages: Averages
    key: Tensor
    sent: LastStep | None = None


@tree
class Held:
    """The global model that a client holds, (n,), and its version, ()."""

    numbers: Tensor
    version: Tensor


@tree
class Residual:
    """The unsent part of a client's updates, (n,), and the global model that the client holds."""

    rest: Tensor
    held: Held | None = None


@dataclass(frozen=True)
class CSFL(Method):
    """CS-FL as in the paper's abstract; its second phase sends signs, as 1-bit CS-FL does.

    With ``down = "measurements"`` the server takes the step that the clients reconstruct. A client
    that holds another version of the model sends NaN. The server refuses that upload and sends the
    client the whole model in the next round.
    """

    sparsity: Fraction = 0.005
    """Fraction of the numbers of an update that are sent. All others are treated as 0."""
    dimension_reduction: Fraction = 0.1
    """Number of measurements per number of the update. More measurements cost more bytes."""
    reconstruct: Literal["clients", "mean"] = "clients"
    """What the server reconstructs in the first phase.

    ``clients``: each client's update, and then their average. ``mean``: only the average, from the
    mean of all measurements.
    """
    first_phase: Share = 1.0
    """Fraction of the rounds in which clients send measurements as floats.

    In all later rounds they send only the signs of the measurements.
    """
    second_phase_lr: Positive = 1e-3
    """Step size when only signs are sent.

    It is the root mean square of the weights' changes, over the weights that change.
    """
    reconstruction_steps: PositiveInt = 50
    """Number of steps of the reconstruction (iterative hard thresholding)."""
    error_feedback: bool = True
    """Whether a client adds what it has not sent to its next update. If false, it is lost."""
    down: Literal["model", "measurements"] = "model"
    """What clients download: the whole model, or measurements of its change.

    Measurements cost fewer bytes. Only clients that answered in the round before can use them. All
    others get the whole model.
    """

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()

    def check(self, task: Task) -> None:
        """Raise MethodError if measurements of changes are sent to clients with several models."""
        if self.down == "measurements" and task.pools:
            raise MethodError(
                "method cs_fl: method.down = 'measurements' is for clients of one model, not for "
                "clients.pools: use 'model'"
            )

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return the stage of the round's phase."""
        if ctx.round == 0:
            return ()
        first = round(self.first_phase * ctx.task.training.num_rounds)
        return (FLOATS,) if ctx.round <= first else (ONE_BIT,)

    def init_server(self, ctx: Context) -> Server:
        """Return the common initial weights of every architecture."""
        averages, key = self.exchange.init_server(ctx), ctx.draw("measurements")
        if self.down == "model":
            return Server(averages, key)
        rest = {n: torch.zeros_like(flat_vector(w.arrays)) for n, w in averages.weights.items()}
        nothing = {n: self._measurement(key, vector)(vector) for n, vector in rest.items()}
        nobody = torch.zeros(ctx.task.num_clients, device=key.device)
        return Server(averages, key, LastStep(nothing, rest, key, nobody, nobody.sum()))

    def init_client(self, net: Net, ctx: Context) -> Residual:
        """Return an empty residual, and a model without a version."""
        zero = torch.zeros_like(flat_vector(net.state()))
        if self.down == "model":
            return Residual(zero)
        return Residual(zero, Held(zero, torch.full((), -1.0, device=zero.device)))

    def download(self, server: Server, order: Order, ctx: Context) -> Model | Change:
        """Return the weights of the client's architecture, or their change."""
        weights, sent = server.averages.weights[order.architecture].arrays, server.sent
        if sent is None:
            return Model(weights, server.key)
        part = sent.hold[order.client].unsqueeze(0)
        numbers = flat_vector(weights).unsqueeze(0) * (1 - part)
        measured = sent.measurements[order.architecture].unsqueeze(0) * part
        return Change(numbers, 1 - part, measured, part, sent.version, sent.key, server.key)

    def receive(
        self, net: Net, own: Residual, down: Model | Change, ctx: Context
    ) -> tuple[Net, Residual]:
        """Return the net with the global weights."""
        if isinstance(down, Model):
            return net.with_arrays(down.arrays), own
        held = held_by(own)
        numbers = torch.where(down.whole > 0, down.numbers[0], self._moved(held, down))
        before = (held.version == down.version - 1) | (held.version == down.version)
        version = torch.where((down.whole > 0) | before, down.version, -1.0)
        own = replace(own, held=Held(numbers, version.view_as(held.version)))
        return net.with_arrays(unflat(numbers, net.state())), own

    def _moved(self, held: Held, down: Change) -> Tensor:
        """Return the client's model after the change; a repeated change has no effect."""
        moved = self._reconstructed(down.change_key, held.numbers, down.measurements[0])
        return held.numbers + torch.where(held.version == down.version - 1, moved, 0.0)

    def _reconstructed(self, key: Tensor, like: Tensor, measurements: Tensor) -> Tensor:
        measure = self._measurement(key, like)
        return stackable_thresholding(measure, measurements, self._count(like), DOWN_STEPS)

    def upload(
        self, net: Net, own: Residual, sums: Count, down: Model | Change, ctx: Context
    ) -> tuple[Measured | Weighed | Signs, Residual]:
        """Return measurements of the largest numbers of update and residual; keep the rest.

        Without error feedback the residual stays empty.
        """
        start = flat_vector(down.arrays) if isinstance(down, Model) else held_by(own).numbers
        update = flat_vector(net.state()) - start + own.rest
        kept = sparse(update, self._count(update))
        measured = self._measurement(down.key, update)(kept)
        if isinstance(down, Change):
            measured = torch.where(held_by(own).version == down.version, measured, torch.nan)
        if self.error_feedback:
            own = replace(own, rest=update - kept)
        if ctx.stage == ONE_BIT:
            signs = torch.where(measured >= 0, 1.0, -1.0)
            return Signs(torch.where(measured.isnan(), measured, signs)), own
        if self.reconstruct == "mean":
            return Weighed(sums.rows * measured, sums.rows), own
        return Measured(measured, sums.rows), own

    def server_update(self, server: Server, replies: Replies, ctx: Context) -> Server:
        """Return each architecture's weights after the step reconstructed from measurements."""
        weights, sent = dict(server.averages.weights), server.sent
        next_key = ctx.draw("next measurements")
        if sent is not None:
            silent = {n: torch.zeros_like(m) for n, m in sent.measurements.items()}
            hold = torch.zeros_like(sent.hold)
            hold[list(replies.clients)] = 1.0
            sent = LastStep(silent, dict(sent.rest), ctx.draw("change"), hold, sent.version + 1)
        for name in replies.architectures:
            old = weights[name].arrays
            vector = flat_vector(old)
            step = self._step(server.key, vector, replies.by(name), ctx)
            if sent is not None:
                step = self._compressed(name, step, sent)
            weights[name] = Weights(dict(old) | unflat(vector + step, old))
        return Server(Averages(weights), next_key, sent)

    def _compressed(self, name: str, step: Tensor, sent: LastStep) -> Tensor:
        """Return the step that clients reconstruct; ``sent`` stores measurements and the rest."""
        wanted = step + sent.rest[name] if self.error_feedback else step
        kept = sparse(wanted, self._count(wanted))
        sent.measurements[name] = self._measurement(sent.key, wanted)(kept)
        reconstructed = self._reconstructed(sent.key, wanted, sent.measurements[name])
        sent.rest[name] = (
            wanted - reconstructed if self.error_feedback else torch.zeros_like(wanted)
        )
        return reconstructed

    def models(self, server: Server, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture."""
        return self.exchange.models(server.averages, ctx)

    def _step(self, key: Tensor, like: Tensor, replies: Replies, ctx: Context) -> Tensor:
        """Return the step of the weights, (n,)."""
        measure, count = self._measurement(key, like), self._count(like)
        steps = self.reconstruction_steps
        if ctx.stage == ONE_BIT:
            majority = replies.total().signs.sign()
            estimate = binary_hard_thresholding(measure, majority, count, steps)
            return self.second_phase_lr * estimate
        if self.reconstruct == "mean":
            total = replies.total()
            mean = total.measurements / total.rows.clamp(min=1.0)
            return hard_thresholding(measure, mean, count, steps)
        moved, rows = torch.zeros_like(like), torch.zeros_like(like[0])
        for reply in replies:
            sent: Measured = reply.message
            estimate = hard_thresholding(measure, sent.measurements, count, steps)
            moved, rows = moved + sent.rows * estimate, rows + sent.rows
        return moved / rows.clamp(min=1.0)

    def _count(self, vector: Tensor) -> int:
        return math.ceil(self.sparsity * len(vector))

    def _measurement(self, key: Tensor, vector: Tensor) -> Measurement:
        n = len(vector)
        return Measurement.draw(key, n, math.ceil(self.dimension_reduction * n))


def held_by(own: Residual) -> Held:
    """Return the model that a client holds, if it downloads changes."""
    assert own.held is not None  # it was made by init_client
    return own.held


def flat_vector(arrays: Mapping[str, Tensor]) -> Tensor:
    """Return all float arrays as one vector (n,), ordered by name; integer counters are left out.

    The order is by name because arrays from a network or a checkpoint come in another order.
    """
    return torch.cat([arrays[name].flatten() for name in _floats(arrays)])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float arrays in the shapes of ``like`` from ``vector`` (n,): the inverse of flat."""
    names = _floats(like)
    pieces = torch.split(vector, [like[name].numel() for name in names])
    return {n: piece.view(like[n].shape) for n, piece in zip(names, pieces, strict=True)}


def _floats(arrays: Mapping[str, Tensor]) -> list[str]:
    return sorted(name for name, array in arrays.items() if array.is_floating_point())
