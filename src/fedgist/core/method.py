"""The whole vocabulary of a method: what it says, and when.

A method is a frozen dataclass of hyper-parameters with small pure functions, written for ONE
client; engines stack clients. A round is a sequence of *stages* (one, for most methods). In a stage
the server selects clients and makes their downloads; each client receives, learns in phases,
summarizes its rows and uploads; the server takes the replies:

>>> class CountPoints(Method):
...     def upload(self, net, own, sums, down, ctx):
...         return sums, own  # the default sums: how many rows there are
...     def server_update(self, server, replies, ctx):
...         return replies.total()

The client's functions (``init_client``, ``receive``, ``loss``, ``summarize``, ``upload``,
``predict``) run under ``torch.func.vmap``: they may branch on ``ctx.stage``, never on a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedgist.core import losses, random
from fedgist.core.message import Nothing, message, total
from fedgist.core.net import Architecture, Net, Part
from fedgist.core.optim import Optimizer
from fedgist.core.tree import STATIC, tree
from fedgist.errors import TooFewRepliesError

Life = Literal["epoch", "round", "run"]


@dataclass(frozen=True)
class Training:
    """What a recipe says about training, for every method alike."""

    num_rounds: int
    fraction_train: float
    local_epochs: int
    batch_size: int
    optimizer: Optimizer


@dataclass(frozen=True, eq=False)
class Task:
    """What server and clients both know: the classes, the architectures, the plan of training."""

    input_shape: tuple[int, ...]
    num_classes: int
    num_clients: int
    architectures: Mapping[str, Architecture]
    starts: Mapping[str, Net] = field(repr=False)  # each architecture's common start
    training: Training


@tree
class Context:
    """Where and when a function runs. ``key`` is the source of all randomness.

    A client's, in its functions.
    """

    key: Tensor
    task: Task = field(metadata=STATIC)
    round: int = field(metadata=STATIC)
    stage: str = field(metadata=STATIC)

    def draw(self, *purpose: random.Word) -> Tensor:
        """Return a key for one purpose, to be used with :mod:`fedgist.core.random`."""
        return random.fold(self.key, *purpose)


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client before it hears from it. No counts.

    Those travel in messages.
    """

    id: int
    architectures: tuple[str, ...]  # its own first; more than one where it can serve several pools


@dataclass(frozen=True)
class Order:
    """One client asked to do its part of a stage, with the model of one architecture."""

    client: int
    architecture: str
    hears: tuple[int, ...] = ()


@tree
class Batch:
    """Rows of one client.

    ``x`` (batch, *input), ``y`` (batch,), ``mask`` (batch,) true where a row is present.
    """

    x: Tensor
    y: Tensor
    mask: Tensor


@message(reduce="sum")
class Count:
    """How many rows a client holds."""

    rows: Tensor


@dataclass(frozen=True)
class Phase:
    """A piece of local training: what learns, for how long, and by which loss.

    ``learns`` names parts of the net, or tensors of the client's own state (``"own.bias"``).
    ``epochs`` passes over the client's rows, or ``steps`` batches. ``loss=None`` is the method's;
    ``optimizer=None`` the recipe's.
    """

    learns: tuple[str, ...] = ("all",)
    epochs: int = 1
    steps: int | None = None
    loss: Callable[[Net, Batch, Any, Any, Context], Tensor] | None = None
    optimizer: Optimizer | None = None
    remembers: Life = "round"


@dataclass(frozen=True)
class Reply:
    """One client's message and the round it answers."""

    order: Order
    round: int
    message: Any


