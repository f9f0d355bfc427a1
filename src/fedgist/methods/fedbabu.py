"""FedBABU: all clients train the body of the model, under a head that is never trained.

Oh, Kim, Yun 2022, "FedBABU: toward enhanced representation for federated image classification",
algorithm 1 (https://arxiv.org/abs/2106.06042). See docs/methods/fedbabu.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedgist.core.bounds import NonNegativeInt
from fedgist.core.method import Context, Exchange, Method, Net, Part, Phase
from fedgist.methods.common.averaging import Averages, Averaging


@dataclass(frozen=True)
class FedBABU(Method):
    """Averaged bodies; in the last round, clients are tested before and after fine-tuning.

    The head is that of the common initial net, which every client has: it is neither kept nor sent.
    """

    finetune_epochs: NonNegativeInt = 5
    """Number of epochs of fine-tuning before the last test. 0 disables fine-tuning."""

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging("body")

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Return one phase in which only the body learns."""
        return (Phase(("body",)),)

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        """Return the fine-tuning of body and head, in the last round only."""
        last = ctx.round == ctx.task.training.num_rounds
        return (Phase(epochs=self.finetune_epochs),) if last and self.finetune_epochs else ()

    def models(self, server: Averages, ctx: Context) -> Mapping[str, Net]:
        """Return the global model of each architecture: its body under the initial head."""
        starts = ctx.task.starts
        return {name: starts[name].with_arrays(w.arrays) for name, w in server.weights.items()}
