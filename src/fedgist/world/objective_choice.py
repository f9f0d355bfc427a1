"""The objective of a recipe, and checks that recipe and method fit it.

Texts have a label for each token and no class. Encoders learn without labels and predict none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import fake_rows
from fedgist.core.method import Method
from fedgist.core.nets.net import Architecture
from fedgist.core.objectives.class_metrics import BINARY
from fedgist.core.objectives.metrics import OBJECTIVES
from fedgist.core.objectives.objective import Objective
from fedgist.core.objectives.own_metric import OwnMetric
from fedgist.core.objectives.own_objective import OwnObjective, metrics_of
from fedgist.core.objectives.own_objective_check import check_objective
from fedgist.core.objectives.target import IN_WORDS, LABELS_OF
from fedgist.data.client_rows import Rows
from fedgist.data.facts import DataFacts
from fedgist.errors import RecipeError, first_line, listed, shown
from fedgist.recipe.resolve import Setup
from fedgist.recipe.schema import Recipe
from fedgist.world.server_context import Online

TRIED_PER_CLASS = 4  # made-up rows of each class before round 1
BY_CLASS = ("dirichlet", "shards", "pathological", "pachinko")  # partitions
TEXT_CLASSES = "text_classes"  # the objective of texts with one class each
LEAST_ROWS = 2  # of a client that learns from views, or whose batch norm needs two values


def objective_of(setup: Setup, data: DataFacts) -> Objective:
    """Return the objective of a run."""
    objective = _own(setup, data) if setup.own_objective else _built_in(setup, data)
    for metric in setup.metrics:
        if isinstance(metric, OwnMetric):
            metric.check(*_made_up(objective, data))
    if data.target != "class":
        labels = IN_WORDS[data.target]
        _check(_of_classes(setup), f"needs one class for each row; {data.name} has {labels}")
    if data.text:
        _check(_of_texts(setup.recipe), f"needs numbers for each row; {data.name} has texts")
    if objective.views > 1:
        views = f"objective {objective.name} learns from views without labels"
        _check(_of_labels(setup.recipe), f"has no use: {views}, and is judged by evaluate.probe")
    return objective


def _built_in(setup: Setup, data: DataFacts) -> Objective:
    recipe = setup.recipe
    section = recipe.objective
    _check_labels(section.name, data)
    about = data.num_classes, setup.metrics, recipe.train.label_smoothing
    make = OBJECTIVES[section.name]
    try:
        return make(*about, **_facts_for(make, section.name, data), **_options(recipe, data))
    except ValueError as error:
        raise RecipeError(first_line(error)) from error


def _own(setup: Setup, data: DataFacts) -> Objective:
    """Return the user's own objective, after it was tried on made-up rows."""
    assert setup.own_objective is not None  # the caller's
    own = OwnObjective(
        setup.recipe.objective.name, setup.own_objective, metrics_of(setup.own_objective)
    )
    if own.labels != data.target:
        raise RecipeError(
            f"objective {own.name} needs {IN_WORDS[own.labels]}; {data.name} has "
            f"{IN_WORDS[data.target]}"
        )
    if setup.recipe.train.label_smoothing:
        raise RecipeError(f"train.label_smoothing is not read by objective {own.name}")
    check_objective(own.thing, data.num_classes)
    return own


def _options(recipe: Recipe, data: DataFacts) -> dict[str, object]:
    """Return the options of the objective, with a positive class by its number."""
    options = dict(recipe.objective.options)
    if "positive" in options:
        positive, metrics = options["positive"], recipe.objective.metrics
        if data.num_classes != BINARY and "average_precision" not in metrics:
            raise RecipeError(
                f"objective.positive = {shown(positive)}: with {data.num_classes} classes only the "
                "metric average_precision reads it"
            )
        options["positive"] = _class_number(positive, data)
    return options


def _class_number(positive: object, data: DataFacts) -> int:
    names = data.names
    if str(positive) in names:
        return names.index(str(positive))
    raise RecipeError(
        f"objective.positive = {shown(positive)}: {data.name} has no such class; it has "
        f"{listed(names)}"
    )


def _check_labels(name: str, data: DataFacts) -> None:
    """Raise RecipeError if the objective does not read the labels or the inputs of the data."""
    wanted = [other for other, labels in LABELS_OF.items() if labels == data.target]
    if data.target == "class":
        wanted = [TEXT_CLASSES] if data.text else [w for w in wanted if w != TEXT_CLASSES]
    if name in wanted:
        return
    rows = "texts with " * data.text + IN_WORDS[data.target]
    raise RecipeError(
        f"objective.name = {name!r}: {data.name} has {rows}; use {' or '.join(map(repr, wanted))}"
    )


