"""The sections of a recipe, their keys and their bounds.

Most keys define the experiment. The others have a *role*: they are only its ``seed``, or say how
the ``work`` is done, what is written into the ``record``, or what the paper ``printed``. Code that
compares runs, resumes them or searches over them asks :func:`role_of`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, cast

import tomli_w
from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, model_validator

from fedgist.core.metrics import CHOSEN_METRICS, CLASS_METRICS, METRICS_OF, OBJECTIVES
from fedgist.data import PARTITIONS
from fedgist.engines import EngineName
from fedgist.errors import RecipeError, listed, shown
from fedgist.methods import DEFAULT_METHOD, METHODS, base_name
from fedgist.models import MODELS
from fedgist.recipe.data_section import Data
from fedgist.recipe.graph_section import GraphSection
from fedgist.recipe.privacy_section import Amount, PrivacySection
from fedgist.recipe.section import (
    CLOSED,
    GIVEN,
    Device,
    OpenSection,
    Positive,
    Share,
    known,
)
from fedgist.recipe.training_section import TrainSection
from fedgist.training.stacking_plan import Plan

MOST_WORKERS = 1024  # each is a process that holds torch
Role = Literal["seed", "work", "record", "printed"]


def _role(role: Role) -> Any:
    """Return a field that has this role in an experiment."""
    return Field(json_schema_extra={"role": role})


class _Section(BaseModel):
    model_config = CLOSED


class Partitioning(OpenSection):
    """Which client has which rows, and the options of that partition."""

    name: Annotated[str, known(PARTITIONS, "partition")] = "dirichlet"


class ClientsSection(_Section):
    """The clients: how many, with which models, from which start, and when they are online."""

    num_clients: Positive = 10
    # share of the clients by model; if empty, all have [model]
    architectures: dict[str, dict[str, Any] | float] = {}
    # groups with a model each, in which a client may be several times
    pools: dict[str, dict[str, object]] = {}
    init: Literal["shared", "own"] = "shared"
    # chance to be online in a round, or a file of "round,client" lines
    availability: Share | str = 1.0
    delay: Share = 0.0  # chance that a reply reaches the server a round late
    graph: GraphSection = GraphSection()  # whom each hears, or a relay
    max_norm: Annotated[float, Field(gt=0)] | None = None  # of messages to the server: L2
    max_rows: Positive | None = None  # that a client may say it has
    # what some clients set for themselves, as the method lets them
    settings: dict[str, dict[str, object]] = {}


class ModelSection(OpenSection):
    """The clients' model."""

    name: Annotated[str, known(MODELS, "model", "factory")] = "mlp"
    head: str | None = None  # name of the linear layer that is the head; the last one if not given
    weights: str | None = None  # a file whose arrays are the start, in place of random numbers
    # the random start of linear layers and convolutions: torch's own, or a normal distribution of
    # deviation 1 / sqrt(inputs) cut off at two deviations and biases of 0, as in Haiku
    init: Literal["default", "truncated_normal"] = "default"

    @model_validator(mode="after")
    def _starts_once(self) -> ModelSection:
        if self.weights is not None and self.init != "default":
            raise ValueError(f"weights are the start: init = {self.init!r} would not be used")
        return self


VARIANT = re.compile(r"[^@]*(@[\w.+-]+)?", re.ASCII)  # it is a part of folders' names, too


def _well_named(name: str) -> str:
    if not VARIANT.fullmatch(name):
        raise ValueError(
            f"{shown(name)}: a variant is METHOD@NAME, a name of letters, digits and _.+-"
        )
    return name


class MethodSection(OpenSection):
    """Which method or variant of one, ``NAME@VARIANT``, and its hyper-parameters."""

    name: Annotated[
        str, known(METHODS, "method", "Class", base_name), AfterValidator(_well_named)
    ] = DEFAULT_METHOD


class ObjectiveSection(OpenSection):
    """The loss that models are trained on, and the metrics by which they are judged beside it.

    Further keys are options of the objective.
    """

    name: Annotated[str, known(OBJECTIVES, "objective")] = "classes"
    metrics: Annotated[
        tuple[Annotated[str, known(CHOSEN_METRICS, "metric")], ...],
        Field(min_length=1),
    ] = tuple(CLASS_METRICS)

    @model_validator(mode="after")
    def _has_metrics(self) -> ObjectiveSection:
        if "metrics" not in self.model_fields_set:  # all of its own; a copy would not be returned
            object.__setattr__(self, "metrics", tuple(METRICS_OF[self.name]))
        if strange := [name for name in self.metrics if name not in METRICS_OF[self.name]]:
            raise ValueError(
                f"{self.name} has no metric {strange[0]!r}; it has {listed(METRICS_OF[self.name])}"
            )
        return self


class TestSet(_Section):
    """A part of the test set: the rows of some classes, or of clients whose names match."""

    classes: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    clients: str | None = None  # such as "*/question"

    @model_validator(mode="after")
    def _is_one(self) -> TestSet:
        if (self.classes is None) == (self.clients is None):
            raise ValueError("a test set is of classes or of clients: give one")
        return self


