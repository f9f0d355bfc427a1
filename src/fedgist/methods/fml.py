"""FML: each client's own model and a shared one, the meme, learn from each other's scores.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu 2020, "Federated mutual learning", algorithm 1
(https://arxiv.org/abs/2006.16765). See docs/methods/fml.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedgist.core.bounds import Share
from fedgist.core.counts import COUNTS
from fedgist.core.losses import kl
from fedgist.core.message import message
from fedgist.core.method import Batch, Context, Count, Method, Net, Order, Part, Phase, Replies
from fedgist.core.nets.second_net import SecondNet
from fedgist.core.objectives.target import Target
from fedgist.core.tree import tree
from fedgist.methods.common.averaging import Weights, averaged, moved


@message(reduce="sum")
class WeightedMeme:
    """``n w`` and ``n``: a meme's arrays by name times the client's rows, and the rows, ()."""

    arrays: dict[str, Tensor]
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum")
class MovedMeme:
    """``w_k - w``: the difference of a meme's arrays to the download, if privacy protects them."""

    arrays: dict[str, Tensor]


@tree
class Meme:
    """A client's copy of the shared model."""

    meme: SecondNet


@dataclass(frozen=True)
class FML(Method):
    """Federated averaging of memes, each of which learns beside its client's own model."""

    alpha: Share = 0.5
    """Weight of the labels in the loss of a client's own model; the meme's scores have the rest."""
    beta: Share = 0.5
    """Weight of the labels in the loss of the meme; the scores of the own model have the rest."""

    keeps: ClassVar[Part] = "all"
    alters_inputs: ClassVar[bool] = True  # the meme reads them, too
    trains_main: ClassVar[bool] = True
    targets: ClassVar[frozenset[Target]] = frozenset({"class"})

    def init_server(self, ctx: Context) -> Weights:
        """Return the start of the architecture that is named first."""
        return Weights(ctx.task.starts[ctx.task.main].state())

    def init_client(self, net: Net, ctx: Context) -> Meme:
        """Return a meme as the server's first."""
        return Meme(SecondNet.of(ctx.task.starts[ctx.task.main]))

    def download(self, server: Weights, order: Order, ctx: Context) -> Weights:
        """Return the average meme."""
        return server

    def receive(self, net: Net, own: Meme, down: Weights, ctx: Context) -> tuple[Net, Meme]:
        """Return the client's own model, and a meme that is forked from the average."""
        start = ctx.task.starts[ctx.task.main].with_arrays(down.arrays)
        return net, Meme(SecondNet.of(start))

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Train both models side by side."""
        return (Phase(("all", "own.meme.params")),)

    def loss(self, net: Net, batch: Batch, own: Meme, down: Weights, ctx: Context) -> Tensor:
        """Return the sum of both models' losses, (); ``batch.x`` is ``(batch, *input)``.

        Each is a mixture of the task's loss and ``KL(other || this)``. No gradient flows to the
        other.
        """
        other = own.meme.beside(net, "meme", ctx.task.starts[ctx.task.main])
        mine, shared = net(batch.x), other(batch.x)
        value = _mutual(self.alpha, mine, shared, batch, ctx)
        return value + _mutual(self.beta, shared, mine, batch, ctx)

    def upload(
        self, net: Net, own: Meme, sums: Count, down: Weights, ctx: Context
    ) -> tuple[WeightedMeme | MovedMeme, Meme]:
        """Return n_k w_k and n_k, or only w_k - w if privacy protects clients."""
        arrays = own.meme.params | own.meme.buffers
        if ctx.task.privacy is not None:
            return MovedMeme(moved(arrays, down)), own
        return WeightedMeme({k: sums.rows * a for k, a in arrays.items()}, sums.rows), own

    def server_update(self, server: Weights, replies: Replies, ctx: Context) -> Weights:
        """Return the mean meme of all clients that answered, by their rows."""
        return averaged(replies, server, ctx)

    def models(self, server: Weights, ctx: Context) -> Mapping[str, Net]:
        """Return the average meme."""
        name = ctx.task.main
        return {name: ctx.task.starts[name].with_arrays(server.arrays)}


def _mutual(share: float, logits: Tensor, other: Tensor, batch: Batch, ctx: Context) -> Tensor:
    """Return ``share`` parts of the task's loss and the rest of ``KL(other || logits)``, ().

    ``logits`` and ``other`` are (batch, classes), or the same at each place of a row.
    """
    task_loss = ctx.task.objective.loss(logits, batch)
    if share == 1.0:
        return task_loss
    term = kl(other.detach().softmax(-1), logits, batch.mask, batch.weight)
    return share * task_loss + (1.0 - share) * term
