"""Start one run per seed, and resume the runs in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedgist.engines.process_control import keep_memory
from fedgist.errors import DiskFullError, RecipeError, Stopped, listed, resume_command
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import Recipe, read
from fedgist.runs import runner
from fedgist.runs.composition import notes_on
from fedgist.runs.files.record import RECIPE, is_over
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.resuming import check_finished
from fedgist.runs.round import Observer

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
    other = any(out.glob(f"seed-*/{RECIPE}")) if seeds == 1 else (out / RECIPE).exists()
    if other and not overwrite:
        raise RecipeError(
            f"{out} holds {'runs of several seeds' if seeds == 1 else 'a run of one seed'}; "
            "choose another --out"
        )
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
        for note in notes_on([recipe] * seeds):
            observer.note(note)
        flags = {"overwrite": overwrite, "full_digest": full_digest}
        yield from _seeds(recipe, numbers, out, data_root, observer, count=seeds, **flags)


def _seeds(
    recipe: Recipe,
    seeds: Sequence[int],
    out: Path,
    data_root: Path | None,
    observer: Observer,
    *,
    count: int,
    overwrite: bool = False,
    full_digest: bool = False,
) -> Iterator[runner.Outcome]:
    for seed in seeds:
        try:
            yield runner.run(
                recipe.changed({"seed": seed}),
                Overrides(root=data_root),
                observer,
                folder=out / f"seed-{seed}",
                overwrite=overwrite,
                full_digest=full_digest,
            )
        except Stopped as stopped:
            raise Stopped(out, "--seeds", str(count)) from stopped
        except DiskFullError as full:
            if any(out.glob(f"seed-*/{RECIPE}")):
                command = resume_command(out, "--seeds", str(count))
                raise DiskFullError(full.reason, command) from full
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
    if any(folder not in {run.folder, run.folder.parent} for run in runs):
        raise RecipeError(
            f"{folder} holds runs of several settings: give the command that started them again, "
            "or resume one of them"
        )
    if runs[0].folder != folder:
        for note in notes_on([read(runs[0].folder / RECIPE)] * max(seeds, len(runs))):
            observer.note(note)
    for run in runs:
        recipe = read(run.folder / RECIPE, settings)
        if _is_finished(run, rounds or recipe.train.num_rounds):
            check_finished(recipe, run.folder, rounds)
            observer.note(f"{run.folder} is finished ({run.done} rounds)")
            continue
        yield runner.run(
            recipe,
            Overrides(root=data_root),
            observer,
            folder=run.folder,
            resume=True,
            rounds=rounds,
        )
    if runs[0].folder != folder:  # seeds that have not started
        begun = {run.recipe["seed"] for run in runs}
        missing = [seed for seed in range(min(begun), min(begun) + seeds) if seed not in begun]
        yield from _seeds(recipe, missing, folder, data_root, observer, count=seeds)


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
