"""The sections of a recipe, their keys and their bounds.

Most keys define the experiment. Every other key has a *role*: ``seed``, ``work`` (how the work is
done), ``record`` (what is recorded) or ``printed`` (the paper's own numbers). Code that compares
runs, resumes them or searches over them calls :func:`role_of`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tomli_w
from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, model_validator

from fedgist.core.bounds import BelowOne, NonNegativeInt, Positive, PositiveInt, Share
from fedgist.core.nets.compiled.kernel_library import KernelChoice
from fedgist.core.objectives.metrics import (
    CHOSEN_METRICS,
    COMMON_METRICS,
    DEFAULT_METRICS,
    METRICS_OF,
    OBJECTIVES,
    name_in_columns,
)
from fedgist.core.training import Training
from fedgist.data import PARTITIONS
from fedgist.engines import EngineName
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError, listed, shown
from fedgist.methods import DEFAULT_METHOD, METHODS, base_name
from fedgist.models import MODELS
from fedgist.options import CLOSED, with_fields
from fedgist.recipe.data_section import Data
from fedgist.recipe.federation_section import FactsSection, FederationSection
from fedgist.recipe.graph_section import GraphSection
from fedgist.recipe.privacy_section import Amount, PrivacySection
from fedgist.recipe.section import GIVEN, Device, OpenSection, registered_name

# the objectives that take metrics of a user's own
TAKE_FUNCTIONS = ("classes", "text_classes", "regression", "multilabel")
MOST_READERS = 64  # of each worker
MOST_WORKERS = 1024  # each is a process that holds torch
Role = Literal["seed", "work", "record", "printed"]


def _role(role: Role) -> Any:
    """Return a field that has this role in an experiment."""
    return Field(json_schema_extra={"role": role})


class _Section(BaseModel):
    model_config = CLOSED


class Partitioning(OpenSection):
    """How the rows are divided among the clients."""

    name: Annotated[str, registered_name(PARTITIONS, "partition")] = "dirichlet"
    """How rows are divided among clients. The options of the rule are written beside it."""


class ClientsSection(_Section):
    """The clients: their number, models, random start, and when they are online."""

    num_clients: PositiveInt = 10
    """Number of clients. With a natural partition, the data determine it."""
    architectures: dict[str, dict[str, Any] | float] = {}
    """Several model architectures: ``{mlp = 0.5, lenet5 = 0.5}``, or one table per architecture.

    A table has ``model``, the options of that model, and either ``share`` (the fraction of clients
    with this model, drawn from the seed) or ``clients`` (the numbers or names of these clients). A
    model with ``share = 0`` belongs to the server only. If no architectures are given, all clients
    have ``[model]``.
    """
    pools: dict[str, dict[str, object]] = {}
    """Groups of clients with one model per group. A client may be in several groups."""
    init: Literal["shared", "own"] = "shared"
    """``shared``: all clients of an architecture start from the same weights. ``own``: from
    different random weights.
    """
    availability: Share | str = 1.0
    """Probability that a client is online in a round, or a CSV file of ``round,client`` lines.

    If the file has no line for round 0 (the exchange before training), the clients of round 1 are
    online in round 0.
    """
    held_out: BelowOne | tuple[NonNegativeInt | str, ...] = 0.0
    """Clients that never train: a share of all, drawn from the seed, or their numbers or names.

    They are scored as newcomers: with what the method gives a client that was never there.
    """
    delay: Share = 0.0
    """Probability that a reply arrives one round late.

    Only some methods accept late replies. All others drop them.
    """
    graph: GraphSection = GraphSection()
    """Whose messages each client receives: the server's relay, or a graph of peers."""
    max_norm: Positive | None = None
    """Maximum norm (L2) of a message to the server, with the client's noise.

    Larger messages are rejected.
    """
    max_rows: PositiveInt | None = None
    """Maximum number of rows a client may report. Messages that report more are rejected.

    The default is 2,147,483,648.
    """
    settings: dict[str, dict[str, object]] = {}
    """Settings of single clients, where the method allows them. One table per group of clients."""