def _facts_for(make: Callable[..., Objective], name: str, data: DataFacts) -> dict[str, object]:
    """Return the facts about the data that an objective has parameters for."""
    facts = {"name": name, "names": data.names, "label_moments": data.label_moments}
    return {key: facts[key] for key in facts.keys() & inspect.signature(make).parameters}


def _made_up(objective: Objective, data: DataFacts) -> tuple[Tensor, Tensor]:
    """Return predictions (rows, ...) and labels (rows, ...), to try a user's metric on."""
    key, rows = random.key(0, "own metric"), TRIED_PER_CLASS * data.num_classes
    target = objective.labels
    _, y = fake_rows(key, rows, data.input_shape, data.num_classes, target=target)
    return objective.answers(random.normal(key, (rows, objective.outputs))), y


def _of_classes(setup: Setup) -> dict[str, bool]:
    """Return the settings that need one class per row, and whether they are set."""
    recipe = setup.recipe
    sets = recipe.evaluate.sets.items()
    divides = recipe.facts is None and setup.given.clients is None  # else clients have their rows
    partition, others = recipe.partition.name, "unlike 'iid', 'size' and 'natural'"
    return {
        f"partition.name = {partition!r} ({others})": divides and partition in BY_CLASS,
        "train.class_weights = 'balanced'": recipe.train.class_weights == "balanced",
        "evaluate.save_features": bool(recipe.evaluate.save_features),
        f"evaluate.probe = {recipe.evaluate.probe!r}": recipe.evaluate.probe != "none",
    } | {f"evaluate.sets.{key}.classes": part.classes is not None for key, part in sets}


def _of_texts(recipe: Recipe) -> dict[str, bool]:
    """Return the settings that need numbers as inputs, and whether they are set."""
    return {
        "data.normalize = 'client'": recipe.data.normalize == "client",
        "data.mean and data.std": bool(recipe.data.mean or recipe.data.std),
    }


def _of_labels(recipe: Recipe) -> dict[str, bool]:
    """Return the settings that need labels or ignore views, and whether the recipe has them."""
    evaluate, train = recipe.evaluate, recipe.train
    return {
        "train.class_weights = 'balanced'": train.class_weights == "balanced",
        "train.label_smoothing": train.label_smoothing > 0,
        "train.batch_size = 1": train.batch_size == 1,
        "evaluate.train = true": evaluate.train,
        "evaluate.trained_every": evaluate.trained_every > 0,
        "evaluate.sets": bool(evaluate.sets),
        "data.validation": recipe.data.validation > 0,
        "data.held_out": recipe.data.held_out > 0,
        "privacy.unit = 'record'": recipe.privacy.unit == "record",
    }


def _check(settings: dict[str, bool], why: str) -> None:
    """Raise RecipeError if the recipe has a setting that ``why`` forbids."""
    if bad := [setting for setting, is_set in settings.items() if is_set]:
        raise RecipeError(f"{bad[0]} {why}")


def check_method_reads(method: Method, objective: Objective) -> None:
    """Raise RecipeError if the method is not defined for the task's target."""
    if objective.target in method.targets:
        return
    read = listed(IN_WORDS[target] for target in IN_WORDS if target in method.targets)
    raise RecipeError(
        f"{type(method).__name__} needs {read}; objective {objective.name} has "
        f"{IN_WORDS[objective.target]}"
    )


def clients_with_too_few_rows(
    train: Rows, method: Method, objective: Objective, nets: Sequence[Collection[Architecture]]
) -> frozenset[int]:
    """Return the clients with fewer rows than a step takes; ``nets`` are the models of each."""
    return frozenset(
        i
        for i, (count, own) in enumerate(zip(train.counts.tolist(), nets, strict=True))
        if count < least_rows(method, objective, own)
    )


def least_rows(method: Method, objective: Objective, nets: Collection[Architecture]) -> int:
    """Return the fewest rows that a client with these models can be trained on.

    A batch has at least two, if the objective or a model compares rows.
    """
    views = LEAST_ROWS if objective.views > 1 else 1
    return method.batches * max([views, *(net.least_rows for net in nets)])


def without_clients(online: Online, left_out: frozenset[int]) -> Online:
    """Return the clients online in a round without those that never take part."""
    if not left_out:
        return online
    return lambda number: [c for c in online(number) if c.id not in left_out]


def notes_on(left_out: frozenset[int]) -> list[str]:
    """Return a note on each client that never takes part, because it has too few rows."""
    few = "has too few rows for a local step: it is left out"
    return [f"client {client} {few}" for client in sorted(left_out)]
