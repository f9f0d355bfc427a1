"""FedRep: clients fit their own heads to a common representation, then train the representation.

Collins, Hassani, Mokhtari, Shakkottai 2021, "Exploiting shared representations for personalized
federated learning", algorithm 1 (ICML 2021, https://arxiv.org/abs/2102.07078). See
docs/methods/fedrep.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.core.bounds import PositiveInt
from fedgist.core.method import Context, Exchange, Method, Part, Phase, Task
from fedgist.core.nets.parts import check_depth
from fedgist.methods.common.averaging import Averaging


@dataclass(frozen=True)
class FedRep(Method):
    """Local layers that learn for ``head_epochs``, above an averaged body that learns second."""

    local_layers: PositiveInt = 1
    """Number of last layers that stay at the client. The layers below are averaged."""
    head_epochs: PositiveInt = 10
    """Number of local epochs for the local layers, before the layers below are trained.

    The layers below are trained for ``train.local_epochs``.
    """

    @property
    def keeps(self) -> Part:
        """The local head, h_i."""
        return f"last:{self.local_layers}"

    @property
    def exchange(self) -> Exchange:
        """The average of the representation, phi, weighted by rows."""
        return Averaging(f"but_last:{self.local_layers}")

    def check(self, task: Task) -> None:
        """Raise MethodError if a net has no layer below the local ones."""
        nets = {name: arch.layers for name, arch in task.architectures.items()}
        check_depth(nets, "method.local_layers", self.local_layers, rest=True)

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return two phases: the head learns with a fixed body, then the body with a fixed head."""
        head, body = f"last:{self.local_layers}", f"but_last:{self.local_layers}"
        return Phase((head,), epochs=self.head_epochs), Phase((body,))
