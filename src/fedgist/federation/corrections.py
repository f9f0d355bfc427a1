"""Corrections of methods after which some runs give other numbers, and which runs they concern.

A run's result says up to which correction its method was computed (``computes``). A run that lacks
a correction which concerns it is stale: reports call it "before correction N", never mix it with
newer runs, and ``fedgist reproduce`` does it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedgist.methods import base_name
from fedgist.models import MODELS

Recipe = Mapping[str, Any]  # a run's resolved recipe, as TOML has it
FIRST = 1  # of runs whose result says nothing


@dataclass(frozen=True)
class Correction:
    """A correction: its number, the methods that it changes, and which of their runs."""

    number: int
    methods: frozenset[str]
    what: str
    concerns: Callable[[Recipe], bool]


def computes(method: str) -> int:
    """Return the number of the newest correction of a method; 1 if there is none."""
    name = base_name(method)
    return max((c.number for c in CORRECTIONS if name in c.methods), default=FIRST)


def lacking(recipe: Recipe, computed: int) -> list[Correction]:
    """Return the corrections that a run lacks and that change its numbers.

    ``computed`` is what its result says of ``computes``, or :data:`FIRST`.
    """
    method = base_name(str(recipe.get("method", {}).get("name", "")))
    later = (c for c in CORRECTIONS if c.number > computed and method in c.methods)
    return [correction for correction in later if correction.concerns(recipe)]


def _drops_before_the_head(recipe: Recipe) -> bool:
    return any(_dropout(name, options) > 0 for name, options in _models(recipe))


def _models(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    tables = recipe.get("clients", {}).get("architectures", {})
    for table in tables.values():
        yield table.get("model", ""), table
    if not tables:
        model = recipe.get("model", {})
        yield model.get("name", ""), model


def _dropout(model: str, options: Recipe) -> float:
    if model not in MODELS:  # a user's own: it may have any layers
        return 1.0
    parameters = inspect.signature(MODELS[model]).parameters
    default = parameters["dropout"].default if "dropout" in parameters else 0.0
    return float(options.get("dropout", default))


def _clients_may_be_absent(recipe: Recipe) -> bool:
    train, clients = recipe.get("train", {}), recipe.get("clients", {})
    shares = train.get("fraction_train", 1.0), clients.get("availability", 1.0)
    return any(share != 1.0 for share in shares) or clients.get("delay", 0.0) != 0.0


def _rate_falls_to_0(recipe: Recipe) -> bool:
    # a recipe that says so itself asked for it
    return "final_factor" not in recipe.get("method", {}).get("distillation", {})


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
    ),
    Correction(
        4,
        frozenset({"periodic_codist", "merged_codist"}),
        "the rate of the distillation no longer falls to 0 where the recipe does not say so",
        _rate_falls_to_0,
    ),
)
