"""``fedgist.run``, which the command line and notebooks call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedgist.core.method import Method
from fedgist.data.dataset import Dataset
from fedgist.data.sources.in_memory import in_memory
from fedgist.engines.device_choice import check_precision
from fedgist.errors import RecipeError
from fedgist.federation import checkpoint as checkpoints
from fedgist.federation import saved_features
from fedgist.federation.checkpoint import Checkpoint
from fedgist.federation.engine_choice import make_engine, open_world
from fedgist.federation.python_arguments import (
    check_flags,
    check_observer,
    clients_listed,
    groups_of,
    named_sets,
    path_of,
    with_method,
)
from fedgist.federation.recipe import Recipe, make, read, read_recorded
from fedgist.federation.record import PARTITION, RECIPE, Line, to_json
from fedgist.federation.round_loop import Federation, Observer
from fedgist.federation.run_directory import alone, enter
from fedgist.federation.server_run import Place, plan_notes, run_server
from fedgist.federation.server_side import ServerSide
from fedgist.federation.trained_models import ClientModel, client_model
from fedgist.federation.world import Given, World, class_counts


@dataclass(frozen=True)
class Result:
    """What a run returns: its record and its trained models.

    ``rounds`` holds a line per round, ``clients`` one per client and evaluation, ``summary`` how
    the run ended. ``folder`` is None if nothing was written.
    """

    rounds: list[Line]
    clients: list[Line]
    summary: dict[str, Any]
    folder: Path | None
    federation: Federation = field(repr=False)
    world: World = field(repr=False)

    @property
    def ledger(self) -> list[Line]:
        """The payload bytes of each round, up and down."""
        columns = ("round", "comm/up_bytes", "comm/down_bytes")
        return [{name: line.get(name, 0) for name in columns} for line in self.rounds]

    def model(self, client: int) -> ClientModel:
        """Return a client's final model: an ``nn.Module`` from raw examples to logits."""
        return client_model(self.federation, self.world, client)


class _Silent:
    """An observer that shows nothing; notes on slow models become Python's warnings."""

    def began(self, server: ServerSide, folder: str, done: int) -> None: ...
    def finished_round(self, line: Line) -> None: ...
    def note(self, text: str) -> None: ...


