"""The settings of local training in a recipe, which all methods share.

The update rules of optimizers are in ``optim.py``. A schedule of the learning rate is a pure
function of the round's number and the number of rounds, so a resumed run and a site that missed
rounds continue with the same rate. It multiplies the rate of every training phase of a round,
including phases with their own optimizer. Phases before a test keep the full rate. Its factors are
those of ``torch.optim.lr_scheduler``, with a round in place of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OptimizerName = Literal["sgd", "momentum", "adam", "adamw"]
ScheduleName = Literal["constant", "step", "linear", "cosine"]
Precision = Literal["float32", "bfloat16"]
Sampling = Literal["fixed", "poisson"]
Life = Literal["epoch", "round", "run"]  # how long optimizer state is kept


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its settings, named as in ``torch.optim``.

    ``name`` is ``sgd``, ``momentum``, ``adam`` or ``adamw``. Only ``momentum`` reads ``momentum``.
    Only ``adam`` and ``adamw`` read ``betas`` and ``eps``. ``weight_decay`` is added to the
    gradient; ``adamw`` subtracts it from the parameters. A phase that changes one setting of the
    recipe's optimizer takes ``replace(ctx.task.training.optimizer, lr=0.1)``; a new optimizer has
    none of the recipe's settings, so it must state its rate. The tensors named in ``plain``, such
    as ``own.bias``, learn by plain SGD of the same rate, without decay.
    """

    name: OptimizerName
    lr: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    plain: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A schedule and its settings.

    In the first ``warmup_rounds`` w the rate rises linearly: w' / (w + 1) of the full rate in round
    w'. After the warm-up, ``constant`` keeps the rate, and ``step`` multiplies it by
    ``step_factor`` every ``step_rounds`` rounds. ``linear`` and ``cosine`` (Loshchilov and Hutter
    2017, eq. 5, without restarts) let it fall to the fraction ``min_factor``, which they would
    reach in the round after the last.
    """

    name: ScheduleName = "constant"
    warmup_rounds: int = 0
    step_rounds: int = 10
    step_factor: float = 0.1
    min_factor: float = 0.0

    def factor(self, number: int, num_rounds: int) -> float:
        """Return the factor of the rate in round ``number``; round 0 counts as round 1.

        >>> [Schedule("step", step_rounds=2, step_factor=0.5).factor(r, 4) for r in (1, 2, 3, 4)]
        [1.0, 1.0, 0.5, 0.5]
        """
        done = max(number, 1) - 1 - self.warmup_rounds  # rounds since the warm-up
        if done < 0:
            return (done + 1 + self.warmup_rounds) / (self.warmup_rounds + 1)
        if self.name == "step":
            return self.step_factor ** (done // self.step_rounds)
        if self.name == "constant":
            return 1.0
        share = done / (num_rounds - self.warmup_rounds)
        left = 1.0 - share if self.name == "linear" else (1.0 + math.cos(math.pi * share)) / 2
        return self.min_factor + (1.0 - self.min_factor) * left


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
    weight in the task's loss, whatever their numbers of rows. ``row_weights`` is the annotation
    that weighs rows, or empty. ``smoothing`` smooths labels. ``precision`` is that of a training
    step's forward and backward pass; all other computations are in float32. ``memory`` says how
    long optimizer state is kept. ``pools`` by name, if there are any, set the clients per round in
    place of ``fraction_train``.
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
    row_weights: str = ""
    precision: Precision = "float32"
    sampling: Sampling = "fixed"
    memory: Life = "round"
    pools: Mapping[str, Pool] = field(default_factory=dict)

    def lr_factor(self, number: int) -> float:
        """Return the factor of learning rates in round ``number``."""
        return self.schedule.factor(number, self.num_rounds)
