"""``fedgist.run``: run a recipe, with a user's own objects in place of its named parts."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedgist.api.arguments import (
    check_flags,
    groups_of,
    metrics_of,
    named_sets,
    of_given_data,
    path_of,
    rows_given,
    trackers_of,
    with_method,
)
from fedgist.api.result import Result
from fedgist.api.watching import watching
from fedgist.core.method import Method
from fedgist.data.dataset import Dataset
from fedgist.data.sources.hub_splits import HubSplit
from fedgist.engines.device_choice import check_torch
from fedgist.errors import RecipeError
from fedgist.recipe.objective_loading import labels_read, own_objective
from fedgist.recipe.overrides import Overrides, apply_overrides
from fedgist.recipe.own_code import modules_from
from fedgist.recipe.reading import Recipe, make, read, read_recorded
from fedgist.report.tracking.own_logger import Logger
from fedgist.runs import runner
from fedgist.runs.files.record import RECIPE, Line
from fedgist.runs.round import Observer

_under_way = threading.RLock()  # a callback may start a run within a run


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Refuse a run beside that of another thread: torch's generator is one for all threads."""
    if not _under_way.acquire(blocking=False):
        raise RecipeError(
            "a run is under way in another thread, and torch's random generator is one for all "
            "threads: start runs one after the other, or each in a process of its own"
        )
    try:
        check_torch()
        yield
    finally:
        _under_way.release()