class AdaptersSection(_Section):
    """Low-rank adapters (LoRA) in the linear layers of a frozen body."""

    rank: PositiveInt = 8
    """Rank of the adapters. A higher rank learns more, and sends more bytes."""
    alpha: Positive = 16.0
    """Factor of the adapters: their output is multiplied by alpha / rank."""
    layers: Literal["linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "linear"
    """Layers with adapters: all linear layers of the body, or patterns of names (``"encoder.*"``).
    """


class ModelSection(OpenSection):
    """The clients' model."""

    name: Annotated[str, registered_name(MODELS, "model", "factory")] = "mlp"
    """The clients' model: a name, or your own ``package.module:factory``.

    ``transformers:FOLDER`` is a pretrained encoder of images or texts, in a folder or by its name
    on the Hugging Face hub. The options of the model are written beside it.
    """
    head: str | None = None
    """Name of the linear layer that is the head. The default is the last linear layer."""
    project: PositiveInt | None = None
    """Width of the features. Models of another width learn a projection to it, and a new head.

    In ``[model]`` it applies to all models of ``clients.architectures`` and ``clients.pools``.
    """
    weights: str | None = None
    """A file with pretrained weights (``.safetensors``, ``.pt`` or ``.pth``) to start from."""
    init: Literal["default", "truncated_normal"] = "default"
    """Random start of linear and convolutional layers: torch's own, or a truncated normal.

    The truncated normal has standard deviation 1 / sqrt(inputs), is cut at two standard deviations,
    and sets biases to 0, as in Haiku.
    """
    frozen: bool = False
    """Whether the body is frozen, so that only the head learns and is sent.

    ``adapters`` imply it. Use it with ``weights``.
    """
    adapters: AdaptersSection | None = None
    """Low-rank adapters in the frozen body. Only they and the head learn and are sent."""

    @model_validator(mode="after")
    def _starts_once(self) -> ModelSection:
        if self.weights is not None and self.init != "default":
            raise ValueError(f"weights are the start: init = {self.init!r} would not be used")
        return self

    @model_validator(mode="after")
    def _freezes_for_adapters(self) -> ModelSection:
        if self.adapters is None or self.frozen:
            return self
        if "frozen" in self.model_fields_set:
            raise ValueError("adapters need a frozen body: leave out frozen = false")
        object.__setattr__(self, "frozen", True)  # a copy would not be returned
        return self


VARIANT = re.compile(r"[^@]*(@[\w.+-]+)?", re.ASCII)  # it is a part of folders' names, too


def _well_named(name: str) -> str:
    if not VARIANT.fullmatch(name):
        raise ValueError(
            f"{shown(name)}: a variant is METHOD@NAME, a name of letters, digits and _.+-"
        )
    return name


class MethodSection(OpenSection):
    """The federated method and its hyper-parameters."""

    name: Annotated[
        str, registered_name(METHODS, "method", "Class", base_name), AfterValidator(_well_named)
    ] = DEFAULT_METHOD
    """The method: a name, a variant ``NAME@VARIANT``, or your own ``package.module:Class``.

    The options of the method are written beside it.
    """


class ObjectiveSection(OpenSection):
    """The loss of the models, and the metrics by which they are evaluated.

    The options of the objective are written beside its name.
    """

    name: Annotated[str, registered_name(OBJECTIVES, "objective", "Class")] = "classes"
    """What models learn: a class per row or text, numbers, several labels, pixels, or words.

    SimCLR learns without labels. Your own objective is ``package.module:Class``. Data sources read
    the labels that the objective needs.
    """
    metrics: tuple[Annotated[str, registered_name(CHOSEN_METRICS, "metric", "function")], ...] = (
        tuple(COMMON_METRICS)
    )
    """Metrics of the models, by name, or your own ``package.module:function``.

    The first one selects the best round and the best trial. The log loss is always measured. The
    default depends on the objective.
    """

    @model_validator(mode="after")
    def _has_metrics(self) -> ObjectiveSection:
        if "metrics" not in self.model_fields_set:  # all of its own; a copy would not be returned
            object.__setattr__(self, "metrics", DEFAULT_METRICS.get(self.name, ()))
        if ":" in self.name:
            if "metrics" in self.model_fields_set and self.metrics:
                raise ValueError(f"{self.name} has its own metrics: leave out metrics")
            return self
        if not self.metrics:
            raise ValueError("metrics must have at least 1 item")
        own, names = METRICS_OF[self.name], [name_in_columns(name) for name in self.metrics]
        allowed = self.name in TAKE_FUNCTIONS
        strange = [m for m in self.metrics if m not in own and not (allowed and ":" in m)]
        if strange:
            raise ValueError(f"{self.name} has no metric {strange[0]!r}; it has {listed(own)}")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"metrics: two are called {twice[0]!r}")
        return self


