"""The settings of local training, which all methods share: the section ``[train]`` of a recipe.

The update rules of optimizers are in ``optim.py``. A schedule of the learning rate is a pure
function of the round's number and the number of rounds, so a resumed run and a site that missed
rounds continue with the same rate. It multiplies the rate of every training phase of a round,
including phases with their own optimizer. Phases before a test keep the full rate. Its factors are
those of ``torch.optim.lr_scheduler``, with a round in place of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from fedgist.core.bounds import (
    BelowOne,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Share,
)
from fedgist.options import CLOSED

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
    recipe's optimizer takes ``replace(ctx.task.training.local_optimizer, lr=0.1)``; a new optimizer
    has none of the recipe's settings, so it must state its rate. The tensors named in ``plain``,
    such as ``own.bias``, learn by plain SGD of the same rate, without decay.
    """

    name: OptimizerName
    lr: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    plain: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pool:
    """A pool of clients that train one model: its size, and its clients per round."""

    size: int
    per_round: int


MOMENTUM = 0.9  # of the optimizer that has one, where a recipe does not say
ADAMW_DECAY = 0.01  # torch's default; without decay it would be adam
#: The options of each schedule, with their defaults.
SCHEDULE_OPTIONS: Mapping[ScheduleName, Mapping[str, float]] = MappingProxyType(
    {
        "constant": {},
        "step": {"step_rounds": 10, "step_factor": 0.1},
        "linear": {"min_factor": 0.0},
        "cosine": {"min_factor": 0.0},
    }
)


