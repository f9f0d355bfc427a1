"""Validate the arguments of ``fedgist.run``, with one-line errors."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from fedgist.core.method import Method
from fedgist.core.objectives.metrics import ALL_ROWS, HELD_OUT
from fedgist.core.objectives.own_metric import OwnMetric, own_metric
from fedgist.core.objectives.target import Target
from fedgist.data.content_draws import split_by_content
from fedgist.data.dataset import Dataset
from fedgist.data.division import Division
from fedgist.data.held_out_rows import Values
from fedgist.data.partition import owner_of_rows
from fedgist.data.sources.hub_columns import HubOptions
from fedgist.data.sources.python_objects import array
from fedgist.data.sources.user_rows import user_rows
from fedgist.errors import MethodError, RecipeError, ReportError
from fedgist.recipe.method_loading import checked_class, identity
from fedgist.recipe.overrides import ClientGroup, RowsOfClients
from fedgist.recipe.reading import Recipe
from fedgist.recipe.schema import MethodSection
from fedgist.recipe.section import GIVEN
from fedgist.report.tracking.own_logger import OwnLogger
from fedgist.report.tracking.tracker import Tracker
from fedgist.report.tracking.tracker_names import tracker
from fedgist.world.client_lists import check_indexes, rows_of_each
from fedgist.world.models import module_group

T = TypeVar("T")


def clients_of(clients: object, argument: str) -> RowsOfClients | None:
    """Return the values given for each client: a list in order, or a mapping by name.

    Raises
    ------
    RecipeError
        If ``clients`` is neither a mapping nor an iterable, or is empty. The message starts with
        ``argument``.
    """
    if clients is None:
        return None
    single = isinstance(clients, str | bytes) or getattr(clients, "ndim", 1) == 0
    if single or not isinstance(clients, Iterable):
        raise RecipeError(
            f"{argument} is a {type(clients).__name__}; it must be a list with each client's rows"
            ", or a mapping of names to rows"
        )
    if isinstance(clients, Mapping):
        rows_of_clients: RowsOfClients = {str(name): rows for name, rows in clients.items()}
    else:
        rows_of_clients = list(clients)
    if not rows_of_clients:
        raise RecipeError(f"{argument} is empty; it must list each client's rows")
    if isinstance(clients, Mapping) and len(rows_of_clients) < len(clients):
        raise RecipeError(f"{argument} names one client twice")
    return rows_of_clients


def _owners(rows: RowsOfClients | None, count: int) -> Values | None:
    """Return the client of each of ``count`` rows by the users' lists; -1 for rows of no client."""
    if rows is None:
        return None
    return owner_of_rows(rows_of_each(rows, count, "clients").values(), count).numpy()


def of_given_data(recipe: T) -> T | dict[str, object]:
    """Return a mapping as a recipe of data that are given in Python; anything else unchanged."""
    if not isinstance(recipe, Mapping) or not isinstance(recipe.get("data", {}), Mapping):
        return recipe
    return {**recipe, "data": {"name": GIVEN, **recipe.get("data", {})}}