@_alone()
def run(
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    *,
    data: Dataset
    | Sequence[object]
    | torch.utils.data.Dataset[Any]
    | HubSplit
    | Mapping[str, object]
    | None = None,
    clients: Iterable[object] | Mapping[str, object] | None = None,
    clients_test: Iterable[object] | Mapping[str, object] | None = None,
    model: nn.Module
    | Callable[..., nn.Module]
    | Mapping[str, tuple[Any, Sequence[int | str]]]
    | None = None,
    method: Method | None = None,
    objective: object | None = None,
    metrics: Sequence[str | Callable[..., object]] | None = None,
    test_sets: Mapping[str, tuple[object, object]] | None = None,
    public: object | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    rounds: int | None = None,
    full_digest: bool = False,
    data_root: str | Path | None = None,
    progress: bool | None = None,
    callback: Callable[[Line], object] | None = None,
    observer: Observer | None = None,
    track: str | Logger | Sequence[str | Logger] | None = None,
) -> Result:
    """Run a federation and return its record and its trained models.

    Parameters
    ----------
    recipe
        A file, a mapping with the same keys, or None for the defaults (FedLog on digits).
    data
        Replaces the recipe's data: ``(x, y, x_test, y_test)`` or ``(x, y)``, a map-style torch data
        set of ``(x, y)`` pairs or two of them (train, test), a list of these with a client each,
        splits of a Hugging Face data set in these forms or in a mapping by name, or a
        :class:`~fedgist.data.dataset.Dataset`. ``x`` is an array (rows, ...), or a data frame,
        whose columns are encoded like those of a table. ``y`` (rows,) holds whole numbers from 0
        on, or names of classes. Map-style data sets that are too large for memory or have random
        transforms are read when they are used (the recipe's ``data.read``, and
        :func:`fedgist.lazy`).
        The recipe's ``data.test_fraction`` holds out test rows of ``(x, y)``.
    clients, clients_test
        Replace the recipe's partition: each client's training rows and test rows, as row numbers or
        as masks, in order or by the clients' names. Without ``clients_test`` every client is tested
        on the whole test set. Clients may share rows. Each client needs at least one training row,
        and no row twice.
    model
        Replaces the recipe's model: a module (with its initial weights), a factory, or groups of
        clients by number or name, ``{"small": (module, [0, 1]), "large": (factory, ["north"])}``.
    method
        A :class:`~fedgist.core.method.Method` object, registered or not. The record holds its class
        and its fields.
    objective
        Replaces the recipe's objective: an object with a loss, metrics and a number of outputs
        (:mod:`fedgist.core.objectives.own_objective`). The record holds its class and its fields.
    metrics
        Replaces the recipe's ``objective.metrics``: names of metrics, and functions of one client's
        probabilities (rows, classes) and labels (rows,) that return a number. The first one selects
        the best round. :func:`fedgist.metric` says that lower is better.
    test_sets
        Additional test sets for the server's models, ``{"rare": (x, y)}``.
    public
        Unlabelled rows that the server and all clients may see, in the form of ``x``. Distillation
        methods exchange predictions on these rows.
    out
        The run directory. Without it nothing is written.
    resume, overwrite
        Continue or replace a run that is already in ``out``. A resumed run keeps its recipe, data
        and models; without ``recipe`` the recipe is read from ``out``.
    rounds
        A larger number of rounds for a resumed run. It is refused if the longer run would have had
        different earlier rounds.
    full_digest
        Whether a resumed run compares every byte of rows that are read when they are used, and not
        the names, sizes and times of their files.
    data_root
        Folder of downloaded data sets.
    progress
        Whether to show rounds as they end: a table in a notebook, a bar in a terminal, lines in a
        pipe. The default is to show them only in a notebook.
    callback
        Called with each round's line after it was recorded. If it raises, the run is saved and
        stops with that exception; ``resume=True`` continues after that round.
    observer
        Replaces ``progress``: an :class:`~fedgist.runs.round.Observer`.
    track
        Sends each recorded round to ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, or to a
        :class:`~fedgist.report.tracking.own_logger.Logger`; a list names several. A tracker that
        fails does not stop the run: it is left out with a warning.

    Raises
    ------
    ValueError
        If the recipe or the data cannot be used. The message is one line that names the key, the
        value and the choices.
    Stopped
        After Ctrl-C, SIGTERM or SIGHUP, as soon as the round, or the server's current stage of it,
        is finished and saved.
    """
    check_flags(resume=resume, overwrite=overwrite)
    folder = path_of(out, "out")
    chosen = trackers_of(track, folder)
    recipe = recipe if data is None else of_given_data(recipe)
    full_recipe = _resumed(recipe, folder) if resume else _parse(recipe)
    full_recipe = full_recipe if method is None else with_method(full_recipe, method)
    with modules_from(full_recipe.engine.code_folder):
        own = own_objective(full_recipe.objective, objective)
    labels = labels_read(full_recipe.objective, own)
    data_set, rows, tests = rows_given(data, clients, clients_test, full_recipe, labels)
    given = Overrides(
        data=data_set,
        clients=rows,
        clients_test=tests,
        groups=groups_of(model, rows, own_start=_draws_starts(full_recipe)),
        method=method,
        objective=own,
        metrics=metrics_of(metrics),
        test_sets=named_sets(test_sets),
        public=public,
        root=path_of(data_root, "data_root"),
    )
    stated = {} if recipe is None else recipe if isinstance(recipe, Mapping) else None
    full_recipe = apply_overrides(full_recipe, given, stated)
    notes = _notes(full_recipe, given, folder)
    with watching(progress, callback, observer, notes, chosen, folder) as watcher:
        how = {"resume": resume, "overwrite": overwrite, "full_digest": full_digest}
        done = runner.run(full_recipe, given, watcher, folder=folder, rounds=rounds, **how)
    return Result(**vars(done))


def _parse(recipe: Recipe | Mapping[str, Any] | str | Path | None) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return make(recipe)
    if recipe is not None and not isinstance(recipe, str | os.PathLike):
        raise RecipeError(
            f"recipe is a {type(recipe).__name__}; it must be a mapping, a file or a Recipe"
        )
    return read(None if recipe is None else Path(recipe))


def _resumed(recipe: Recipe | Mapping[str, Any] | str | Path | None, folder: Path | None) -> Recipe:
    """Return the given recipe, or the recipe of the run in the folder if none is given."""
    if recipe is not None or folder is None or not (folder / RECIPE).exists():
        return _parse(recipe)
    return read_recorded(folder / RECIPE)


def _notes(recipe: Recipe, given: Overrides, folder: Path | None) -> list[str]:
    """Return the notes to show before round 1."""
    name = recipe.method.name
    if folder is None or given.method is None or not name.startswith("__main__:"):
        return []
    msg = f"method {name} is defined in this notebook or script: only Python with the object can "
    return [msg + f"resume {folder} or predict from it"]


def _draws_starts(recipe: Recipe) -> bool:
    """Return whether each client draws the weights of a module; a frozen body keeps its own."""
    is_frozen = recipe.model is not None and recipe.model.frozen
    return recipe.clients.init == "own" and not is_frozen