class EvaluateSection(_Section):
    """What is measured, and when; the last round is always measured."""

    every: Annotated[Positive, _role("record")] = 1
    # after so many rounds, and the last, copies that went through the next round's local training
    # are tested beside the models; 0: never
    trained_every: Annotated[int, Field(ge=0), _role("record")] = 0
    # each client's own test rows, the whole test set, or the server's own models alone
    on: Literal["client", "test", "global"] = "client"
    train: bool = False  # also on each client's training rows
    # what is trained on the features of frozen bodies and scored on all test rows
    probe: Literal["none", "sgd", "logistic", "knn"] = "none"
    # further kinds of probes, each with columns of its own
    probes_beside: tuple[Literal["sgd", "logistic", "knn"], ...] = ()
    # whose models are kept: the last round's, or those of the best one on validation data
    keep: Literal["last", "best_validation"] = "last"
    # rounds without a better score on validation data after which the run stops; 0: it never does
    patience: Annotated[int, Field(ge=0)] = 0
    sets: dict[str, TestSet] = {}  # further test sets of the server's own models, by name
    # features of this many test rows of each client are saved at the end, for pictures
    save_features: Annotated[int, Field(ge=0), _role("record")] = 0
    # and after these rounds, each in a file of its own
    save_features_at: Annotated[tuple[Positive, ...], _role("record")] = ()

    @model_validator(mode="after")
    def _of_some_rows(self) -> EvaluateSection:
        if self.probes_beside and (self.probe == "none" or self.probe in self.probes_beside):
            raise ValueError(
                f"probes_beside = {list(self.probes_beside)} stand beside another kind, "
                f"evaluate.probe, which is {self.probe!r}"
            )
        if self.save_features_at and not self.save_features:
            raise ValueError(
                "save_features_at needs evaluate.save_features: of how many rows of each client"
            )
        return self


class EngineSection(_Section):
    """How the work is done.

    Only ``plans`` and ``server_threads`` can change results, in their last bits: a run keeps them.
    """

    name: EngineName = "local"
    device: Device = "cpu"
    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_WORKERS)] = "auto"
    cohort_size: Literal["auto"] | Positive = "auto"
    # bytes for stacks of clients; half of the machine's if not given
    memory_limit: Annotated[int, Field(ge=1)] | None = None
    checkpoint_every: Positive = 10
    plans: dict[str, Plan] = {}  # chosen before round 1, by architecture
    # with which the server learns and scores its models; one for each core, chosen before round 1
    server_threads: Literal["auto"] | Positive = "auto"


class PaperSection(_Section):
    """What the paper printed for this experiment; it is shown beside our numbers."""

    source: str = ""
    target_accuracy: Annotated[float, Field(gt=0, le=100)] | None = None  # percent
    # by method: percent, and its standard error if it is printed
    accuracy: dict[str, tuple[float, float] | tuple[float]] = {}
    communication: dict[str, float] = {}  # by method: bits both ways until the target accuracy
    departs: tuple[str, ...] = ()  # settings that differ from the paper's, filled in by reading


class TuneSection(_Section):
    """What a search over this recipe may spend beside its trials; nothing else reads it."""

    epsilon: Amount | None = None  # under privacy, on the choice of the best trial


class Recipe(_Section):
    """The complete description of a run."""

    seed: Annotated[int, _role("seed")] = 0
    data: Data = Data()
    partition: Partitioning = Partitioning()
    clients: ClientsSection = ClientsSection()
    model: ModelSection | None = ModelSection()  # None where clients.architectures say it
    method: MethodSection = MethodSection()
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection = TrainSection()
    privacy: PrivacySection = PrivacySection()
    evaluate: EvaluateSection = EvaluateSection()
    engine: Annotated[EngineSection, _role("work")] = EngineSection()
    paper: Annotated[PaperSection, _role("printed")] = PaperSection()
    tune: Annotated[TuneSection, _role("work")] = TuneSection()

    _dropped: tuple[str, ...] = PrivateAttr(default=())

    @property
    def dropped(self) -> tuple[str, ...]:
        """A line for each key of the file that a setting left without a reader."""
        return self._dropped

    def noting(self, dropped: Iterable[str]) -> Recipe:
        """Return the same recipe, which says what was dropped from it."""
        recipe = self.model_copy()
        recipe._dropped = tuple(dropped)  # noqa: SLF001  # its own copy
        return recipe

    def settings(self) -> dict[str, Any]:
        """Return all settings that decide a run's record: none of role ``work`` or ``printed``."""
        aside = {name for name in type(self).model_fields if role_of(name) in {"work", "printed"}}
        return self.model_dump(mode="json", exclude=aside)

    @property
    def left_open(self) -> tuple[str, ...]:
        """Keys that are not stated and that the data may decide: how many clients there are."""
        stated = "num_clients" in self.clients.model_fields_set
        return () if stated else ("clients.num_clients",)

    def to_toml(self) -> str:
        """Return the recipe as TOML, defaults included, but for what is left open."""
        aside = {"clients": {"num_clients"}} if self.left_open else {}
        return tomli_w.dumps(_plain(self.model_dump(exclude=aside)))


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


def check_named(table: str, name: str, argument: str) -> None:
    """Raise RecipeError if a part of a recipe was given as an object, which is not at hand."""
    if name == GIVEN:
        raise RecipeError(
            f"{table}.name = {GIVEN!r}: it was given in Python, as {argument}; only Python with "
            "the same object can go on with this run or use its models"
        )
