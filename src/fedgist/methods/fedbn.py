"""FedBN: FedAvg on everything but batch norm, which stays with the client.

Li, Jiang, Zhang, Kamp, Dou 2021, "FedBN: federated learning on non-IID features via local batch
normalization", algorithm 1 (ICLR 2021, https://arxiv.org/abs/2102.07623). See
docs/methods/fedbn.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedgist.core.method import Exchange, Method, Part, Task
from fedgist.core.nets.parts import BUT_NORMS, NORMS
from fedgist.methods.common.averaging import Averaging


@dataclass(frozen=True)
class FedBN(Method):
    """Averaged weights of each architecture; weights and statistics of batch norm are personal."""

    keeps: ClassVar[Part] = NORMS
    exchange: ClassVar[Exchange] = Averaging(BUT_NORMS)

    def notes(self, task: Task) -> Sequence[str]:
        """Return a sentence if an architecture has no batch norm: it then is FedAvg's."""
        without = [n for n, arch in task.architectures.items() if not arch.layers.norms]
        names = ", ".join(without)
        return (f"without batch norm FedBN is FedAvg: {names}",) if without else ()
