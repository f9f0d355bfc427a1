"""What a recipe says about local training, for every method alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedgist.core.optimizer import Optimizer
from fedgist.core.schedules import Schedule

Precision = Literal["float32", "bfloat16"]
Sampling = Literal["fixed", "poisson"]
Life = Literal["epoch", "round", "run"]  # how long an optimizer remembers
CONSTANT = Schedule()


@dataclass(frozen=True)
class Pool:
    """A pool of clients, who train a model of its own: how many there are, and a round asks."""

    size: int
    per_round: int


@dataclass(frozen=True)
class Training:
    """What a recipe says about training, for every method alike.

    ``sampling`` says how a round's clients are drawn: ``fraction_train`` of them, or each by itself
    with that chance, so that a round may have none. ``schedule`` multiplies the learning rate of a
    round. ``clip_norm`` bounds the norm of each client's gradient, unless it is 0. With
    ``balanced``, a client's classes weigh equally in the task's loss, however many rows it has of
    each, and ``smoothing`` smooths its labels. ``precision`` is that of a training step's forward
    and backward pass; all else is done in float32. ``memory``: how long a client's optimizer keeps
    its moments. ``pools`` by name, where there are any: they say how many clients a round asks of
    each, in place of ``fraction_train``.
    """

    num_rounds: int
    fraction_train: float
    local_epochs: int
    batch_size: int
    optimizer: Optimizer
    schedule: Schedule = CONSTANT
    clip_norm: float = 0.0
    balanced: bool = False
    smoothing: float = 0.0
    precision: Precision = "float32"
    sampling: Sampling = "fixed"
    memory: Life = "round"
    pools: Mapping[str, Pool] = field(default_factory=dict)

    def lr_factor(self, number: int) -> float:
        """Return by what learning rates are multiplied in round ``number``."""
        return self.schedule.factor(number, self.num_rounds)
