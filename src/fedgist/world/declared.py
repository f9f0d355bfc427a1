"""The facts about data that a federation's recipe declares, and their comparison with real data."""

from __future__ import annotations

from collections.abc import Iterator

from fedgist.core.far_numbers import far_moments
from fedgist.data.dataset import Dataset
from fedgist.data.facts import PRECISE, DataFacts
from fedgist.data.normalization import spread_over_columns
from fedgist.data.table_columns import Column
from fedgist.data.usual_values import with_stated_ranges
from fedgist.errors import DataError, RecipeError, shown
from fedgist.recipe.data_section import Data
from fedgist.recipe.federation_section import NUMBER, FactsSection
from fedgist.recipe.resolve import Setup

NAME = "the sites' data"  # needs a verb in the singular


def declared_facts(setup: Setup) -> DataFacts:
    """Return the facts that a recipe declares in ``[facts]`` and ``[data]``.

    Raises
    ------
    RecipeError
        If a fact is missing: one line that names the key to state.
    """
    section, data = setup.recipe.facts, setup.recipe.data
    if section is None:
        raise RecipeError(
            "a federation's server has no rows: state the form of the sites' rows in [facts] "
            "(fedgist site --check prints it for a site's data)"
        )
    if not data.classes:
        raise RecipeError(
            "data.classes is missing: a federation's server has no rows to see the classes in"
        )
    columns = columns_of(section)
    _check_ranges(data, columns)
    shape = (sum(len(column.inputs) for column in columns),) if columns else section.input_shape
    if section.encoder is not None and data.normalize != "none":
        raise RecipeError(
            f"data.normalize = {data.normalize!r}: the sites' encoder (facts.encoder) has its own "
            "normalization: use 'none'"
        )
    mean, std = _moments(data, shape, columns)
    return DataFacts(
        NAME,
        shape,
        len(data.classes),
        PRECISE if section.element == "float32" and far_moments(mean, std) else section.element,
        setup.labels,
        scale=section.scale,
        mean=mean,
        std=std,
        classes=data.classes,
        columns=columns,
        annotations=dict(section.annotations),
    )


def _check_ranges(data: Data, columns: tuple[Column, ...]) -> None:
    """Raise RecipeError if a usual range is stated for something else than a numeric column."""
    if columns and data.ranges:
        try:
            with_stated_ranges(columns, data.ranges, NAME)
        except DataError as error:
            raise RecipeError(str(error)) from error


def columns_of(section: FactsSection) -> tuple[Column, ...]:
    """Return the columns that a recipe declares; their categories are closed."""
    return tuple(
        Column(name) if kind == NUMBER else Column(name, tuple(kind), closed=True)
        for name, kind in section.columns.items()
    )


def _moments(
    data: Data, shape: tuple[int, ...], columns: tuple[Column, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the stated mean and std, one for each channel or column, or one for all."""
    if not data.mean or not data.std:
        if data.normalize == "pooled":
            raise RecipeError(
                "data.mean and data.std are missing: a federation's rows are never together. "
                "fedgist facts measures both; or state them, or use data.normalize = 'client' or "
                "'none'"
            )
        return (0.0,), (1.0,)
    used = tuple(c.categories is None for c in columns for _ in c.inputs) or (True,) * shape[0]
    try:
        return (
            spread_over_columns("mean", data.mean, used, NAME),
            spread_over_columns("std", data.std, used, NAME),
        )
    except DataError as error:
        raise RecipeError(str(error)) from error


def check_facts(declared: DataFacts, data: Dataset) -> None:
    """Raise DataError, with both values, if data do not have the declared form."""
    if problem := next(differences(declared, data.facts), None):
        raise DataError(f"{data.name} does not fit the recipe: {problem}")


def differences(declared: DataFacts, own: DataFacts) -> Iterator[str]:
    """Yield what differs between the declared facts and those of a site's data."""
    pairs = {
        "input_shape": (list(declared.input_shape), list(own.input_shape)),
        "element": (_stored(declared.element), _stored(own.element)),
        "scale": (declared.scale, own.scale),
        "target": (declared.target, own.target),
        "classes": (list(declared.names), list(own.names)),
        "columns": (_plain(declared.columns), _plain(own.columns)),
        "annotations": (sorted(declared.annotations), sorted(own.annotations)),
    }
    for fact, (stated, actual) in pairs.items():
        if stated != actual:
            yield f"{fact} is {shown(actual)} here, and {shown(stated)} in the recipe"
    for name, (low, high) in own.annotations.items():
        least, most = declared.annotations.get(name, (low, high))
        if low < least or high > most:
            yield (
                f"its annotation {name!r} is in [{low:g}, {high:g}], and the recipe states "
                f"[{least:g}, {most:g}]"
            )


def _stored(element: str) -> str:
    """Return the type of numbers as a recipe states it: who keeps 64 bits shows it nobody."""
    return "float32" if element == PRECISE else element


def as_section(facts: DataFacts) -> dict[str, object]:
    """Return facts as the section ``[facts]`` of a recipe, in TOML's types."""
    table: dict[str, object] = {"element": _stored(facts.element), "scale": facts.scale}
    if facts.columns:
        table["columns"] = _plain(facts.columns)
    else:
        table["input_shape"] = list(facts.input_shape)
    if facts.annotations:
        table["annotations"] = {name: list(ends) for name, ends in facts.annotations.items()}
    return table


def _plain(columns: tuple[Column, ...]) -> dict[str, object]:
    return {c.name: NUMBER if c.categories is None else list(c.categories) for c in columns}