def rows_given(
    data: object, clients: object, clients_test: object, recipe: Recipe, target: Target
) -> tuple[Dataset | None, RowsOfClients | None, RowsOfClients | None]:
    """Return the data, and the training rows and test rows of each client.

    ``target`` is the form of the labels. If the recipe's ``data.test_fraction`` holds out test rows
    of ``(x, y)``, a client's rows among them are its test rows.
    """
    rows, tests = clients_of(clients, "clients"), clients_of(clients_test, "clients_test")
    if data is None:
        return None, rows, tests
    if isinstance(data, tuple):
        check_indexes(rows, data[0], "clients")
        check_indexes(tests, data[-2:][0], "clients_test")
    options = HubOptions(**recipe.data.options) if recipe.data.name == GIVEN else HubOptions()
    stated = replace(recipe.data.test_rows, fraction=options.test_fraction)
    division = stated if stated.is_stated else None
    private = recipe.privacy.unit == "record"
    first = Division(0.0) if private and division else division
    owners = functools.partial(_owners, rows)
    data_set, held = user_rows(data, first, recipe.data.read, target, options, owners)
    if private and division is not None:
        count = len(data_set.y)
        own = {} if rows is None else rows_of_each(rows, count, "clients")
        owner = data_set.clients if rows is None else owner_of_rows(own.values(), count)
        data_set, drawn = split_by_content(data_set, division, recipe.seed, owner)
        held = None if held is None else drawn.numpy()
    if options.client is None and data_set.clients is not None and isinstance(data, list | Mapping):
        return data_set, *_rows_of_lists(data_set, rows, tests)
    if held is None or rows is None:
        return data_set, rows, tests
    if tests is not None:
        raise RecipeError(
            "clients_test= chooses the test rows, and so does the recipe, by data.test_fraction, "
            "data.folds or data.repeats: give one of them"
        )
    number = np.where(held, np.cumsum(held), np.cumsum(~held)) - 1  # among test or training rows
    lists = {who: part.numpy() for who, part in rows_of_each(rows, len(held), "clients").items()}
    pairs = [(number[part[~held[part]]], number[part[held[part]]]) for part in lists.values()]
    if isinstance(rows, Mapping):
        train = {name: pair[0] for name, pair in zip(rows, pairs, strict=True)}
        return data_set, train, {name: pair[1] for name, pair in zip(rows, pairs, strict=True)}
    return data_set, [train for train, _ in pairs], [test for _, test in pairs]


def _rows_of_lists(
    data: Dataset, rows: RowsOfClients | None, tests: RowsOfClients | None
) -> tuple[RowsOfClients, RowsOfClients | None]:
    """Return each client's rows of data that were given as a data set for each client."""
    if rows is not None or tests is not None:
        raise RecipeError(
            "data has a data set for each client: leave out clients= and clients_test="
        )
    assert data.clients is not None
    count = int(data.clients.max()) + 1
    names = data.client_names

    def own(clients: Tensor | None) -> RowsOfClients:
        owner = np.zeros(0) if clients is None else clients.numpy()
        lists = [np.flatnonzero(owner == client) for client in range(count)]
        return dict(zip(names, lists, strict=True)) if names else lists

    return own(data.clients), own(data.clients_test)


def with_method(recipe: Recipe, method: Method) -> Recipe:
    """Return the recipe with the name and the fields of a method object.

    Raises
    ------
    MethodError
        If ``method`` is not a method object.
    RecipeError
        If the recipe also sets hyper-parameters of the method.
    """
    if isinstance(method, str):
        raise MethodError(
            f"method is the text {method!r}: give an object, or name it in the recipe's [method]"
        )
    if isinstance(method, type):
        raise MethodError(
            f"method is the class {method.__name__}: give an object, {method.__name__}()"
        )
    checked_class(type(method), type(method).__name__)
    if recipe.method.options:
        key = next(iter(recipe.method.options))
        raise RecipeError(
            f"method.{key} is in the recipe, but a method object is given as well: set {key} on "
            "the object, and remove it from the recipe"
        )
    name, options = identity(method)
    return recipe.changed({"method": MethodSection(name=name, **options)})


def groups_of(
    model: object, clients: RowsOfClients | None, *, own_start: bool
) -> dict[str, ClientGroup] | None:
    """Return the groups of clients with one model each, from a module, a factory or a mapping.

    A group lists its clients by number, or by name if ``clients`` is a mapping.

    Raises
    ------
    RecipeError
        If ``model`` is none of these, or a group lists an unknown client.
    """
    if model is None:
        return None
    if not isinstance(model, Mapping):
        return {"model": module_group(_module(model, "model"), own_start=own_start)}
    if not model:
        raise RecipeError(
            "model is an empty mapping; it must hold a name, a module and its clients"
        )
    names = tuple(clients) if isinstance(clients, Mapping) else ()
    return {
        str(name): _group(f"model[{name!r}]", value, names, own_start=own_start)
        for name, value in model.items()
    }


def _group(argument: str, value: object, names: Sequence[str], *, own_start: bool) -> ClientGroup:
    if not isinstance(value, tuple | list) or len(value) != 2:  # noqa: PLR2004
        raise RecipeError(
            f"{argument} is a {type(value).__name__}; it must be (module or factory, [clients])"
        )
    members = array(value[1], f"{argument}: its clients")
    listed = [names.index(name) if name in names else name for name in members.tolist()]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in listed):
        or_names = f" or names: {', '.join(names)}" if names else ""
        raise RecipeError(
            f"{argument}: its clients are {value[1]!r:.80}; a list of their numbers{or_names} is "
            "needed"
        )
    return module_group(_module(value[0], argument), own_start=own_start, clients=listed)


