"""The sections of a recipe, their keys and their bounds.

Most keys define the experiment. The others have a *role*: they are only its ``seed``, or say how
the ``work`` is done, what is written into the ``record``, or what the paper ``printed``. Code that
compares runs, resumes them or searches over them asks :func:`role_of`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedgist.core.objective import CLASS_METRICS, OBJECTIVES
from fedgist.data.augment import Augmentation
from fedgist.data.partition import PARTITIONS
from fedgist.data.sources.registry import DEFAULT_SOURCE
from fedgist.engines.engine import EngineName
from fedgist.engines.stacking_plan import Plan
from fedgist.errors import one_of
from fedgist.federation.section import CLOSED, Device, Positive, Share
from fedgist.federation.training_section import TrainSection
from fedgist.methods import DEFAULT_METHOD

Role = Literal["seed", "work", "record", "printed"]


def _role(role: Role) -> Any:
    """Return a field that has this role in an experiment."""
    return Field(json_schema_extra={"role": role})


class _Section(BaseModel):
    model_config = CLOSED


class _Open(BaseModel):
    """A section with options of what it names (a source, a model, a method) as further keys."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


class Data(_Open):
    """Which examples are used."""

    name: str = DEFAULT_SOURCE
    classes: tuple[str, ...] = ()  # their names in order; the source's own if not given
    train_rows: Positive | None = None  # only this many training rows, from the first
    # share of each client's training rows that is held out
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    augment: tuple[Augmentation, ...] = ()


class Partitioning(_Section):
    """Which client has which rows. Keys of other partitions than the one named have no effect."""

    name: str = "dirichlet"
    alpha: Annotated[float, Field(gt=0)] = 0.5
    classes_per_client: Positive = 2
    min_size: Positive = 1

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return one_of(name, PARTITIONS, "partition")

    @property
    def options(self) -> dict[str, Any]:
        """The options of the partition named."""
        taken = inspect.signature(PARTITIONS[self.name]).parameters
        return {key: getattr(self, key) for key in type(self).model_fields if key in taken}


class ClientsSection(_Section):
    """The clients: how many, with which models, from which start, and when they are online."""

    num_clients: Positive = 10
    # share of the clients by model; if empty, all have [model]
    architectures: dict[str, dict[str, Any] | float] = {}
    init: Literal["shared", "own"] = "shared"
    # chance to be online in a round, or a file of "round,client" lines
    availability: Share | str = 1.0
    delay: Share = 0.0  # chance that a reply reaches the server a round late


class ModelSection(_Open):
    """The clients' model."""

    name: str = "mlp"
    head: str | None = None  # name of the linear layer that is the head; the last one if not given
    weights: str | None = None  # a file whose arrays are the start, in place of random numbers


class MethodSection(_Open):
    """Which method, and its hyper-parameters."""

    name: str = DEFAULT_METHOD


class ObjectiveSection(_Section):
    """The loss that models are trained on, and the metrics by which they are judged beside it."""

    name: str = "classes"
    metrics: Annotated[tuple[str, ...], Field(min_length=1)] = tuple(CLASS_METRICS)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return one_of(name, OBJECTIVES, "objective")

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(one_of(name, CLASS_METRICS, "metric") for name in metrics)


class PrivacySection(_Section):
    """What the server may see."""

    min_replies: Positive = 1  # what comes from fewer clients is withheld from the server
    share_measurements: bool = True  # training losses and scores leave the clients


class TestSet(_Section):
    """A part of the test set: the rows of some classes."""

    classes: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class EvaluateSection(_Section):
    """What is measured, and when; the last round is always measured."""

    every: Annotated[Positive, _role("record")] = 1
    # each client's own test rows, the whole test set, or the server's own models alone
    on: Literal["client", "test", "global"] = "client"
    train: bool = False  # also on each client's training rows
    sets: dict[str, TestSet] = {}  # further test sets of the server's own models, by name
    # features of this many test rows of each client are saved at the end, for pictures
    save_features: Annotated[int, Field(ge=0), _role("record")] = 0


class EngineSection(_Section):
    """How the work is done. Only ``plans`` can change results, in their last bits."""

    name: EngineName = "local"
    device: Device = "cpu"
    workers: Literal["auto"] | Positive = "auto"
    cohort_size: Literal["auto"] | Positive = "auto"
    # bytes for stacks of clients; half of the machine's if not given
    memory_limit: Positive | None = None
    checkpoint_every: Positive = 10
    plans: dict[str, Plan] = {}  # chosen before round 1, by architecture


class PaperSection(_Section):
    """What the paper printed for this experiment; it is shown beside our numbers."""

    source: str = ""
    target_accuracy: Annotated[float, Field(gt=0, le=100)] | None = None  # percent
    accuracy: dict[str, tuple[float, float]] = {}  # by method: percent, and its standard error
    communication: dict[str, float] = {}  # by method: bits both ways until the target accuracy
    departs: tuple[str, ...] = ()  # settings that differ from the paper's, filled in by reading


class Recipe(_Section):
    """The complete description of a run."""

    seed: Annotated[int, _role("seed")] = 0
    data: Data = Data()
    partition: Partitioning = Partitioning()
    clients: ClientsSection = ClientsSection()
    model: ModelSection = ModelSection()
    method: MethodSection = MethodSection()
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection = TrainSection()
    privacy: PrivacySection = PrivacySection()
    evaluate: EvaluateSection = EvaluateSection()
    engine: Annotated[EngineSection, _role("work")] = EngineSection()
    paper: Annotated[PaperSection, _role("printed")] = PaperSection()

    def settings(self) -> dict[str, Any]:
        """Return all settings that decide a run's record: none of role ``work`` or ``printed``."""
        aside = {name for name in type(self).model_fields if role_of(name) in {"work", "printed"}}
        return self.model_dump(mode="json", exclude=aside)

    def to_toml(self) -> str:
        """Return the recipe as TOML, defaults included."""
        return tomli_w.dumps(_plain(self.model_dump()))


def role_of(key: str) -> Role | None:
    """Return the role of the key ``section.key``; None if it defines the experiment."""
    model: type[BaseModel] = Recipe
    for part in key.split("."):
        field = model.model_fields.get(part)
        if field is None:
            return None
        if isinstance(field.json_schema_extra, dict) and "role" in field.json_schema_extra:
            return cast("Role", field.json_schema_extra["role"])
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        model = field.annotation
    return None


def _plain(value: Any) -> Any:
    """Return a recipe's value in TOML's types: None left out, dataclasses as tables."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
