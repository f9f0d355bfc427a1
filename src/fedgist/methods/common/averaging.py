"""The exchange of averaging methods: weighted averages of weights, one per architecture.

McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data"
(https://arxiv.org/abs/1602.05629), algorithm 1: ``w = sum_k n_k w_k / sum_k n_k``, over the clients
of one architecture.

An averaging method names this exchange in one line, and defines only its differences::

    exchange: ClassVar[Exchange] = Averaging("body")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedgist.core.batch import Batch
from fedgist.core.counts import COUNTS
from fedgist.core.losses import proximal
from fedgist.core.message import message
from fedgist.core.nets.net import Net
from fedgist.core.nets.parts import Part
from fedgist.core.replies import Count, Order, Replies
from fedgist.core.task import Context
from fedgist.core.tree import Tree, tree
from fedgist.errors import MethodError


@message(reduce="sum")
class Weights:
    """The server's parameters and buffers by name."""

    arrays: dict[str, Tensor]


@message(reduce="sum", over="architecture")
class Weighted:
    """``n w`` and ``n``: a client's arrays times its number of rows, and that number, ()."""

    arrays: dict[str, Tensor]
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum", over="architecture")
class Moved:
    """``w_k - w``: the difference of a client's arrays to the download; clipped if private.

    It holds no counts and no integer arrays, so that all of it can be clipped and noised.
    """

    arrays: dict[str, Tensor]


@tree
class Averages:
    """Server state: the weights of each architecture."""

    weights: dict[str, Weights]


@dataclass(frozen=True)
class Averaging:
    """The exchange of averaging methods: the server sends a part of the net and averages it.

    Clients count by their rows or, if they are ``equal``, alike: the server's weights then move
    toward their plain mean by the factor ``rate``.
    """

    part: Part = "all"
    equal: bool = False
    rate: float = 1.0

    def init_server(self, ctx: Context) -> Averages:
        """Return the common initial weights of every architecture.

        Raises
        ------
        MethodError
            If a model has nothing to share.
        """
        arrays = {name: net.state(self.part) for name, net in ctx.task.starts.items()}
        if empty := [name for name, shared in arrays.items() if not shared]:
            raise MethodError(
                f"the model {empty[0]} has no weights that the method shares: use another model, "
                "or method.name = 'local'"
            )
        return Averages({name: Weights(shared) for name, shared in arrays.items()})

    def download(self, server: Averages, order: Order, ctx: Context) -> Weights:
        """Return the weights of the client's architecture."""
        return server.weights[order.architecture]

    def receive(self, net: Net, own: Tree, down: Weights, ctx: Context) -> tuple[Net, Tree]:
        """Return the net with the global weights."""
        return net.with_arrays(down.arrays), own

    def upload(
        self, net: Net, own: Tree, sums: Count, down: Weights, ctx: Context
    ) -> tuple[Weighted | Moved, Tree]:
        """Return n_k w_k and n_k, or only w_k - w if clients are equal or privacy protects them."""
        if self.equal or ctx.task.privacy is not None:
            return Moved(moved(net.state(self.part), down)), own
        arrays = {name: sums.rows * array for name, array in net.state(self.part).items()}
        return Weighted(arrays, sums.rows), own

    def server_update(self, server: Averages, replies: Replies, ctx: Context) -> Averages:
        """Average within each architecture that answered; the others keep their weights."""
        weights = dict(server.weights)
        for name in replies.architectures:
            some, old = replies.by(name), server.weights[name]
            new = stepped(old, some, ctx, self.rate) if self.equal else averaged(some, old, ctx)
            weights[name] = new
        return Averages(weights)

    def models(self, server: Averages, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture, if the whole net is averaged."""
        if self.part != "all":
            return {}
        starts = ctx.task.starts
        return {name: starts[name].with_arrays(w.arrays) for name, w in server.weights.items()}


def proximal_loss(mu: float, net: Net, batch: Batch, down: Weights, ctx: Context) -> Tensor:
    """Return the task's loss plus ``mu / 2 |w - w^t|^2``, () (Li et al. 2020, FedProx, eq. 2).

    The batch's inputs are ``(batch, *input)``; ``w`` and ``w^t`` are the net's and the download's
    parameters.
    """
    task_loss = ctx.task.objective.loss(net(batch.x), batch)
    return task_loss + mu * proximal(net.params, down.arrays) if mu else task_loss


def moved(arrays: Mapping[str, Tensor], down: Weights) -> dict[str, Tensor]:
    """Return the difference of a client's float arrays to the download: any shape, by name."""
    return {k: v - down.arrays[k] for k, v in arrays.items() if v.is_floating_point()}


def averaged(replies: Replies, old: Weights, ctx: Context) -> Weights:
    """Return the new weights: sum of n w divided by sum of n, in the types of the ``old`` arrays.

    Integers and Booleans are rounded. If privacy protects clients, the old weights move by the sum
    of the differences divided by the expected number of clients: no count is released.
    """
    if ctx.task.privacy is not None:
        return stepped(old, replies, ctx)
    total = replies.total()
    means = {name: array / total.rows.clamp(min=1.0) for name, array in total.arrays.items()}
    return Weights({name: _like(value, old.arrays[name]) for name, value in means.items()})


def stepped(old: Weights, replies: Replies, ctx: Context, rate: float = 1.0) -> Weights:
    """Return the weights, moved by ``rate`` times the mean of the clients' differences.

    Buffers, such as running statistics, move to the clients' mean: beyond it, variances could be
    negative.
    """
    steps = mean_of(replies.total().arrays, replies, ctx)
    if rate != 1.0:
        (name,) = replies.architectures
        parameters = ctx.task.starts[name].params
        steps = {k: rate * step if k in parameters else step for k, step in steps.items()}
    return Weights({k: v + steps[k] if k in steps else v for k, v in old.arrays.items()})


def mean_of(total: Mapping[str, Tensor], replies: Replies, ctx: Context) -> dict[str, Tensor]:
    """Return a total by name, divided by the clients of one architecture that answered.

    If privacy protects clients, their expected number is used: no count is released.
    """
    (name,) = replies.architectures
    count = replies.expected[name] if ctx.task.privacy is not None else len(replies)
    return {key: array / count for key, array in total.items()}


def _like(value: Tensor, old: Tensor) -> Tensor:
    return value.to(old.dtype) if old.is_floating_point() else value.round().to(old.dtype)
