"""The question of an exchange of facts: which columns, classes and figures sites are asked for."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from fedgist.core.bounds import Positive, PositiveInt
from fedgist.errors import (
    InputError,
    MessageError,
    RecipeError,
    did_you_mean,
    first_line,
    shown,
)
from fedgist.options import CLOSED, checked
from fedgist.recipe.federation_section import NUMBER, Seconds
from fedgist.recipe.privacy_section import Delta

Kind = Literal["counts", "moments", "histograms", "categories"]
KINDS = (NUMBER, "categories")
FOUND = "categories"  # a column whose categories the sites name
CLASSES, COLUMNS = "classes", "columns."  # keys of what sites name
MOST_NUMBERS, MOST_CORRELATED = 10_000, 500
MOST_NAMES = 10_000  # of one column, or of classes
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Name = Annotated[str, Field(max_length=200)]
Names = Annotated[tuple[Name, ...], Field(max_length=MOST_NAMES)]


class NumberQuestion(BaseModel):
    """What is asked about a column of numbers, or about the channels of images."""

    model_config = CLOSED

    centre: float | None = None
    """A number near the mean. Sums are of ``(value - centre) / unit``.

    Without it, or without a unit, a first exchange finds both.
    """
    unit: Positive | None = None
    """A number near the standard deviation."""
    edges: tuple[float, ...] = ()
    """Edges of a histogram, in ascending order, from which quantiles are read.

    What lies below the first edge or above the last one is counted as well.
    """

    @model_validator(mode="after")
    def _ordered(self) -> NumberQuestion:
        if any(low >= high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError("edges must ascend")
        return self


class Question(BaseModel):
    """A file of ``fedgist facts --ask``: what all sites are asked for, before training."""

    model_config = CLOSED

    target: Literal["class", "numbers", "labels"] = "class"
    """What the labels of a row are: its class, numbers to predict, or any of several labels."""
    classes: Names = ()
    """Names of the classes, of the labels, or of the numbers to predict.

    If none are stated, the sites name their classes.
    """
    columns: dict[Name, Literal["number", "categories"] | NumberQuestion | Names] = {}
    """The columns of a table, in order: ``"number"``, the list of the categories, or
    ``"categories"`` if sites are to name them. ``{ edges = [20, 40, 60] }`` is a number as well.
    """
    input_shape: tuple[PositiveInt, ...] = ()
    """Shape of one example, if rows are no table: ``[12]`` or ``[3, 32, 32]``."""
    element: Literal["float32", "uint8"] = "float32"
    """Type of the numbers of an example: ``uint8`` for images of whole numbers."""
    scale: Positive | None = None
    """Number by which inputs are divided first. The default is 255 for ``uint8``, else 1."""
    inputs: NumberQuestion = NumberQuestion()
    """What is asked about each channel of ``input_shape``."""
    predicted: NumberQuestion = NumberQuestion()
    """What is asked about each number to predict."""
    correlations: bool = False
    """Whether correlations of all pairs of numbers are asked for."""
    quantiles: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = QUANTILES
    """The quantiles that are read from histograms."""
    sums: Literal["plain", "secure"] = "plain"
    """``secure``: the server gets totals over sites alone."""
    epsilon: Positive | None = None
    """Privacy budget of each exchange, if each site adds noise to its sums."""
    delta: Delta = 1e-6
    """Delta of each exchange, if there is a budget."""
    clip: Positive = 4.0
    """Under a budget, a number further than this many units from the centre is moved there."""
    least_sites: PositiveInt | None = None
    """Number of sites that must answer. The default is all sites of the federation."""
    deadline_s: Seconds = 600.0
    """Seconds after which a site without an answer is left out."""

    @model_validator(mode="after")
    def _has_a_form(self) -> Question:
        if bool(self.input_shape) == bool(self.columns):
            raise ValueError("give columns, or input_shape for rows that are no table")
        for name, kind in self.columns.items():
            if isinstance(kind, tuple) and (not kind or len({*kind}) < len(kind)):
                raise ValueError(f"columns.{name}: give the list of its different categories")
        if len({*self.classes}) < len(self.classes):
            raise ValueError("classes names one twice")
        if self.target == "numbers" and not self.classes:
            raise ValueError("classes: name the numbers to predict")
        count, most = len(self.asked), MOST_CORRELATED if self.correlations else MOST_NUMBERS
        if count > most:
            raise ValueError(f"{count} numbers are asked about; {most} are the most")
        hidden = self.sums == "secure" or self.epsilon is not None
        if hidden and (unnamed := self.unnamed):
            key = "sums = 'secure'" if self.sums == "secure" else f"epsilon = {self.epsilon:g}"
            raise ValueError(f"{key}: sites tell no names, so list them: {unnamed[0]} = [...]")
        return self

    @property
    def divisor(self) -> float:
        """The number by which inputs are divided first."""
        return self.scale or (255.0 if self.element == "uint8" else 1.0)

    @property
    def asked(self) -> tuple[tuple[str, NumberQuestion], ...]:
        """All numbers that are asked about, by name: inputs, and then those to predict."""
        if self.input_shape:
            inputs = [(str(i), self.inputs) for i in range(self.input_shape[0])]
        else:
            inputs = [
                (name, kind if isinstance(kind, NumberQuestion) else NumberQuestion())
                for name, kind in self.columns.items()
                if kind == NUMBER or isinstance(kind, NumberQuestion)
            ]
        further = self.classes if self.target == "numbers" else ()
        return (*inputs, *((name, self.predicted) for name in further))

    @property
    def unnamed(self) -> tuple[str, ...]:
        """What sites are to name: columns of categories, and the classes."""
        columns = [f"{COLUMNS}{name}" for name, kind in self.columns.items() if kind == FOUND]
        return (*columns, *(() if self.classes else (CLASSES,)))

    @property
    def searched(self) -> tuple[str, ...]:
        """The numbers whose centre or unit a first exchange has to find."""
        return tuple(n for n, about in self.asked if about.centre is None or about.unit is None)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of facts that it asks for, which a site's policy must allow."""
        listed = any(kind == FOUND or isinstance(kind, tuple) for kind in self.columns.values())
        needed: dict[Kind, bool] = {
            "counts": True,
            "moments": bool(self.asked),
            "histograms": any(about.edges for _, about in self.asked),
            "categories": listed or bool(self.unnamed),
        }
        return tuple(kind for kind, asked in needed.items() if asked)


