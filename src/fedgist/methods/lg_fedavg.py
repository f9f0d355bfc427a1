"""LG-FedAvg: clients keep their lower layers, and the last ones are averaged over all clients.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency 2020, "Think locally, act
globally: federated learning with local and global representations", algorithm 1. See
docs/methods/lg_fedavg.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.core.bounds import PositiveInt
from fedgist.core.method import Method, Part, Task
from fedgist.core.shared_layers import SharedLayers


@dataclass(frozen=True)
class LGFedAvg(Method):
    """Local representations under ``global_layers`` averaged layers; all learn together."""

    global_layers: PositiveInt = 1
    """Number of last layers that are averaged over all clients. The layers below stay local."""

    @property
    def keeps(self) -> Part:
        """The layers below the global ones."""
        return f"but_last:{self.global_layers}"

    @property
    def exchange(self) -> SharedLayers:
        """The average of the global layers over clients of all architectures."""
        return SharedLayers(self.global_layers)

    def check(self, task: Task) -> None:
        """Raise MethodError if a net has fewer layers, or the global ones differ in shape."""
        self.exchange.check(task, "method.global_layers")