class Schedule(BaseModel):
    """How the learning rate changes over rounds. A name alone is a schedule with its defaults.

    In the first ``warmup_rounds`` w the rate rises linearly: w' / (w + 1) of the full rate in round
    w'. After the warm-up, ``constant`` keeps the rate, and ``step`` multiplies it by
    ``step_factor`` every ``step_rounds`` rounds. ``linear`` and ``cosine`` (Loshchilov and Hutter
    2017, eq. 5, without restarts) let it fall to the fraction ``min_factor``, which they would
    reach in the round after the last.
    """

    model_config = CLOSED

    name: ScheduleName = "constant"
    """How the learning rate changes from round to round."""
    warmup_rounds: NonNegativeInt = 0
    """Number of first rounds in which the learning rate rises evenly. For any schedule."""
    step_rounds: PositiveInt | None = None
    """For ``step``: number of rounds between two drops of the learning rate. Default 10."""
    step_factor: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For ``step``: the learning rate is multiplied by this factor at each drop. Default 0.1."""
    min_factor: Share | None = None
    """For ``linear`` and ``cosine``: final learning rate as a fraction of ``train.lr``. Default 0.
    """

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, raw: object) -> object:
        table = {"name": raw} if isinstance(raw, str) else raw
        if not isinstance(table, Mapping):
            return table
        defaults = next((d for n, d in SCHEDULE_OPTIONS.items() if n == table.get("name")), {})
        return {**defaults, **table}

    @field_validator("step_rounds", "step_factor", "min_factor")
    @classmethod
    def _read(cls, value: float | None, info: ValidationInfo) -> float | None:
        name = info.data.get("name")
        if value is not None and name and info.field_name not in SCHEDULE_OPTIONS[name]:
            readers = [n for n, options in SCHEDULE_OPTIONS.items() if info.field_name in options]
            raise ValueError(
                f"the schedule {name!r} does not read it; known to: {', '.join(readers)}"
            )
        return value

    def factor(self, number: int, num_rounds: int) -> float:
        """Return the factor of the rate in round ``number``; round 0 counts as round 1.

        >>> [Schedule(name="step", step_rounds=2).factor(r, 4) for r in (1, 2, 3, 4)]
        [1.0, 1.0, 0.1, 0.1]
        """
        done = max(number, 1) - 1 - self.warmup_rounds  # rounds since the warm-up
        if done < 0:
            return (done + 1 + self.warmup_rounds) / (self.warmup_rounds + 1)
        if self.name == "step":
            assert self.step_factor is not None
            assert self.step_rounds is not None
            return self.step_factor ** (done // self.step_rounds)
        if self.name == "constant":
            return 1.0
        share = done / (num_rounds - self.warmup_rounds)
        left = 1.0 - share if self.name == "linear" else (1.0 + math.cos(math.pi * share)) / 2
        least = self.min_factor or 0.0
        return least + (1.0 - least) * left


@dataclass(frozen=True)
class Work:
    """How long a client trains in a phase: passes over its rows, or steps if they are given.

    ``most`` are the most steps of each phase of a stage; none means that no phase is cut.
    """

    epochs: float = 1
    steps: int | None = None
    most: tuple[int, ...] = ()


class Training(BaseModel):
    """Local training at the clients. These settings apply to every method."""

    model_config = CLOSED

    num_rounds: PositiveInt = 20
    """Number of rounds of the run."""
    fraction_train: Fraction = 1.0
    """Fraction of all clients selected in each round."""
    sampling: Sampling = "fixed"
    """How clients are selected.

    ``fixed``: a fixed number of the clients that are online. ``poisson``: each client independently
    with probability ``fraction_train``, so that a round may select no client. Privacy amplification
    needs ``poisson``.
    """
    local_epochs: PositiveInt = 1
    """Number of passes over its training rows that a client makes in a round.

    More epochs mean fewer messages, but local models drift further apart.
    """
    local_steps: PositiveInt | None = None
    """Number of local steps in a round, in place of ``local_epochs``.

    All clients then take as many, whatever their rows are.
    """
    round_seconds: Positive | None = None
    """Seconds after which a site ends its training of a stage, with the step that it is in.

    For federations with machines of unlike speed. ``local_epochs`` or ``local_steps`` is then the
    most that a site does. The number of its steps is in its reply and in the record.
    """
    steps_of: str = ""
    """The directory of a federation's run: a simulation takes as many steps as it says.

    It repeats a federation with ``round_seconds``.
    """
    batch_size: PositiveInt = 10
    """Number of training rows per local step."""
    lr: Positive = 1e-3
    """Learning rate of the clients' optimizer. Tune it first."""
    lr_schedule: Schedule = Schedule()
    """How the learning rate changes over rounds: a name, or a table of the keys below."""
    optimizer: OptimizerName = "adam"
    """The clients' optimizer."""
    optimizer_memory: Life = "round"
    """When optimizer state is reset: every round, every epoch, or never (``run``).

    Some methods override this, and methods whose phases change after round 1 refuse ``run``.
    """
    momentum: BelowOne | None = None
    """Momentum of the optimizer ``momentum``. Default 0.9."""
    weight_decay: NonNegative = 0.0
    """Weight decay. It is added to the gradient as an L2 penalty.

    ``adamw`` applies it to the weights directly and has the default 0.01.
    """
    clip_norm: NonNegative = 0.0
    """Maximum gradient norm (L2) of a client in every step. 0 disables clipping."""
    class_weights: Literal["none", "balanced"] = "none"
    """``balanced`` gives all classes of a client the same total weight in its loss.

    Use it if a client has many more rows of some classes than of others.
    """
    sample_weights: str = ""
    """The annotation of rows (``data.annotations``) that is each row's weight, at least 0.

    It multiplies the row's part in losses and in the sums of rows that clients send. Numbers of
    rows and classes, by which averages weigh clients, and metrics count every row alike.
    """
    label_smoothing: BelowOne = 0.0
    """Fraction of each label that is spread evenly over all classes."""
    precision: Precision = "float32"
    """Number format of training steps.

    ``bfloat16`` uses torch's autocast and needs a GPU, or a CPU with AMX.
    """

    @model_validator(mode="before")
    @classmethod
    def _with_decay(cls, raw: object) -> object:
        if isinstance(raw, Mapping) and raw.get("optimizer") == "adamw":
            return {"weight_decay": ADAMW_DECAY, **raw}
        return raw

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if self.local_steps is not None and self.local_epochs != 1:
            raise ValueError("give train.local_epochs or train.local_steps, not both")
        return self

    @property
    def work(self) -> Work:
        """How long a client trains in a phase that does not say."""
        return Work(self.local_epochs, self.local_steps)

    @property
    def local_optimizer(self) -> Optimizer:
        """The clients' optimizer with its settings."""
        return Optimizer(
            self.optimizer,
            lr=self.lr,
            momentum=MOMENTUM if self.momentum is None else self.momentum,
            weight_decay=self.weight_decay,
        )

    def lr_factor(self, number: int) -> float:
        """Return the factor of learning rates in round ``number``."""
        return self.lr_schedule.factor(number, self.num_rounds)
