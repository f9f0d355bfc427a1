"""The settings of local training in a recipe, which all methods share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedgist.core.optimizer import Optimizer
from fedgist.core.schedules import Schedule

Precision = Literal["float32", "bfloat16"]
Sampling = Literal["fixed", "poisson"]
Life = Literal["epoch", "round", "run"]  # how long optimizer state is kept
CONSTANT = Schedule()


@dataclass(frozen=True)
class Pool:
    """A pool of clients that train one model: its size, and its clients per round."""

    size: int
    per_round: int


@dataclass(frozen=True)
class Training:
    """The training settings of a recipe, common to all methods.

    ``sampling`` selects a round's clients: ``fixed`` takes ``fraction_train`` of them; ``poisson``
    samples each client independently with that probability, so that a round may have none.
    ``schedule`` multiplies the learning rate of a round. ``clip_norm`` bounds the norm of each
    client's gradient; 0 disables clipping. With ``balanced``, all classes of a client have the same
    weight in the task's loss, whatever their numbers of rows. ``smoothing`` smooths labels.
    ``precision`` is that of a training step's forward and backward pass; all other computations are
    in float32. ``memory`` says how long optimizer state is kept. ``pools`` by name, if there are
    any, set the clients per round in place of ``fraction_train``.
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
        """Return the factor of learning rates in round ``number``."""
        return self.schedule.factor(number, self.num_rounds)