@dataclass(frozen=True)
class Replies:
    """What came back in a stage. Of messages that sum, only totals exist here.

    ``parts`` holds (architecture, total, number of clients); ``each`` the replies one by one,
    ordered by client.
    """

    parts: tuple[tuple[str, Any, int], ...] = ()
    each: tuple[Reply, ...] = ()
    min_replies: int = 1

    def __len__(self) -> int:
        return len(self.each) or sum(count for _, _, count in self.parts)

    def __iter__(self) -> Iterator[Reply]:
        if self.parts:
            msg = "these messages are only ever seen as a total: use total()"
            raise TypeError(msg)
        return iter(self.each)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures heard from, sorted."""
        return tuple(
            sorted({a for a, _, _ in self.parts} | {r.order.architecture for r in self.each})
        )

    def by(self, architecture: str) -> Replies:
        """Return the replies of one architecture (one pool)."""
        return Replies(
            tuple(p for p in self.parts if p[0] == architecture),
            tuple(r for r in self.each if r.order.architecture == architecture),
            self.min_replies,
        )

    def total(self) -> Any:
        """Return the sum over clients.

        Raises
        ------
        TooFewRepliesError
            If it would be a sum over fewer than ``min_replies`` clients.
        """
        if len(self) < max(self.min_replies, 1):
            msg = f"a total over {len(self)} replies; privacy.min_replies is {self.min_replies}"
            raise TooFewRepliesError(msg)
        return total([value for _, value, _ in self.parts] or [r.message for r in self.each])


class Method:
    """A federated method: its hyper-parameters are fields, its mathematics these functions."""

    keeps: ClassVar[Part] = "all"  # the part of the net that stays with the client between rounds
    merges_clients: ClassVar[bool] = False  # one client that holds everybody's rows
    accepts_late: ClassVar[bool] = (
        False  # whether a reply to an earlier round is used (none is late in a simulation)
    )

    def check(self, task: Task) -> None:
        """Raise ValueError if the method cannot work on this task."""

    def stages(self, ctx: Context) -> tuple[str, ...]:
        """Return the stages of round ``ctx.round``; round 0 comes before training."""
        return ("train",) if ctx.round > 0 else ()

    def init_server(self, ctx: Context) -> Any:
        """Return the server's state."""
        return Nothing()

    def init_client(self, net: Net, ctx: Context) -> Any:
        """Return what the client keeps beside its net: a tree."""
        return Nothing()

    def select(self, server: Any, online: Sequence[ClientInfo], ctx: Context) -> list[Order]:
        """Return who is asked.

        By default a random ``fraction_train`` of all clients, among those online.
        """
        size = max(1, round(ctx.task.training.fraction_train * ctx.task.num_clients))
        chosen = random.choice(ctx.draw("select", ctx.stage), len(online), size)
        return [Order(online[i].id, online[i].architectures[0]) for i in chosen]

    def download(self, server: Any, order: Order, ctx: Context) -> Any:
        """Return the message for one client.

        Messages made of the same tensors are one broadcast.
        """
        return Nothing()

    def receive(self, net: Net, own: Any, down: Any, ctx: Context) -> tuple[Net, Any]:
        """Install what came."""
        return net, own

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return the local training of a stage."""
        return (Phase(epochs=ctx.task.training.local_epochs),)

    def loss(self, net: Net, batch: Batch, own: Any, down: Any, ctx: Context) -> Tensor:
        """Return the loss of one batch: a scalar, averaged over the rows present."""
        return losses.cross_entropy(net(batch.x), batch.y, batch.mask)

    def summarize(self, net: Net, batch: Batch, own: Any, down: Any, ctx: Context) -> Any:
        """Return sums over one batch, the net in evaluation mode; the engine adds the batches."""
        return Count(batch.mask.sum().to(torch.float32))

    def upload(self, net: Net, own: Any, sums: Any, down: Any, ctx: Context) -> tuple[Any, Any]:
        """Return the message to the server, and the client's own state."""
        return Nothing(), own

    def server_update(self, server: Any, replies: Replies, ctx: Context) -> Any:
        """Return the server's new state.

        Any non-empty subset of the clients asked may have answered.
        """
        return server

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        """Return phases that a copy of the client's model goes through before a second test."""
        return ()

    def predict(self, net: Net, own: Any, down: Any, x: Tensor, ctx: Context) -> Tensor:
        """Return logits (batch, classes)."""
        return net(x)
