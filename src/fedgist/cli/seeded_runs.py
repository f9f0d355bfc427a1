"""Start one run per seed, and resume the runs in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedgist.engines.process_control import keep_memory
from fedgist.errors import DiskFullError, RecipeError, Stopped, listed, resume_command
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import Recipe, read
from fedgist.runs import runner
from fedgist.runs.composition import notes_on
from fedgist.runs.files.record import RECIPE, is_over
from fedgist.runs.files.run_directory import holds_run, is_of_seed, name_of_seed, seeds_in
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.resuming import check_finished
from fedgist.runs.round import Observer
from fedgist.studies.job import difference

MAY_CHANGE = (  # of a resumed run
    *("engine.workers", "engine.readers", "engine.device"),
    *("engine.name", "engine.address"),
)


def start(
    recipe: Recipe,
    seeds: int,
    out: Path,
    data_root: Path | None,
    observer: Observer,
    *,
    overwrite: bool,
    full_digest: bool = False,
) -> Iterator[runner.Outcome]:
    """Run a recipe with ``seeds`` consecutive seeds; yield the result of each run when it ends."""
    keep_memory()
    if (count := recipe.data.divisions) > 1:
        number = recipe.data.division + 1
        observer.note(f"division {number} of {count} of the rows; fedgist sweep runs all {count}")
    if seeds == 1:
        yield runner.run(
            recipe,
            Overrides(root=data_root),
            observer,
            folder=out,
            overwrite=overwrite,
            full_digest=full_digest,
        )
    else:
        numbers = range(recipe.seed, recipe.seed + seeds)
        _check_beside(recipe, numbers, out)
        for note in notes_on([recipe] * seeds):
            observer.note(note)
        flags = {"overwrite": overwrite, "full_digest": full_digest}
        options = ("--seeds", str(seeds))
        yield from _seeds(recipe, numbers, out, data_root, observer, options, **flags)


def _check_beside(recipe: Recipe, seeds: Sequence[int], out: Path) -> None:
    """Raise RecipeError if ``out`` holds a run beside which those of ``seeds`` do not belong."""
    if holds_run(out):
        raise RecipeError(f"{out} holds a run of one seed; choose another --out, or remove it")
    if (out / RECIPE).exists():
        raise RecipeError(
            f"with {out / RECIPE}, reports would take {out} for one run; choose another --out, or "
            "move the file"
        )
    replaced = {out / name_of_seed(seed) for seed in seeds}
    for folder in seeds_in(out):
        if folder in replaced:  # if the user allows it
            continue
        kept = read(folder / RECIPE)
        drawn = {"seed": kept.seed, "data.division": kept.data.division}
        if change := difference(recipe.changed(drawn), kept):
            raise RecipeError(
                f"{folder} holds a run with {change}; choose another --out, or remove it"
            )


def _seeds(
    recipe: Recipe,
    seeds: Sequence[int],
    out: Path,
    data_root: Path | None,
    observer: Observer,
    options: Sequence[str],
    *,
    overwrite: bool = False,
    full_digest: bool = False,
) -> Iterator[runner.Outcome]:
    """Run the seeds; ``options`` are those with which a resumed command does what is left."""
    for seed in seeds:
        with _naming_all(out, options):
            outcome = runner.run(
                recipe.changed({"seed": seed}),
                Overrides(root=data_root),
                observer,
                folder=out / name_of_seed(seed),
                overwrite=overwrite,
                full_digest=full_digest,
            )
        yield outcome


@contextlib.contextmanager
def _naming_all(out: Path, options: Sequence[str]) -> Iterator[None]:
    """If one of several seeds stops, name the command that resumes all of them."""
    try:
        yield
    except Stopped as stopped:
        raise Stopped(out, *options) from stopped
    except DiskFullError as full:
        if seeds_in(out):
            raise DiskFullError(full.reason, resume_command(out, *options)) from full
        raise


def resume(
    folder: Path,
    settings: list[str],
    seeds: int,
    data_root: Path | None,
    observer: Observer,
    rounds: int | None = None,
) -> Iterator[runner.Outcome]:
    """Resume the run in a folder, or each seed's run in it; yield each result when it is ready."""
    keep_memory()
    _check_resumed_settings(settings)
    runs = run_reader.find([folder])
    several = runs[0].folder != folder
    if several:
        _check_same(folder, runs)
    missing = _not_begun(folder, runs, seeds) if several else []
    options = ["--seeds", str(seeds)] if seeds > 1 else []
    options += [] if rounds is None else ["--rounds", str(rounds)]
    if several:
        for note in notes_on([read(runs[0].folder / RECIPE)] * max(seeds, len(runs))):
            observer.note(note)
    for run in runs:
        recipe = read(run.folder / RECIPE, settings)
        if _is_finished(run, rounds or recipe.train.num_rounds):
            check_finished(recipe, run.folder, rounds)
            observer.note(f"{run.folder} is finished ({run.done} rounds)")
            continue
        with _naming_all(folder, options) if several else contextlib.nullcontext():
            outcome = runner.run(
                recipe,
                Overrides(root=data_root),
                observer,
                folder=run.folder,
                resume=True,
                rounds=rounds,
            )
        yield outcome
    if missing:
        if rounds is not None:
            recipe = recipe.changed({"train.num_rounds": rounds})
        yield from _seeds(recipe, missing, folder, data_root, observer, options)


def _check_same(folder: Path, runs: Sequence[FinishedRun]) -> None:
    """Raise RecipeError unless the runs are those of one recipe's seeds or divisions."""
    first = read(runs[0].folder / RECIPE)
    for run in runs:
        recipe, of_seed = read(run.folder / RECIPE), is_of_seed(run.folder.name)
        own = {"seed": recipe.seed, "data.division": recipe.data.division}
        own["train.num_rounds"] = recipe.train.num_rounds  # some may have been raised
        if run.folder.parent != folder or not of_seed or difference(first.changed(own), recipe):
            raise RecipeError(
                f"{folder} holds runs of several settings: give the command that started them "
                "again, or resume one of them"
            )


def _not_begun(folder: Path, runs: Sequence[FinishedRun], seeds: int) -> list[int]:
    """Return those of so many consecutive seeds that have no run."""
    begun = {run.recipe["seed"] for run in runs}
    missing = [seed for seed in range(min(begun), min(begun) + seeds) if seed not in begun]
    if missing and any(run.folder.name != name_of_seed(run.recipe["seed"]) for run in runs):
        raise RecipeError(
            f"--seeds: {folder} holds several divisions of the rows: give the command that "
            "started them again"
        )
    return missing


def _check_resumed_settings(settings: Sequence[str]) -> None:
    for setting in settings:
        if setting.partition("=")[0].strip() not in MAY_CHANGE:
            raise RecipeError(
                f"--set {setting}: a resumed run keeps its recipe; only "
                f"{listed(MAY_CHANGE)} may change"
            )


def _is_finished(run: FinishedRun, rounds: int) -> bool:
    ended = run.result.get("status") == "finished"
    return ended and is_over(rounds, run.done, run.result)
