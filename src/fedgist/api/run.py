"""``fedgist.run``: a recipe's names, or a user's own objects in their place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedgist.api.arguments import (
    check_flags,
    clients_of,
    groups_of,
    named_sets,
    path_of,
    with_method,
)
from fedgist.api.result import Result
from fedgist.api.watching import watching
from fedgist.core.method import Method
from fedgist.data.dataset import Dataset
from fedgist.data.sources.in_memory import in_memory
from fedgist.errors import RecipeError
from fedgist.recipe.reading import Recipe, make, read, read_recorded
from fedgist.runs import runner
from fedgist.runs.record import RECIPE, Line
from fedgist.runs.round import Observer
from fedgist.world.overrides import apply_overrides
from fedgist.world.world import Overrides


def run(
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    *,
    data: Dataset | tuple[object, ...] | torch.utils.data.Dataset[Any] | None = None,
    clients: Iterable[object] | Mapping[str, object] | None = None,
    clients_test: Iterable[object] | Mapping[str, object] | None = None,
    model: nn.Module
    | Callable[..., nn.Module]
    | Mapping[str, tuple[Any, Sequence[int | str]]]
    | None = None,
    method: Method | None = None,
    test_sets: Mapping[str, tuple[object, object]] | None = None,
    public: object | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    rounds: int | None = None,
    data_root: str | Path | None = None,
    progress: bool | None = None,
    callback: Callable[[Line], object] | None = None,
    observer: Observer | None = None,
) -> Result:
    """Run a federation.

    Parameters
    ----------
    recipe
        A file, a mapping with the same keys, or nothing (FedLog on digits).
    data
        Instead of the recipe's: ``(x, y, x_test, y_test)`` or ``(x, y)``, a map-style torch data
        set of ``(x, y)`` pairs, or a :class:`~fedgist.data.dataset.Dataset`. ``x`` is an array
        (rows, ...) or a data frame, encoded as a table's columns are. ``y``
        (rows,) holds whole numbers from 0 on, or names of classes.
    clients, clients_test
        Instead of the recipe's partition: each client's training rows, and test rows (the whole
        test set if not given), as row numbers or as masks, in order or by the clients' names.
        Clients may share rows; each has at least one training row, and none twice.
    model
        Instead of the recipe's: a module (its numbers are the start), a factory, or for groups of
        clients, by number or name, ``{"small": (module, [0, 1]), "large": (factory, ["north"])}``.
    method
        A :class:`~fedgist.core.method.Method` object, registered or not. It is recorded by its
        class and its fields.
    test_sets
        Further test sets of the server's own, ``{"rare": (x, y)}``: its models are scored on each.
    public
        Rows without labels that server and clients may all see, in the form of ``x``: for methods
        that learn from each other's predictions on them.
    out
        The run directory; without one, nothing is written.
    resume, overwrite
        What to do with a run that is already in ``out``. A run goes on with the recipe, the data
        and the models that it was begun with; without ``recipe``, with that of its folder.
    rounds
        The number of rounds to which a run that goes on is raised, if its rounds so far would have
        been the same in the longer run.
    data_root
        The folder of downloaded data sets.
    progress
        Whether rounds are shown as they are done: a table in a notebook, a bar in a terminal, lines
        in a pipe. By default in a notebook only.
    callback
        Called with the line of each round, after it was recorded. If it raises, the run is saved
        and stops with the same exception: with ``resume=True`` it goes on after that round.
    observer
        In place of ``progress``: an :class:`~fedgist.runs.round.Observer`.

    Raises
    ------
    ValueError
        If the recipe or the data cannot be used: one line that names the key, the value and the
        choices.
    Stopped
        After Ctrl-C or SIGTERM, when the round, or the stage of it that the server does alone, was
        finished and saved.
    """
    check_flags(resume=resume, overwrite=overwrite)
    folder = path_of(out, "out")
    asked = _resumed(recipe, folder) if resume else _parse(recipe)
    if method is not None:
        asked = with_method(asked, method)
    rows = clients_of(clients, "clients")
    given = Overrides(
        data=None if data is None else in_memory(data),
        clients=rows,
        clients_test=clients_of(clients_test, "clients_test"),
        groups=groups_of(model, rows, own_start=asked.clients.init == "own"),
        method=method,
        test_sets=named_sets(test_sets),
        public=public,
        root=path_of(data_root, "data_root"),
    )
    stated = {} if recipe is None else recipe if isinstance(recipe, Mapping) else None
    asked = apply_overrides(asked, given, stated)
    with watching(progress, callback, observer, _notes(asked, given, folder)) as watcher:
        done = runner.run(
            asked,
            given,
            watcher,
            folder=folder,
            resume=resume,
            overwrite=overwrite,
            rounds=rounds,
        )
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
    """Return the recipe asked for; without one, that of the run in a folder."""
    if recipe is not None or folder is None or not (folder / RECIPE).exists():
        return _parse(recipe)
    return read_recorded(folder / RECIPE)


def _notes(recipe: Recipe, given: Overrides, folder: Path | None) -> list[str]:
    """Return what a user should know before round 1."""
    name = recipe.method.name
    if folder is None or given.method is None or not name.startswith("__main__:"):
        return []
    msg = f"method {name} is defined in this notebook or script: only Python with the object can "
    return [msg + f"resume {folder} or predict from it"]
