"""Numbered corrections of methods, and the runs whose numbers each correction changes.

A run's result holds the number of the newest correction that its method had (``computes``). A run
that lacks a correction which concerns it is stale: reports label it "before correction N" and never
mix it with newer runs, and ``fedgist reproduce`` repeats it. A resumed run keeps its original
computation if a hyper-parameter selects it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedgist.methods import base_name
from fedgist.models import MODELS
from fedgist.recipe.reading import Recipe, flat

RecipeTable = Mapping[str, Any]  # a run's resolved recipe, as TOML has it, or a part of it
FIRST = 1  # of runs whose result says nothing


@dataclass(frozen=True)
class Correction:
    """A correction: its number, the methods that it changes, and which of their runs.

    ``before`` holds the hyper-parameters with which a method computes as before the correction.
    """

    number: int
    methods: frozenset[str] | None  # None: all
    what: str
    concerns: Callable[[RecipeTable], bool]
    before: RecipeTable = field(default_factory=dict)


def computes(method: str) -> int:
    """Return the number of the newest correction of a method; 1 if there is none."""
    name = base_name(method)
    return max((c.number for c in CORRECTIONS if _is_of(c, name)), default=FIRST)


def computed_by(result: RecipeTable) -> int:
    """Return the number of the last correction that a run has, by its result."""
    number = result.get("computes", FIRST)
    return number if isinstance(number, int) and not isinstance(number, bool) else FIRST


def lacking(recipe: RecipeTable, computed: int) -> list[Correction]:
    """Return the corrections that a run lacks and that change its numbers.

    ``computed`` is the value of :func:`computed_by` for the run's result. A run whose recipe states
    the hyper-parameters of a correction does not lack the correction.
    """
    options = recipe.get("method", {})
    return [
        correction
        for correction in _later(str(options.get("name", "")), computed)
        if correction.concerns(recipe) and _unstated(correction, options) == correction.before
    ]


def as_begun(recipe: Recipe, computed: int) -> Recipe:
    """Return the recipe of a resumed run, with which its method computes as it was begun."""
    options = recipe.method.options
    for correction in _later(recipe.method.name, computed):
        for key, value in _unstated(correction, options).items():
            options = _with(options, key.split("."), value)
    return recipe.changed({f"method.{key}": value for key, value in options.items()})


def assumed(method: str, computed: int) -> dict[str, object]:
    """Return the values that a run uses for hyper-parameters not in its recipe, by recipe key."""
    before = (correction.before for correction in _later(method, computed))
    return {f"method.{key}": value for some in before for key, value in some.items()}


def _later(method: str, computed: int) -> Iterator[Correction]:
    name = base_name(method)
    return (c for c in CORRECTIONS if c.number > computed and _is_of(c, name))


def _is_of(correction: Correction, method: str) -> bool:
    return correction.methods is None or method in correction.methods


def _unstated(correction: Correction, options: RecipeTable) -> dict[str, object]:
    """Return the entries of ``correction.before`` that the recipe's options do not state."""
    stated = [f"{key}." for key in flat(options)]  # a table of pools states its key as well
    return {
        key: value
        for key, value in correction.before.items()
        if not any(name.startswith(f"{key}.") for name in stated)
    }


def _with(options: RecipeTable, path: Sequence[str], value: object) -> dict[str, object]:
    """Return options with a value at ``path``, which may lead through nested tables."""
    first, *rest = path
    return {**options, first: _with(options.get(first, {}), rest, value) if rest else value}


def _drops_before_the_head(recipe: RecipeTable) -> bool:
    return any(_dropout(name, options) > 0 for name, options in _models(recipe))


def _models(recipe: RecipeTable) -> Iterator[tuple[str, RecipeTable]]:
    tables = recipe.get("clients", {}).get("architectures", {})
    for table in tables.values():
        yield table.get("model", ""), table
    if not tables:
        model = recipe.get("model", {})
        yield model.get("name", ""), model


def _dropout(model: str, options: RecipeTable) -> float:
    if model not in MODELS:  # a user's own: it may have any layers
        return 1.0
    parameters = inspect.signature(MODELS[model]).parameters
    default = parameters["dropout"].default if "dropout" in parameters else 0.0
    return float(options.get("dropout", default))


def _clients_may_be_absent(recipe: RecipeTable) -> bool:
    train, clients = recipe.get("train", {}), recipe.get("clients", {})
    shares = train.get("fraction_train", 1.0), clients.get("availability", 1.0)
    return any(share != 1.0 for share in shares) or clients.get("delay", 0.0) != 0.0


def _picks_private_rows(recipe: RecipeTable) -> bool:
    private = recipe.get("privacy", {}).get("unit") == "record"
    return private and recipe.get("method", {}).get("pick_rate") is not None


CORRECTIONS = (
    Correction(
        2,
        frozenset({"fedproto", "fedlog_c", "feddbe", "repshare"}),
        "dropout before the head acts on logits alone, no longer on features in the loss",
        _drops_before_the_head,
    ),
    Correction(
        3,
        frozenset({"fedlog", "fedlog_c"}),
        "the server remembers the class sums of clients that are absent from a round",
        _clients_may_be_absent,
        {"memory": 0.0},
    ),
    Correction(
        4,
        frozenset({"periodic_codist", "merged_codist"}),
        "the rate of the distillation no longer falls to 0 where the recipe does not say so",
        lambda _: True,
        {"distillation.final_factor": 0.0},
    ),
    Correction(
        5,
        frozenset({"flesd"}),
        "each public row is its own anchor in the distillation, as in the paper",
        lambda _: True,
        {"distillation.own_anchor": False},
    ),
    Correction(
        6,
        None,
        "probes see standardized features",
        lambda recipe: recipe.get("evaluate", {}).get("probe") in {"sgd", "knn"},
    ),
    Correction(
        7,
        frozenset({"fedper", "fedrep"}),
        "one layer stays with the client where the recipe does not say how many",
        lambda _: True,
        {"local_layers": 2},
    ),
    Correction(
        8,
        frozenset({"repshare"}),
        "under privacy of records rows are picked by their content, so that one moves no other",
        _picks_private_rows,
    ),
)
