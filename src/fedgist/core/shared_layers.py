"""One weighted average of the last layers of all clients, whatever their architecture.

As in :mod:`fedgist.core.averaging`, ``w = sum_k n_k w_k / sum_k n_k``, but over all clients: their
bodies may differ, the layers that are shared have the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedgist.core.averaging import Weights, averaged, moved
from fedgist.core.counts import COUNTS
from fedgist.core.message import message
from fedgist.core.net import Net
from fedgist.core.parts import check_depth
from fedgist.core.replies import Count, Order, Replies
from fedgist.core.task import Context, Task
from fedgist.core.tree import Tree
from fedgist.errors import MethodError


@message(reduce="sum")
class WeightedLayers:
    """``n w`` and ``n``: the last layers' arrays, by their places, times a client's rows."""

    arrays: dict[str, Tensor]
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum")
class MovedLayers:
    """``w_k - w`` of the last layers, by their places, where privacy protects clients."""

    arrays: dict[str, Tensor]


@dataclass(frozen=True)
class SharedLayers:
    """The exchange of methods that average the last ``count`` layers of all nets.

    Arrays travel by the names of :meth:`fedgist.core.parts.Layers.last`, which do not depend on
    the architecture. The first average is the start of the first architecture.
    """

    count: int = 1

    def check(self, task: Task, key: str) -> None:
        """Raise MethodError, which names ``key``, unless all nets can share these layers."""
        check_depth({n: a.layers for n, a in task.architectures.items()}, key, self.count)
        first, *others = ((name, self.state(net)) for name, net in task.starts.items())
        for name, arrays in others:
            for array in {**first[1], **arrays}:
                found = [_shape(state, array) for state in (first[1], arrays)]
                if found[0] != found[1]:
                    raise MethodError(
                        f"{key} = {self.count} needs last layers of the same shapes; {array!r} "
                        f"is {found[0]} in {first[0]}, {found[1]} in {name}"
                    )

    def state(self, net: Net) -> dict[str, Tensor]:
        """Return the arrays that are shared, by their places."""
        arrays = net.params | net.buffers
        return {place: arrays[name] for place, name in net.arch.layers.last(self.count).items()}

    def init_server(self, ctx: Context) -> Weights:
        """Return the start of the first architecture."""
        return Weights(self.state(next(iter(ctx.task.starts.values()))))

    def download(self, server: Weights, order: Order, ctx: Context) -> Weights:
        """Return the average."""
        return server

    def receive(self, net: Net, own: Tree, down: Weights, ctx: Context) -> tuple[Net, Tree]:
        """Start from the average."""
        places = net.arch.layers.last(self.count)
        return net.having({name: down.arrays[place] for place, name in places.items()}), own

    def upload(
        self, net: Net, own: Tree, sums: Count, down: Weights, ctx: Context
    ) -> tuple[WeightedLayers | MovedLayers, Tree]:
        """Return n_k w_k and n_k; where privacy protects clients, w_k - w alone."""
        if ctx.task.privacy is not None:
            return MovedLayers(moved(self.state(net), down)), own
        arrays = {place: sums.rows * array for place, array in self.state(net).items()}
        return WeightedLayers(arrays, sums.rows), own

    def server_update(self, server: Weights, replies: Replies, ctx: Context) -> Weights:
        """Return the mean over all clients that answered."""
        return averaged(replies, server, ctx)

    def models(self, server: Weights, ctx: Context) -> Mapping[str, Net]:
        """Return nothing: the layers below belong to the clients."""
        return {}


def _shape(arrays: Mapping[str, Tensor], name: str) -> str:
    return str(list(arrays[name].shape)) if name in arrays else "missing"
