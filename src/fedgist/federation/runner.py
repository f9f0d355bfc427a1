"""Runs from a recipe and what is given with it, to a record and trained models."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedgist.core.method import Method
from fedgist.engines.device_choice import check_precision
from fedgist.errors import RecipeError
from fedgist.federation import checkpoint as checkpoints
from fedgist.federation import saved_features
from fedgist.federation.checkpoint import Checkpoint
from fedgist.federation.engine_choice import make_engine, open_world
from fedgist.federation.recipe import Recipe, read, read_recorded
from fedgist.federation.recipe_data import class_counts
from fedgist.federation.record import PARTITION, RECIPE, Line, to_json
from fedgist.federation.round_loop import Federation, Observer
from fedgist.federation.run_directory import alone, enter
from fedgist.federation.server_run import Place, run_server
from fedgist.federation.world import Given, World


@dataclass(frozen=True)
class Outcome:
    """A run that is finished: its record and its trained models.

    ``rounds`` holds a line per round, ``clients`` one per client and evaluation, ``summary`` how
    the run ended. ``folder`` is None if nothing was written.
    """

    rounds: list[Line]
    clients: list[Line]
    summary: dict[str, Any]
    folder: Path | None
    federation: Federation = field(repr=False)
    world: World = field(repr=False)


def run(
    recipe: Recipe,
    given: Given,
    observer: Observer,
    *,
    folder: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Outcome:
    """Run a recipe, with a user's own objects in place of what they replace.

    ``resume`` and ``overwrite`` say what to do with a run that is already in ``folder``; without
    one, nothing is written. The method of ``given``, if it has one, is that of the recipe.

    Raises
    ------
    InputError
        If the recipe, the data or the folder cannot be used.
    Stopped
        After Ctrl-C or SIGTERM, when the round was finished and saved.
    """
    if resume and folder is None:
        msg = "resume=True goes on with the run in out=...: name its folder"
        raise RecipeError(msg)
    with alone(folder):
        resuming = enter(folder, resume=resume, overwrite=overwrite)
        if resuming and folder and (folder / RECIPE).exists():
            recipe = _resumed(recipe, folder, given.method)
        saved = checkpoints.load(folder) if resuming and folder else None
        return _run(recipe, given, folder, saved, observer)


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
    federation.restore(saved.best or saved)
    return federation, world


def _run(
    recipe: Recipe,
    given: Given,
    folder: Path | None,
    saved: Checkpoint | None,
    observer: Observer,
) -> Outcome:
    check_precision(recipe.train.precision, recipe.engine.device)
    world, state = open_world(recipe, given, observer.note)
    files = {PARTITION: to_json(class_counts(world.data, world.partition)) + "\n"}

    def save_features(federation: Federation) -> None:
        if folder and world.server.recipe.evaluate.save_features:
            saved_features.save(federation, world, folder)

    federation, record, end = run_server(
        world.server,
        make_engine(world),
        Place(folder, saved, files),
        observer,
        state=state,
        at_end=save_features,
    )
    return Outcome(record.rounds, record.clients, end, folder, federation, world)
