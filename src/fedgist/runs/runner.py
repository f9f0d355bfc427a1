"""Runs: from a recipe and a user's objects to a record and trained models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedgist.engines import ALIKE
from fedgist.engines.device_choice import check_precision, usable_device
from fedgist.errors import RecipeError, listed, shown
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import Recipe, read, read_recorded
from fedgist.recipe.resolve import Setup, resolve
from fedgist.runs.evaluation import models_of_clients
from fedgist.runs.files import checkpoint as checkpoints
from fedgist.runs.files.record import (
    FEATURES,
    PARTITION,
    RECIPE,
    RELEASES,
    ROUNDS,
    Line,
    features_of,
    read_bytes_or_empty,
    to_json,
)
from fedgist.runs.files.run_directory import check_entry, clear, locked, naming_folder
from fedgist.runs.finished import saved_features, saved_predictions
from fedgist.runs.finished.probes import probe_of
from fedgist.runs.finished.saved_predictions import saves_predictions
from fedgist.runs.last_download import load_downloads
from fedgist.runs.prepare import prepare_run
from fedgist.runs.resuming import ALL_BYTES, TEST_SETS, check_binding, is_sampled, of_world
from fedgist.runs.round import Observer, ServerRun
from fedgist.runs.run_rounds import Place, run_server
from fedgist.world.data import class_counts
from fedgist.world.world import World

ADD_UP = "its epsilon and that of this run add up"


@dataclass(frozen=True)
class Outcome:
    """A run that is finished: its record and its trained models.

    ``rounds`` holds one line per round, and ``clients`` one line per client and evaluation.
    ``summary`` is the run's result. ``folder`` is None if nothing was written.
    """

    rounds: list[Line]
    clients: list[Line]
    summary: dict[str, Any]
    folder: Path | None
    server_run: ServerRun = field(repr=False)
    world: World = field(repr=False)


def run(
    recipe: Recipe,
    given: Overrides,
    observer: Observer,
    *,
    folder: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    rounds: int | None = None,
    full_digest: bool = False,
) -> Outcome:
    """Run a recipe; a user's own objects replace parts of it.

    ``resume`` and ``overwrite`` say whether to resume or replace a run that is already in
    ``folder``. Without a folder, nothing is written. A resumed run needs its old recipe and
    objects, but its number of rounds may be raised to ``rounds``. If ``given`` has a method, it
    must be the recipe's method. With ``full_digest`` every byte of rows that are read lazily is
    compared when the run is resumed.
    """
    if resume and folder is None:
        raise RecipeError("resume=True goes on with the run in out=...: name its folder")
    if rounds is not None:
        if not resume:
            raise RecipeError(
                f"rounds = {rounds} raises the number of rounds of a run that is resumed"
            )
        recipe = recipe.changed({"train.num_rounds": rounds})
    with locked(folder):
        resuming = check_entry(folder, resume=resume, overwrite=overwrite)
        saved = checkpoints.load(folder) if resuming and folder else None
        if resuming and folder and saved is None and read_bytes_or_empty(folder / ROUNDS):
            observer.note(f"{folder} has no checkpoint: its run begins again at round 1")
        if folder and saved:
            recipe = _as_begun(recipe, folder)
        replaces = folder is not None and overwrite and (folder / RELEASES).exists()
        notes = (f"privacy: the run that was in {folder} released its sums; {ADD_UP}",)
        place = Place(folder, saved, raising=rounds is not None, notes=notes if replaces else ())
        whole = full_digest if saved is None else ALL_BYTES in saved.binding.inputs
        if full_digest and not whole:
            raise RecipeError(f"{folder} was begun without --full-digest: leave it out")
        with naming_folder(folder if resuming else None):
            setup = resolve(recipe, given)
            return _run(setup, place, observer, resuming=resuming, full_digest=whole)


def _as_begun(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe of a resumed run, which keeps its plans."""
    engine = read_recorded(folder / RECIPE).engine
    names = engine.name, recipe.engine.name
    if names[0] != names[1] and not ALIKE.issuperset(names):
        raise RecipeError(
            f"{folder} was begun with engine.name = {shown(names[0])}, not {shown(names[1])}: only "
            f"{listed(sorted(ALIKE))} keep clients' state in the same way"
        )
    chosen = ("plans", "server_threads", "shards")
    kept = {f"engine.{name}": getattr(engine, name) for name in chosen}
    return recipe.changed(kept)


def load_run(folder: Path, given: Overrides | None = None) -> tuple[ServerRun, World]:
    """Return the federation of a run directory in its checkpoint's state, and its world.

    On a machine without a GPU, a run that was trained on a GPU is loaded on the CPU.
    """
    if not (folder / RECIPE).exists():
        seeds = sorted(p.name for p in folder.glob("seed-*")) if folder.is_dir() else []
        hint = f"; choose one of {', '.join(seeds)}" if seeds else ""
        raise RecipeError(f"{folder} holds no run{hint}")
    saved = checkpoints.load(folder)
    if saved is None:
        raise RecipeError(f"{folder} has no checkpoint yet: its models are not saved")
    recipe = read(folder / RECIPE)
    device = "cpu" if recipe.engine.device == "cpu" else usable_device("auto")
    with naming_folder(folder):
        setup = resolve(recipe.changed({"engine.device": device}), given)
        if setup.private_width is not None:
            raise RecipeError(
                "the server of this run has no models, because each site's is private: a site has "
                "its own in the folder models of its state"
            )
        world, server, engine = prepare_run(setup, workers=1)
    # models are used without the test sets that were given with them
    inputs = saved.binding.inputs
    begun = {TEST_SETS: inputs[TEST_SETS]} if TEST_SETS in inputs else {}
    check_binding(
        world.server,
        of_world(world, whole=ALL_BYTES in inputs) | begun,
        saved,
        folder,
        raising=False,
    )
    kept = load_downloads(folder)
    server_run = ServerRun(world.server, engine, server, last_downloads=kept)
    server_run.restore(saved.best or saved)
    return server_run, world


def _run(
    setup: Setup, place: Place, observer: Observer, *, resuming: bool, full_digest: bool
) -> Outcome:
    for note in setup.recipe.dropped:
        observer.note(note)
    check_precision(setup.recipe.train.precision, setup.recipe.engine.device)
    world, state, engine = prepare_run(setup, observer.note)
    if place.folder and not resuming:  # only now: a recipe with a mistake replaces no run
        clear(place.folder)
    if place.folder and is_sampled(world):
        observer.note("the data are large: changes to them are looked for in a sample, on resume")
    inputs = of_world(world, whole=full_digest) if place.folder else {}
    files = {PARTITION: to_json(_split_of(world)) + "\n"}
    settings, predicts = setup.recipe.evaluate, saves_predictions(world, engine)

    def save_arrays(server_run: ServerRun, number: int | None) -> None:
        if not place.folder:
            return
        if number is None and settings.save_features:
            saved_features.save(server_run, world, place.folder / FEATURES)
        if number is None and predicts:
            saved_predictions.save(server_run, world, place.folder)
        if number in settings.save_features_at:
            saved_features.save(server_run, world, place.folder / features_of(server_run.round))

    server_run, record, end = run_server(
        world.server,
        engine,
        replace(place, files=files, inputs=inputs),
        observer,
        state=state,
        probe=probe_of(world, engine),
        save_arrays=save_arrays,
    )
    return Outcome(record.rounds, record.clients, end, place.folder, server_run, world)


def _split_of(world: World) -> dict[str, object]:
    """Return who has what: class counts, names and models of the clients."""
    counts = class_counts(world.data, world.partition)
    return counts | {"models": models_of_clients(world.server)}