class TestSet(_Section):
    """A part of the test set: rows of some classes, or of clients whose names match a pattern."""

    classes: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Numbers of the classes whose test rows form this set."""
    clients: str | None = None
    """A pattern of client names, such as ``"*/question"``, whose test rows form this set."""

    @model_validator(mode="after")
    def _is_one(self) -> TestSet:
        if (self.classes is None) == (self.clients is None):
            raise ValueError("a test set is of classes or of clients: give one")
        return self


class EvaluateSection(_Section):
    """What is evaluated, when, and which models are kept."""

    every: Annotated[PositiveInt, _role("record")] = 1
    """Number of rounds between evaluations. The last round is always evaluated.

    Raise it if evaluation takes longer than training.
    """
    trained_every: Annotated[int, Field(ge=0), _role("record")] = 0
    """Every N rounds and after the last, also test copies fine-tuned by one more local training.

    Some papers report this score. Its column is ``eval/client/trained_accuracy_mean``. 0 disables
    it. A round without an evaluation is left out. The copies' optimizers begin anew.
    """
    on: Literal["client", "test", "global"] = "client"
    """What models are tested on.

    ``client``: each client's own test rows. ``test``: the whole test set. ``global``: the server's
    models only.
    """
    train: bool = False
    """Whether models are also evaluated on each client's training rows."""
    probe: Literal["none", "sgd", "logistic", "knn"] = "none"
    """A classifier trained on the features of each frozen body and scored on all test rows.

    ``sgd`` is a linear layer, ``logistic`` logistic regression, ``knn`` the nearest neighbors.
    Features are standardized by the training rows. With ``simclr`` the default is ``logistic``.
    """
    probes_beside: tuple[Literal["sgd", "logistic", "knn"], ...] = ()
    """Further probes with their own columns: ``["sgd"]`` adds ``eval/client/probe_sgd_mean``."""
    keep: Literal["last", "best_validation"] = "last"
    """Which models the run keeps: those of the last round, or of the best round by validation."""
    patience: NonNegativeInt = 0
    """Stop after this many rounds without a better validation score. 0 disables early stopping."""
    sets: dict[str, TestSet] = {}
    """Further test sets of the server's models, by name: ``eval/global/MODEL/NAME/...``."""
    save_predictions: Annotated[Literal["auto"] | bool, _role("record")] = "auto"
    """Whether each client's predictions of its own test and validation rows are saved at the end.

    Tables over rows need them: differences between methods by row, intervals of AUROC, thresholds
    and calibration. ``auto``: of classes, with natural clients, and without privacy.
    """
    specificity: Annotated[float, Field(ge=0.0, le=1.0), _role("record")] = 0.95
    """The least specificity of a threshold for two classes, on a client's validation rows.

    Tables show the sensitivity and specificity that this threshold has on its test rows.
    """
    save_features: Annotated[int, Field(ge=0), _role("record")] = 0
    """Number of test rows per client whose features are saved at the end, for pictures."""
    save_features_at: Annotated[tuple[PositiveInt, ...], _role("record")] = ()
    """Rounds after which features are also saved, in ``features-ROUND.safetensors``."""

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

    On one kind of processor, only the execution plans, ``shards`` and ``server_threads`` can change
    results, and only in the last bits. A run keeps these for its whole life.
    """

    name: EngineName = "local"
    """``local`` trains stacks of clients on all cores, ``ray`` on the machines of a Ray cluster.

    ``loopback`` gives each client its own site, and packs every message into bytes, as over a
    network. [More on clusters](cluster.md).
    """
    address: str | None = None
    """Address of a Ray cluster, ``"auto"`` on one of its machines. The default is ``RAY_ADDRESS``.

    Without both, a cluster is started on this machine and ends with the run.
    """
    device: Device = "cpu"
    """The device to train on: ``auto`` (the GPU, if there is one), ``cpu``, ``cuda``, ``cuda:1``.
    """
    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_WORKERS)] = "auto"
    """Number of worker processes. ``auto`` is one per core.

    Never more than one per client or four per core are started.
    """
    readers: Literal["auto"] | Annotated[int, Field(ge=0, le=MOST_READERS)] = "auto"
    """Number of processes that read rows for each worker, if rows are read lazily.

    ``auto`` gives each core a reader, and no readers if each core has a worker. With 0 the workers
    read. The number does not change results.
    """
    cohort_size: Literal["auto"] | PositiveInt = "auto"
    """Number of clients trained together as one stack. ``auto`` is measured before round 1.

    Another value changes the last bits of results.
    """
    memory_limit: Annotated[int, Field(ge=1)] | None = None
    """Memory for stacks of clients, in bytes. The default is half of the machine's memory.

    If the state of all clients takes more than half of it, a file of the user's cache keeps it.
    """
    keep_features: bool = True
    """Whether rows are encoded once, if the body is frozen and no row changes.

    With ``false`` the same rows are encoded again whenever a client is asked: the same results.
    """
    feature_memory: Annotated[int, Field(ge=0)] | None = None
    """Memory for features of frozen bodies, in bytes. The default is a quarter of what is free.

    Features that take more are in a file of the user's cache, which later runs of the same rows
    and encoder read.
    """
    checkpoint_every: PositiveInt = 10
    """Number of rounds between checkpoints."""
    kernels: KernelChoice = "auto"
    """``auto`` compiles faster convolutions once on a machine; ``torch`` keeps to torch's own.

    They are used where they are faster, and need a C compiler ([more](install.md)).
    """
    plans: dict[str, Plan] = {}
    """The execution plan of each architecture. It is measured and written into ``recipe.toml``."""
    server_threads: Literal["auto"] | PositiveInt = "auto"
    """Number of threads with which the server trains and tests its own models.

    ``auto`` is one per core, or 1 in a sweep. Another value changes the last bits of results.
    """
    shards: Literal["auto"] | PositiveInt = "auto"
    """Number of parts into which the clients are divided. Stacks and sums do not cross them.

    With ``ray`` each has its own process. ``auto`` is one per core or GPU of the cluster, or 1 with
    another engine. Another value changes the last bits of results.
    """
    code_folder: str | None = None
    """Folder in which ``package.module:thing`` is looked for first. The default is the recipe's.

    A relative path starts at the recipe's folder.
    """


class PaperSection(_Section):
    """The paper's own numbers for this experiment, shown beside the results."""

    source: str = ""
    """The paper and table that the numbers come from. This section does not change a run."""
    target_accuracy: Annotated[float, Field(gt=0, le=100)] | None = None
    """Target accuracy in percent. The paper counts communication until it is reached."""
    accuracy: dict[str, tuple[float, float] | tuple[float]] = {}
    """The paper's accuracy per method, in percent, and its standard error if printed."""
    communication: dict[str, float] = {}
    """The paper's bits per method until the target accuracy, both directions together."""
    departs: tuple[str, ...] = ()
    """Settings that differ from the paper's. Filled in when the recipe is read."""


