"""Recipes: what a run is, typed.

A recipe is TOML. Everything is checked when it is read: an unknown key, an impossible value or an
unknown name is a :class:`RecipeError` of one line that names the key, the value and the choices.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from fedgist.core.method import Method
from fedgist.core.optim import OptimizerName
from fedgist.data.augment import Augmentation
from fedgist.data.partition import PARTITIONS
from fedgist.engines.stacking_plan import Plan
from fedgist.errors import RecipeError, did_you_mean, one_of
from fedgist.methods import METHODS

# settings that leave an experiment what it is, by the beginnings of their keys
SAME_EXPERIMENT = (
    "seed",
    "method.name",
    "engine.",
    "evaluate.every",
    "evaluate.save_features",
    "paper.",
)
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Open(BaseModel):
    """A section whose further keys belong to what it names.

    A source's options, a model's, a method's.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


class Data(_Open):
    """Which examples."""

    name: str = "digits"
    train_rows: Positive | None = None  # only the first so many training rows
    validation: Annotated[float, Field(ge=0, lt=1)] = (
        0.0  # share of each client's training rows held out
    )
    augment: tuple[Augmentation, ...] = ()


class Partitioning(_Section):
    """Who has what. Keys of other partitions than the one named are inert."""

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
        taken = {"dirichlet": ("alpha", "min_size"), "size": ("alpha",)}
        taken |= dict.fromkeys(("shards", "pathological"), ("classes_per_client",))
        return {key: getattr(self, key) for key in taken.get(self.name, ())}


class ClientsSection(_Section):
    """The clients: how many, with which models, from which start, and when they are there."""

    num_clients: Positive = 10
    architectures: dict[
        str, dict[str, Any] | float
    ] = {}  # share of the clients by model; empty: all have [model]
    init: Literal["shared", "own"] = "shared"
    availability: Share | str = (
        1.0  # chance to be online in a round, or a file of "round,client" lines
    )


class ModelSection(_Open):
    """The clients' model."""

    name: str = "mlp"
    head: str | None = None  # name of the linear layer that is the head; the last one if not given


class MethodSection(_Open):
    """Which method, and its hyper-parameters."""

    name: str = "fedlog"


class TrainSection(_Section):
    """Training, for every method alike."""

    num_rounds: Positive = 20
    fraction_train: Annotated[float, Field(gt=0, le=1)] = 1.0
    local_epochs: Positive = 1
    batch_size: Positive = 10
    lr: Annotated[float, Field(gt=0)] = 1e-3
    optimizer: OptimizerName = "adam"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class PrivacySection(_Section):
    """What the server may see."""

    min_replies: Positive = 1  # totals over fewer clients are refused


class EvaluateSection(_Section):
    """What is measured, and when; the last round always is."""

    every: Positive = 1
    on: Literal["client", "test"] = "client"  # each client's own test rows, or the whole test set
    train: bool = False  # also on each client's training rows
    save_features: Annotated[int, Field(ge=0)] = (
        0  # at the end, of so many test rows of each client, for pictures
    )


class EngineSection(_Section):
    """How the work is done. Only the plan can move results, in their last bits."""

    name: Literal["local"] = "local"
    device: str = "cpu"
    workers: Literal["auto"] | Positive = "auto"
    cohort_size: Literal["auto"] | Positive = "auto"
    memory_limit: Positive | None = (
        None  # bytes for stacks of clients; half of the machine's if not given
    )
    checkpoint_every: Positive = 10
    plans: dict[str, Plan] = {}  # chosen before round 1, by architecture


class PaperSection(_Section):
    """What the paper printed for this experiment.

    It stands beside our numbers and changes nothing.
    """

    source: str = ""
    target_accuracy: Annotated[float, Field(gt=0, le=100)] | None = None  # percent
    accuracy: dict[str, tuple[float, float]] = {}  # by method: percent, and its standard error
    communication: dict[str, float] = {}  # by method: bits both ways until the target accuracy
    departs: tuple[str, ...] = ()  # settings changed since, filled in when the recipe is read