def _module(model: Any, argument: str) -> Any:
    """Return ``model`` if it is a module or a factory; raise RecipeError otherwise."""
    if isinstance(model, str):
        raise RecipeError(
            f"{argument} is the text {model!r:.80}: give a module, or name it in the recipe's "
            "[model]"
        )
    if not callable(model):
        raise RecipeError(
            f"{argument} is a {type(model).__name__}; it must be a torch.nn.Module or a factory"
        )
    return model


def metrics_of(metrics: object) -> dict[str, OwnMetric | None]:
    """Return the metrics by the names that a recipe records; those of fedgist have no object.

    Raises
    ------
    RecipeError
        If ``metrics`` is not a list of names and functions.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, list | tuple) or not metrics:
        raise RecipeError(
            f"metrics is {metrics!r:.80}; it must be a list of names and of functions of "
            "(probabilities, labels)"
        )
    named: dict[str, OwnMetric | None] = {}
    for metric in metrics:
        own = None if isinstance(metric, str) else own_metric(metric)
        named[metric if own is None else own.place] = own
    return named


def named_sets(test_sets: object) -> dict[str, tuple[object, object]] | None:
    """Return the server's additional test sets by name.

    Raises
    ------
    RecipeError
        If ``test_sets`` is no mapping of names to pairs (x, y), or uses a reserved name.
    """
    if test_sets is None:
        return None
    if not isinstance(test_sets, Mapping):
        raise RecipeError(
            f"test_sets is a {type(test_sets).__name__}; it must be {{'name': (x, y)}}"
        )
    for name, pair in test_sets.items():
        if not isinstance(name, str) or name in {ALL_ROWS, HELD_OUT}:
            raise RecipeError(
                f"test_sets has the name {name!r:.80}; a text other than {ALL_ROWS!r} and "
                f"{HELD_OUT!r} is needed"
            )
        if not isinstance(pair, tuple | list) or len(pair) != 2:  # noqa: PLR2004
            raise RecipeError(f"test_sets[{name!r}] must be a pair (x, y)")
    return {name: (x, y) for name, (x, y) in test_sets.items()}


def trackers_of(track: object, folder: Path | None) -> dict[str, Tracker]:
    """Return the trackers of an argument by name; ``folder`` is the run directory, if any.

    Raises
    ------
    ReportError
        If a tracker is unknown, or it cannot be used for this run.
    """
    given = [] if track is None else track if isinstance(track, list | tuple) else [track]
    chosen: dict[str, Tracker] = {}
    for number, value in enumerate(given, 1):
        name = value if isinstance(value, str) else f"logger {number} ({type(value).__name__})"
        try:
            chosen[name] = tracker(value) if isinstance(value, str) else OwnLogger(_logger(value))
        except ReportError as error:
            raise ReportError(f"track: {error}") from error
        if folder is None and chosen[name].needs_folder:
            raise ReportError(
                f"track: {name} writes into the run directory: give out=..., or name another "
                f"folder, {name}:FOLDER"
            )
    return chosen


def _logger(value: Any) -> Any:
    """Return ``value`` if it has the functions of a logger; raise ReportError otherwise."""
    for name in ("start", "log"):
        if not callable(getattr(value, name, None)):
            raise ReportError(
                f"a {type(value).__name__} has no function {name!r}; give a name such as 'wandb', "
                "or an object with start and log"
            )
    return value


def path_of(path: object, argument: str) -> Path | None:
    """Return the path in an argument, or None.

    Raises
    ------
    RecipeError
        If ``path`` is neither a path nor a text that names one.
    """
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or str(path) == "" or "\0" in str(path):
        raise RecipeError(f"{argument} is {path!r:.80}; it must be the path of a folder")
    return Path(path)


def check_flags(**flags: object) -> None:
    """Raise RecipeError if an argument is not True or False, or more than one is True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise RecipeError(f"{name} is {value!r:.80}; it must be True or False")
    if all(flags.values()):
        raise RecipeError(f"{' and '.join(flags)} are both True: choose one")