class TuneSection(_Section):
    """Settings of a search over this recipe. Only ``fedgist tune`` reads them."""

    epsilon: Amount | None = None
    """Privacy budget that ``fedgist tune`` may spend on choosing the best trial.

    It is spent in addition to the budgets of the trials. Needed to search a private recipe.
    """


class Recipe(_Section):
    """The complete description of a run."""

    seed: Annotated[int, _role("seed")] = 0
    """Seed of all randomness of the run. Use several seeds to measure the spread of results."""
    data: Data = Data()
    partition: Partitioning = Partitioning()
    clients: ClientsSection = ClientsSection()
    model: ModelSection | None = ModelSection()  # None where clients.architectures say it
    method: MethodSection = MethodSection()
    objective: ObjectiveSection = ObjectiveSection()
    train: Training = Training()
    privacy: PrivacySection = PrivacySection()
    evaluate: EvaluateSection = EvaluateSection()
    engine: Annotated[EngineSection, _role("work")] = EngineSection()
    facts: Annotated[FactsSection | None, _role("work")] = None
    federation: Annotated[FederationSection | None, _role("work")] = None
    paper: Annotated[PaperSection, _role("printed")] = PaperSection()
    tune: Annotated[TuneSection, _role("work")] = TuneSection()

    _dropped: tuple[str, ...] = PrivateAttr(default=())
    _file: Path | None = PrivateAttr(default=None)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Notes on keys that were dropped because a setting made them unused, one line per key."""
        return self._dropped

    def changed(self, values: Mapping[str, object]) -> Recipe:
        """Return a copy of the recipe with new values for some keys.

        A key is ``"seed"``, a dotted key such as ``"train.lr"``, or a section. This is the only way
        to change a recipe. The new values are checked.
        """
        whole: dict[str, object] = {key: value for key, value in values.items() if "." not in key}
        parts: dict[str, dict[str, object]] = {}
        for key, value in values.items():
            table, dot, name = key.partition(".")
            if dot:
                parts.setdefault(table, {})[name] = value
        for table, part in parts.items():
            section = whole.get(table, getattr(self, table))
            assert isinstance(section, BaseModel)  # only sections have keys with a dot
            whole[table] = with_fields(section, part, table)
        return self.model_copy(update=whole)

    @property
    def file(self) -> Path | None:
        """The file that the recipe was read from, for error messages. None without a file."""
        return self._file

    def noting(self, dropped: Iterable[str], file: Path | None = None) -> Recipe:
        """Return a copy of the recipe with notes on dropped keys, and the file it was read from."""
        recipe = self.model_copy()
        recipe._dropped, recipe._file = tuple(dropped), file or self._file  # noqa: SLF001
        return recipe

    def settings(self) -> dict[str, Any]:
        """Return all settings that affect the record: none of role ``work`` or ``printed``."""
        aside = {name for name in type(self).model_fields if role_of(name) in {"work", "printed"}}
        return self.model_dump(mode="json", exclude=aside)

    @property
    def left_open(self) -> tuple[str, ...]:
        """Keys without a stated value that the data may determine: the number of clients."""
        stated = "num_clients" in self.clients.model_fields_set
        return () if stated else ("clients.num_clients",)

    def to_toml(self) -> str:
        """Return the recipe as TOML with all defaults, except keys in :attr:`left_open`."""
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
    """Raise RecipeError if the recipe needs a user's object that was not passed this time."""
    if name == GIVEN:
        raise RecipeError(
            f"{table}.name = {GIVEN!r}: it was given in Python, as {argument}; only Python with "
            "the same object can go on with this run or use its models"
        )
