"""The section of a recipe about local training: optimizer, schedule and terms of the loss."""

from __future__ import annotations

from collections.abc import Mapping
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
from fedgist.core.training import (
    Life,
    Optimizer,
    OptimizerName,
    Precision,
    Sampling,
    Schedule,
    ScheduleName,
    Training,
)
from fedgist.errors import RecipeError
from fedgist.recipe.section import CLOSED

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


class ScheduleSection(BaseModel):
    """How the learning rate changes over rounds. A name alone is a schedule with its defaults."""

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

    def schedule(self) -> Schedule:
        """Return the schedule."""
        return Schedule(**self.model_dump(exclude_none=True))


class TrainSection(BaseModel):
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
    batch_size: PositiveInt = 10
    """Number of training rows per local step."""
    lr: Positive = 1e-3
    """Learning rate of the clients' optimizer. Tune it first."""
    lr_schedule: ScheduleSection = ScheduleSection()
    """How the learning rate changes over rounds: a name, or a table of the keys below."""
    optimizer: OptimizerName = "adam"
    """The clients' optimizer."""
    optimizer_memory: Life = "round"
    """When optimizer state is reset: every round, every epoch, or never (``run``).

    Some methods override this.
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

    It multiplies the row's loss, and the row's part in the sums from which FedLog solves for its
    head. Metrics count every row alike.
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


def training_of(t: TrainSection) -> Training:
    """Return the training settings of a recipe as values for methods and engines."""
    if t.lr_schedule.warmup_rounds >= t.num_rounds:
        raise RecipeError(
            f"train.lr_schedule.warmup_rounds = {t.lr_schedule.warmup_rounds} leaves none of "
            f"train.num_rounds = {t.num_rounds}"
        )
    return Training(
        t.num_rounds,
        t.fraction_train,
        t.local_epochs,
        t.batch_size,
        Optimizer(
            t.optimizer,
            lr=t.lr,
            momentum=MOMENTUM if t.momentum is None else t.momentum,
            weight_decay=t.weight_decay,
        ),
        t.lr_schedule.schedule(),
        t.clip_norm,
        balanced=t.class_weights == "balanced",
        smoothing=t.label_smoothing,
        row_weights=t.sample_weights,
        precision=t.precision,
        sampling=t.sampling,
        memory=t.optimizer_memory,
    )
