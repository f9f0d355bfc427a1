"""Settings of an optimizer; the update rules are in ``optim.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["sgd", "momentum", "adam", "adamw"]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its settings, named as in ``torch.optim``.

    ``name`` is ``sgd``, ``momentum``, ``adam`` or ``adamw``. Only ``momentum`` reads ``momentum``.
    Only ``adam`` and ``adamw`` read ``betas`` and ``eps``. ``weight_decay`` is added to the
    gradient; ``adamw`` subtracts it from the parameters.
    """

    name: OptimizerName = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
