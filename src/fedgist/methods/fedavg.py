"""FedAvg: clients train the global model, and the server averages their weights by rows.

McMahan, Moore, Ramage, Hampson, Arcas 2017, "Communication-efficient learning of deep networks from
decentralized data", algorithm 1 (AISTATS 2017, https://arxiv.org/abs/1602.05629). With several
architectures, the average is taken within each. See docs/methods/fedavg.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedgist.core.method import Exchange, Method, Part
from fedgist.methods.common.averaging import Averaging


@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging; its only equation, w = sum_k n_k w_k / n, is in ``Averaging``."""

    keeps: ClassVar[Part] = "none"
    exchange: ClassVar[Exchange] = Averaging()
