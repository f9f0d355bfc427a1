"""FedPer: clients keep their last layers, and the layers below are averaged.

Arivazhagan, Aggarwal, Singh, Choudhary 2019, "Federated learning with personalization layers",
algorithms 1 and 2 (https://arxiv.org/abs/1912.00818). See docs/methods/fedper.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.core.bounds import PositiveInt
from fedgist.core.method import Exchange, Method, Part, Task
from fedgist.core.nets.parts import check_depth
from fedgist.methods.common.averaging import Averaging


@dataclass(frozen=True)
class FedPer(Method):
    """Averaged base layers of each architecture, below ``local_layers`` personal layers."""

    local_layers: PositiveInt = 1
    """Number of last layers that stay at the client. The layers below are averaged."""

    @property
    def keeps(self) -> Part:
        """The personalization layers, W_P."""
        return f"last:{self.local_layers}"

    @property
    def exchange(self) -> Exchange:
        """The average of the base layers, W_B, weighted by rows."""
        return Averaging(f"but_last:{self.local_layers}")

    def check(self, task: Task) -> None:
        """Raise MethodError if a net has no layer below the local ones."""
        nets = {name: arch.layers for name, arch in task.architectures.items()}
        check_depth(nets, "method.local_layers", self.local_layers, rest=True)
