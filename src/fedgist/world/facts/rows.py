"""Rows of a data set as numbers, classes and categories, for the sums of an exchange of facts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedgist.core.objectives.target import NUMERIC
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import held
from fedgist.errors import DataError, listed, shown
from fedgist.recipe.data_section import Data
from fedgist.recipe.federation_section import NUMBER
from fedgist.world.facts.question import Filling, Plan, Question
from fedgist.world.facts.sums import AT_ONCE, Piece

TABLE = "table"  # the data source whose columns a question names
REPLACED = ("columns", "ignore", "kinds")  # options of tables that a question replaces


def rows_of(plan: Plan, data: Dataset, rows: Tensor) -> Iterator[Piece]:
    """Yield the training rows of the numbers ``rows`` (rows,), a few at a time.

    Raises
    ------
    DataError
        If the data do not have the form that the question states.
    """
    check_form(plan, data)
    classes = _places(plan, data)
    for some in torch.split(rows, max(1, AT_ONCE // max(1, math.prod(data.input_shape)))):
        x = held(data.inputs[some], data.name).double()
        values, categories = _parts(plan, data, x)
        labels = _labels(data, data.y[some], classes)
        if plan.question.target == "numbers":
            predicted = labels.unsqueeze(2).expand(-1, -1, values.shape[2])
            values, labels = torch.cat([values, predicted], 1), labels[:, :0]
        yield Piece(values, labels, categories)


def as_asked(section: Data, question: Question, filling: Filling | None) -> Data:
    """Return a section ``[data]`` that reads a table's columns as a question has them.

    Without a filling, open categories are those of the table.
    """
    if section.name != TABLE or not question.columns:
        return section
    plan = None if filling is None else Plan(question, filling)
    columns = {
        name: kind if isinstance(kind, str) else [*kind] if isinstance(kind, tuple) else NUMBER
        for name, kind in question.columns.items()
    }
    options = {k: v for k, v in section.options.items() if k not in REPLACED}
    fields = {n: getattr(section, n) for n in section.model_fields_set & Data.model_fields.keys()}
    return Data.model_validate(
        {**fields, **options, "columns": columns if plan is None else plan.columns}
    )


def check_form(plan: Plan, data: Dataset) -> None:
    """Raise DataError, with both values, unless data have the form that the question states."""
    question = plan.question
    if data.target != question.target:
        raise DataError(f"{data.name}: target is {data.target!r}, and asked is {question.target!r}")
    if question.columns:
        own, asked = [column.name for column in data.columns], [*question.columns]
        if own != asked:
            raise DataError(
                f"{data.name} has the columns {listed(own)}, and asked is {listed(asked)}"
            )
        for column, kind in zip(data.columns, plan.columns.values(), strict=True):
            here = NUMBER if column.categories is None else [*column.categories]
            if here != kind:
                raise DataError(
                    f"{data.name}: the column {column.name!r} is {shown(here)}, and asked is "
                    f"{shown(kind)}"
                )
        return
    pairs = {
        "input_shape": (data.input_shape, question.input_shape),
        "element": ("uint8" if data.x.dtype == torch.uint8 else "float32", question.element),
    }
    for key, (own_value, asked_value) in pairs.items():
        if own_value != asked_value:
            raise DataError(f"{data.name}: {key} is {own_value}, and asked is {asked_value}")


def _parts(plan: Plan, data: Dataset, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers (rows, numbers, pixels), and 0 or 1 for each category (rows, categories)."""
    divisor = plan.question.divisor
    if not data.columns:
        return x.reshape(*x.shape[:2], -1) / divisor, x.new_zeros(len(x), 0)
    is_number = torch.tensor([c.categories is None for c in data.columns for _ in c.inputs])
    return x[:, is_number].unsqueeze(2) / divisor, x[:, ~is_number]


def _places(plan: Plan, data: Dataset) -> Tensor:
    """Return the place of each asked class among the data's own; -1 for one that they lack."""
    names = [*data.names]
    return torch.tensor([names.index(n) if n in names else -1 for n in plan.classes])


def _labels(data: Dataset, y: Tensor, places: Tensor) -> Tensor:
    """Return 0 or 1 for each class or label, or the numbers to predict: (rows, classes)."""
    if data.target in NUMERIC:
        found = y.double()[:, places.clamp(min=0)]
        lacking = torch.nan if data.target == "numbers" else 0.0
        found = torch.where(places >= 0, found, lacking)
        return found if data.target == "numbers" else found.nan_to_num(0.0)
    return (y.unsqueeze(1) == places).double() * (y >= 0).unsqueeze(1)