class Recipe(_Section):
    """A run, completely."""

    seed: int = 0
    data: Data = Data()
    partition: Partitioning = Partitioning()
    clients: ClientsSection = ClientsSection()
    model: ModelSection = ModelSection()
    method: MethodSection = MethodSection()
    train: TrainSection = TrainSection()
    privacy: PrivacySection = PrivacySection()
    evaluate: EvaluateSection = EvaluateSection()
    engine: EngineSection = EngineSection()
    paper: PaperSection = PaperSection()

    def to_toml(self) -> str:
        """Write the recipe, every value given."""
        return tomli_w.dumps(_plain(self.model_dump()))


def read(path: Path | None, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply ``section.key=value`` settings.

    Without a file, the defaults (digits).
    """
    if path is None:
        return make({}, settings)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"no recipe {path}; `fedgist list recipes` names those that come with fedgist"
        raise RecipeError(msg) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        msg = f"{path}: {error}"
        raise RecipeError(msg) from error
    try:
        return make(raw, settings)
    except RecipeError as error:
        msg = f"{path}: {error}"
        raise RecipeError(msg) from error


def make(raw: Mapping[str, Any], settings: Sequence[str] = ()) -> Recipe:
    """Make a recipe from nested dictionaries and ``section.key=value`` settings."""
    changes = dict(_setting(text) for text in settings)
    merged = {key: value for key, value in raw.items() if key != "methods"}
    tables = _table(raw, "methods")
    _check_tables(tables)
    given = _table(raw, "method")
    name = changes.get("method.name", given.get("name", MethodSection().name))
    table = dict(tables.get(name, {})) if isinstance(name, str) else {}
    train = table.pop("train", {})
    mine = given if given.get("name", name) == name else {}
    merged["method"] = {**table, **mine, "name": name}
    merged["train"] = {**_table(raw, "train"), **train}
    for key, value in changes.items():
        _put(merged, key, value)
    if "paper" in merged:
        old = _table(merged, "paper").get("departs", [])
        departs = [
            f"{key} = {value}"
            for key, value in changes.items()
            if not key.startswith(SAME_EXPERIMENT)
        ]
        _put(merged, "paper.departs", [*old, *departs])
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        raise RecipeError(_first(error, Recipe)) from error
    build_method(recipe.method.name, recipe.method.options)
    return recipe


def build_method(name: str, options: Mapping[str, Any], table: str = "method") -> Method:
    """Return the method with its hyper-parameters checked."""
    try:
        cls = METHODS[one_of(name, METHODS, "method")]
    except ValueError as error:
        msg = f"method.name: {error}"
        raise RecipeError(msg) from error
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]  # every method is a dataclass
    for key in options:
        if key not in known:
            msg = f"{table}.{key}: unknown key of {name}{did_you_mean(key, known)}"
            raise RecipeError(msg)
    try:
        return TypeAdapter(cls).validate_python(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([table, *(str(part) for part in first["loc"])])
        text = first["msg"].removeprefix("Value error, ")
        raise RecipeError(
            text if text.startswith("method.") else f"{where} = {first['input']!r}: {text}"
        ) from error


def _table(raw: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, Mapping):
        msg = f"{prefix}{key} = {value!r}: expected a table"
        raise RecipeError(msg)
    return value


def _check_tables(tables: Mapping[str, Any]) -> None:
    for name in tables:
        table = _table(tables, name, "methods.")
        build_method(name, {k: v for k, v in table.items() if k != "train"}, f"methods.{name}")
        try:
            TrainSection.model_validate(table.get("train", {}))
        except ValidationError as error:
            msg = f"methods.{name}.train.{_first(error, TrainSection)}"
            raise RecipeError(msg) from error


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        msg = f"--set {text}: expected section.key=value"
        raise RecipeError(msg)
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # a bare word is a string


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        inner = raw.get(part, {})
        if not isinstance(inner, Mapping):
            msg = f"--set {key}: {part} is not a section"
            raise RecipeError(msg)
        raw[part] = dict(inner)
        raw = raw[part]
    raw[last] = value


def _first(error: ValidationError, model: type[BaseModel]) -> str:
    """Say the first problem in one line: where, what was given, what would do."""
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"]]
    where = ".".join(
        part for part in loc if part not in {"float", "str", "constrained-int", "dict[str,any]"}
    )
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key{did_you_mean(loc[-1], _keys(model, loc[:-1]))}"
    return f"{where} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"


def _keys(model: type[BaseModel], loc: Sequence[str]) -> list[str]:
    for part in loc:
        inner = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def _plain(value: Any) -> Any:
    """Turn a recipe's values into TOML's: no None, dataclasses as tables."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
