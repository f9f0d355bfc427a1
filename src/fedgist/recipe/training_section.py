"""The section of a recipe about local training: optimizer, schedule, and what the loss counts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from fedgist.core.optimizer import Optimizer, OptimizerName
from fedgist.core.schedules import Schedule, ScheduleName
from fedgist.core.training import Life, Precision, Sampling, Training
from fedgist.errors import RecipeError
from fedgist.recipe.section import CLOSED, Positive, Share

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
    """How the learning rate moves over rounds; a name alone stands for a schedule's defaults."""

    model_config = CLOSED

    name: ScheduleName = "constant"
    warmup_rounds: Annotated[int, Field(ge=0)] = 0  # in which the rate rises, of any schedule
    step_rounds: Positive | None = None
    step_factor: Annotated[float, Field(gt=0, lt=1)] | None = None
    min_factor: Share | None = None

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
    """Training, for every method alike."""

    model_config = CLOSED

    num_rounds: Positive = 20
    fraction_train: Annotated[float, Field(gt=0, le=1)] = 1.0
    # how the clients of a round are drawn: so many, or each by itself with that chance
    sampling: Sampling = "fixed"
    local_epochs: Positive = 1
    batch_size: Positive = 10
    lr: Annotated[float, Field(gt=0)] = 1e-3
    lr_schedule: ScheduleSection = ScheduleSection()
    optimizer: OptimizerName = "adam"
    # when a client's optimizer starts anew: with each epoch or round, or never within a run
    optimizer_memory: Life = "round"
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None  # of optimizer momentum
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # 0.01 of adamw
    # the norm to which each client's gradient is cut back in every step; 0: it never is
    clip_norm: Annotated[float, Field(ge=0)] = 0.0
    class_weights: Literal["none", "balanced"] = "none"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    precision: Precision = "float32"

    @model_validator(mode="before")
    @classmethod
    def _with_decay(cls, raw: object) -> object:
        if isinstance(raw, Mapping) and raw.get("optimizer") == "adamw":
            return {"weight_decay": ADAMW_DECAY, **raw}
        return raw


def training_of(t: TrainSection) -> Training:
    """Return what a recipe says about training."""
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
        precision=t.precision,
        sampling=t.sampling,
        memory=t.optimizer_memory,
    )