class Filling(BaseModel):
    """What was not in the question: names that sites gave, and a centre and a unit each."""

    model_config = CLOSED

    names: dict[Name, Names] = {}
    scales: tuple[tuple[float, Positive], ...] = ()


@dataclass(frozen=True)
class Number:
    """A column of numbers, a channel or a predicted number, on its own scale."""

    name: str
    centre: float
    unit: float
    edges: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """A question and its filling: sites compute their sums by nothing else.

    Raises
    ------
    MessageError
        If the filling does not fit the question.
    """

    question: Question
    filling: Filling

    def __post_init__(self) -> None:
        asked, filling = self.question.asked, self.filling
        if set(filling.names) != set(self.question.unnamed) or not all(filling.names.values()):
            raise MessageError("the names are not those that the question asks sites for")
        if any(len({*names}) < len(names) for names in filling.names.values()):
            raise MessageError("a name is given twice")
        if filling.scales and len(filling.scales) != len(asked):
            raise MessageError(f"{len(filling.scales)} scales for {len(asked)} numbers")

    @cached_property
    def numbers(self) -> tuple[Number, ...]:
        """The numbers, each on its scale; what the question states comes first."""
        scales = self.filling.scales or ((0.0, 1.0),) * len(self.question.asked)
        return tuple(
            Number(
                name,
                centre if about.centre is None else about.centre,
                unit if about.unit is None else about.unit,
                about.edges,
            )
            for (name, about), (centre, unit) in zip(self.question.asked, scales, strict=True)
        )

    @property
    def clip(self) -> float:
        """The bound that numbers of terms were divided by, in units; 1 without a budget."""
        return 1.0 if self.question.epsilon is None else self.question.clip

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, the labels or the numbers to predict."""
        return self.question.classes or self.filling.names[CLASSES]

    @property
    def counted(self) -> tuple[str, ...]:
        """The classes or labels whose rows are counted."""
        return () if self.question.target == "numbers" else self.classes

    @cached_property
    def categories(self) -> Mapping[str, tuple[str, ...]]:
        """The categories by column."""
        found = self.filling.names
        return {
            name: kind if isinstance(kind, tuple) else found[f"{COLUMNS}{name}"]
            for name, kind in self.question.columns.items()
            if kind == FOUND or isinstance(kind, tuple)
        }

    @property
    def columns(self) -> dict[str, str | list[str]]:
        """The columns as ``facts.columns`` of a recipe has them."""
        listed = self.categories
        return {n: [*listed[n]] if n in listed else NUMBER for n in self.question.columns}


def read_question(path: Path) -> Question:
    """Read the file of a question.

    Raises
    ------
    InputError
        If it cannot be read: one line that names the file, the key, the value and the choices.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        _check_kinds(raw.get("columns"))
        question: Question = checked(Question, raw)
    except FileNotFoundError as error:
        raise InputError(f"there is no {path}: docs/federation.md has an example") from error
    except RecipeError as error:
        raise InputError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: {first_line(error)}") from error
    return question


def _check_kinds(columns: object) -> None:
    """Raise RecipeError for the first column that is none of the kinds that a column may be.

    pydantic would name all kinds.
    """
    for name, kind in columns.items() if isinstance(columns, dict) else ():
        if isinstance(kind, dict):
            known = NumberQuestion.model_fields
            if unknown := [key for key in kind if key not in known]:
                key = f"columns.{name}.{unknown[0]}"
                raise RecipeError(f"{key}: unknown key{did_you_mean(unknown[0], known)}")
            checked(NumberQuestion, kind, f"columns.{name}")
        elif not isinstance(kind, list) and kind not in KINDS:
            raise RecipeError(
                f"columns.{name} is {shown(kind)}; it must be 'number', 'categories', the list of "
                "its categories, or a table with centre, unit and edges (other settings stand "
                "above [columns])"
            )


def parsed(text: str) -> Question:
    """Return a question that another machine sent; raise MessageError if it is none."""
    try:
        return Question.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise MessageError(
            f"question: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
