"""LG-FedAvg: clients keep their lower layers, and the last layers are averaged over all clients.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency 2020, "Think locally, act
globally: federated learning with local and global representations", algorithm 1
(https://arxiv.org/abs/2001.01523). See docs/methods/lg_fedavg.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedgist.core.bounds import PositiveInt
from fedgist.core.counts import COUNTS
from fedgist.core.message import message
from fedgist.core.method import Method, Part
from fedgist.core.nets.net import Net
from fedgist.core.nets.parts import check_depth
from fedgist.core.replies import Count, Order, Replies
from fedgist.core.task import Context, Task
from fedgist.core.tree import Tree
from fedgist.errors import MethodError
from fedgist.methods.common.averaging import Weights, averaged, moved


@message(reduce="sum")
class WeightedLayers:
    """``n w`` and ``n``: the last layers' arrays by position times the rows, and the rows, ()."""

    arrays: dict[str, Tensor]
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum")
class MovedLayers:
    """``w_k - w`` of the last layers by position, if privacy protects clients."""

    arrays: dict[str, Tensor]


@dataclass(frozen=True)
class SharedLayers:
    """The exchange of methods that average the last ``count`` layers of all nets.

    Arrays have the names of :meth:`fedgist.core.nets.parts.Layers.last`, which do not depend on the
    architecture. The first average is the initial net of the first architecture.
    """

    count: int = 1

    def check(self, task: Task, key: str) -> None:
        """Raise MethodError, which names ``key``, unless all nets can share these layers."""
        check_depth({n: a.layers for n, a in task.architectures.items()}, key, self.count)
        first, *others = ((name, self.state(net)) for name, net in task.starts.items())
        for name, arrays in others:
            for array in {**first[1], **arrays}:
                shapes = [_shape(state, array) for state in (first[1], arrays)]
                if shapes[0] != shapes[1]:
                    raise MethodError(
                        f"{key} = {self.count} needs last layers of the same shapes; {array!r} "
                        f"is {shapes[0]} in {first[0]}, {shapes[1]} in {name}"
                    )

    def state(self, net: Net) -> dict[str, Tensor]:
        """Return the shared arrays, of any shape, by position."""
        arrays = net.params | net.buffers
        return {place: arrays[name] for place, name in net.arch.layers.last(self.count).items()}

    def init_server(self, ctx: Context) -> Weights:
        """Return the initial layers of the first architecture."""
        return Weights(self.state(next(iter(ctx.task.starts.values()))))

    def download(self, server: Weights, order: Order, ctx: Context) -> Weights:
        """Return the average."""
        return server

    def receive(self, net: Net, own: Tree, down: Weights, ctx: Context) -> tuple[Net, Tree]:
        """Return the net with the averaged layers."""
        places = net.arch.layers.last(self.count)
        return net.with_arrays({name: down.arrays[place] for place, name in places.items()}), own

    def upload(
        self, net: Net, own: Tree, sums: Count, down: Weights, ctx: Context
    ) -> tuple[WeightedLayers | MovedLayers, Tree]:
        """Return n_k w_k and n_k, or only w_k - w if privacy protects clients."""
        if ctx.task.privacy is not None:
            return MovedLayers(moved(self.state(net), down)), own
        arrays = {place: sums.rows * array for place, array in self.state(net).items()}
        return WeightedLayers(arrays, sums.rows), own

    def server_update(self, server: Weights, replies: Replies, ctx: Context) -> Weights:
        """Return the mean over all clients that answered."""
        return averaged(replies, server, ctx)

    def models(self, server: Weights, ctx: Context) -> Mapping[str, Net]:
        """Return no model: the layers below belong to the clients."""
        return {}


def _shape(arrays: Mapping[str, Tensor], name: str) -> str:
    return str(list(arrays[name].shape)) if name in arrays else "missing"


@dataclass(frozen=True)
class LGFedAvg(Method):
    """Local representations below ``global_layers`` averaged layers; all layers learn together."""

    global_layers: PositiveInt = 1
    """Number of last layers that are averaged over all clients. The layers below stay local."""

    @property
    def keeps(self) -> Part:
        """The layers below the global ones."""
        return f"but_last:{self.global_layers}"

    @property
    def exchange(self) -> SharedLayers:
        """The average of the global layers over the clients of all architectures."""
        return SharedLayers(self.global_layers)

    def check(self, task: Task) -> None:
        """Raise MethodError if a net has too few layers, or the global layers differ in shape."""
        self.exchange.check(task, "method.global_layers")