def run(
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    *,
    data: Dataset | tuple[Any, ...] | torch.utils.data.Dataset[Any] | None = None,
    clients: Iterable[Any] | None = None,
    clients_test: Iterable[Any] | None = None,
    model: nn.Module
    | Callable[[], nn.Module]
    | Mapping[str, tuple[Any, Sequence[int]]]
    | None = None,
    method: Method | None = None,
    test_sets: Mapping[str, tuple[Any, Any]] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    data_root: str | Path | None = None,
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
        (rows, ...), taken as it is, or a data frame, encoded as a table's columns are. ``y``
        (rows,) holds whole numbers from 0 on, or names of classes.
    clients, clients_test
        Instead of the recipe's partition: each client's training rows, and test rows (the whole
        test set if not given), as row numbers or as masks. Clients may share rows; each has at
        least one training row, and none twice.
    model
        Instead of the recipe's: a module (its numbers are the start), a factory, or for groups of
        clients ``{"small": (module, [0, 1]), "large": (factory, [2])}``.
    method
        A :class:`~fedgist.core.method.Method` object, registered or not. It is recorded by its
        class and its fields.
    test_sets
        Further test sets of the server's own, ``{"rare": (x, y)}``: its models are scored on each.
    out
        The run directory; without one, nothing is written.
    resume, overwrite
        What to do with a run that is already in ``out``.

    Raises
    ------
    ValueError
        If the recipe or the data cannot be used: one line that names the key, the value and the
        choices.
    Stopped
        After Ctrl-C or SIGTERM, when the round was finished and saved.
    """
    check_flags(resume=resume, overwrite=overwrite)
    if observer is not None:
        check_observer(observer)
    folder = path_of(out, "out")
    recipe_asked = _parse(recipe)
    given = Given(
        data=None if data is None else in_memory(data),
        clients=clients_listed(clients, "clients"),
        clients_test=clients_listed(clients_test, "clients_test"),
        groups=groups_of(model, own_start=recipe_asked.clients.init == "own"),
        method=method,
        test_sets=named_sets(test_sets),
        root=path_of(data_root, "data_root"),
    )
    if resume and folder is None:
        msg = "resume=True goes on with the run in out=...: name its folder"
        raise RecipeError(msg)
    if method is not None:
        recipe_asked = with_method(recipe_asked, method)
    with alone(folder):
        resuming = enter(folder, resume=resume, overwrite=overwrite)
        if resuming and folder and (folder / RECIPE).exists():
            recipe_asked = _resumed(recipe_asked, folder, method)
        saved = checkpoints.load(folder) if resuming and folder else None
        return _run(recipe_asked, given, folder, saved, observer)


def _parse(recipe: Recipe | Mapping[str, Any] | str | Path | None) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return make(recipe)
    if recipe is not None and not isinstance(recipe, str | os.PathLike):
        msg = f"recipe is a {type(recipe).__name__}; it must be a mapping, a file or a Recipe"
        raise RecipeError(msg)
    return read(None if recipe is None else Path(recipe))


def _resumed(asked: Recipe, folder: Path, method: Method | None) -> Recipe:
    """Return the recipe of the run in ``folder``, with the workers and the device asked for now.

    Raises
    ------
    RecipeError
        If ``method`` is given and differs from the method that the run was begun with.
    """
    old = read_recorded(folder / RECIPE) if method is not None else read(folder / RECIPE)
    if method is not None and asked.method != old.method:
        given_now, recorded = ({"name": s.name, **s.options} for s in (asked.method, old.method))
        key = next(k for k in {**recorded, **given_now} if given_now.get(k) != recorded.get(k))
        msg = f"{folder} was begun with method.{key} = {recorded.get(key)!r}, "
        msg += f"not {given_now.get(key)!r}"
        raise RecipeError(msg)
    engine = {"workers": asked.engine.workers, "device": asked.engine.device}
    return old.model_copy(update={"engine": old.engine.model_copy(update=engine)})


def load_run(folder: Path, given: Given | None = None) -> tuple[Federation, World]:
    """Return the federation of a run directory, as its checkpoint left it, and its world.

    Raises
    ------
    RecipeError
        If the folder holds no run, or no checkpoint.
    """
    if not (folder / RECIPE).exists():
        seeds = sorted(p.name for p in folder.glob("seed-*")) if folder.is_dir() else []
        hint = f"; choose one of {', '.join(seeds)}" if seeds else ""
        msg = f"{folder} holds no run{hint}"
        raise RecipeError(msg)
    saved = checkpoints.load(folder)
    if saved is None:
        msg = f"{folder} has no checkpoint yet: its models are not saved"
        raise RecipeError(msg)
    world, server = open_world(read(folder / RECIPE), given or Given())
    federation = Federation(world.server, make_engine(world, workers=1), server)
    federation.restore(saved)
    return federation, world


def _run(
    recipe: Recipe,
    given: Given,
    folder: Path | None,
    saved: Checkpoint | None,
    observer: Observer | None,
) -> Result:
    check_precision(recipe.train.precision, recipe.engine.device)
    watching = observer or _Silent()
    world, state = open_world(recipe, given, watching.note)
    if observer is None:
        for note in plan_notes(world.server):
            warnings.warn(note, stacklevel=3)
    files = {PARTITION: to_json(class_counts(world)) + "\n"}

    def save_features(federation: Federation) -> None:
        if folder and world.server.recipe.evaluate.save_features:
            saved_features.save(federation, world, folder)

    federation, record, end = run_server(
        world.server,
        make_engine(world),
        Place(folder, saved, files),
        watching,
        state=state,
        at_end=save_features,
    )
    return Result(record.rounds, record.clients, end, folder, federation, world)
