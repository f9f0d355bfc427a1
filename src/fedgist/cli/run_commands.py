"""The commands that run recipes: run, partition."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedgist.cli.progress import observing
from fedgist.cli.recipe_files import find_recipe
from fedgist.cli.shared_options import RUN, DataRoot, RecipeOrDemo, Settings, app
from fedgist.errors import RecipeError
from fedgist.federation import runner
from fedgist.federation.recipe import Recipe, read
from fedgist.federation.recipe_data import class_counts
from fedgist.federation.record import RECIPE, to_json
from fedgist.federation.round_loop import Observer
from fedgist.federation.run_directory import as_folder
from fedgist.federation.server_run import Stopped
from fedgist.federation.world import Given, World, make_world
from fedgist.report import run_files
from fedgist.report.pictures import partition_png
from fedgist.report.run_files import RunFiles
from fedgist.report.run_tables import overview
from fedgist.report.sheet import Sheet
from fedgist.report.terminal import SheetView, console, words

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start anew in a folder that already holds a run.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print a line of JSON for each round, and for the result.")
]


@app.command(rich_help_panel=RUN)
def run(
    recipe: RecipeOrDemo = None,
    settings: Settings = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of seeds, starting at the recipe's seed; each has a folder of its own.",
        ),
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Run directory. Default: runs/RECIPE-METHOD.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the run in DIR.")
    ] = None,
    overwrite: Overwrite = False,  # noqa: FBT002
    data_root: DataRoot = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Run a recipe; without one, FedLog on scikit-learn's digits with ten clients.

    Examples
    --------
    fedgist run recipes/fedlog/mnist.toml --seeds 3
    fedgist run --set method.name=fedavg --set train.num_rounds=50
    fedgist run --resume runs/mnist-fedlog
    """
    screen = console()
    with observing(screen, quiet=quiet, as_json=as_json) as observer:
        if resume is not None:
            results = _resume(resume, settings or [], seeds, data_root, observer)
        else:
            results = _start(
                recipe, settings or [], seeds, out, data_root, observer, overwrite=overwrite
            )
        folders = [resume] if resume else []
        for result in results:
            assert result.folder is not None  # the command line always has one
            folders += [] if resume else [result.folder]
            if as_json:
                sys.stdout.write(
                    to_json({"folder": str(result.folder), "result": result.summary}) + "\n"
                )
    if not quiet and not as_json:
        screen.print(SheetView(overview(run_files.find(folders))))
        shown = {str(path.parent if path.name.startswith("seed-") else path) for path in folders}
        screen.print(words(shlex.join(["fedgist", "show", *sorted(shown)]), "dim"))


def _start(
    recipe: str | None,
    settings: list[str],
    seeds: int,
    out: Path | None,
    data_root: Path | None,
    observer: Observer,
    *,
    overwrite: bool,
) -> Iterator[runner.Outcome]:
    path = find_recipe(recipe)
    parsed = read(path, settings)
    out = out or Path("runs") / as_folder(f"{path.stem}-{parsed.method.name}")
    other = any(out.glob(f"seed-*/{RECIPE}")) if seeds == 1 else (out / RECIPE).exists()
    if other and not overwrite:
        msg = (
            f"{out} holds {'runs of several seeds' if seeds == 1 else 'a run of one seed'}; "
            "choose another --out"
        )
        raise RecipeError(msg)
    if seeds == 1:
        yield runner.run(parsed, Given(root=data_root), observer, folder=out, overwrite=overwrite)
    else:
        numbers = range(parsed.seed, parsed.seed + seeds)
        yield from _seeds(
            parsed, numbers, out, data_root, observer, count=seeds, overwrite=overwrite
        )


def _seeds(
    recipe: Recipe,
    seeds: Sequence[int],
    out: Path,
    data_root: Path | None,
    observer: Observer,
    *,
    count: int,
    overwrite: bool = False,
) -> Iterator[runner.Outcome]:
    for seed in seeds:
        try:
            yield runner.run(
                recipe.model_copy(update={"seed": seed}),
                Given(root=data_root),
                observer,
                folder=out / f"seed-{seed}",
                overwrite=overwrite,
            )
        except Stopped as stopped:
            raise Stopped(out, f" --seeds {count}") from stopped


def _resume(
    folder: Path, settings: list[str], seeds: int, data_root: Path | None, observer: Observer
) -> Iterator[runner.Outcome]:
    _check_resumed_settings(settings)
    runs = run_files.find([folder])
    if any(folder not in {run.folder, run.folder.parent} for run in runs):
        msg = (
            f"{folder} holds runs of several settings: give the command that started them again, "
            "or resume one of them"
        )
        raise RecipeError(msg)
    for run in runs:
        recipe = read(run.folder / RECIPE, settings)
        if _is_finished(run, recipe):
            observer.note(f"{run.folder} is finished ({recipe.train.num_rounds} rounds)")
            continue
        yield runner.run(recipe, Given(root=data_root), observer, folder=run.folder, resume=True)
    if runs[0].folder != folder:  # seeds that had not begun
        begun = {run.recipe["seed"] for run in runs}
        missing = [seed for seed in range(min(begun), min(begun) + seeds) if seed not in begun]
        yield from _seeds(recipe, missing, folder, data_root, observer, count=seeds)


def _check_resumed_settings(settings: Sequence[str]) -> None:
    for setting in settings:
        if setting.partition("=")[0].strip() not in {"engine.workers", "engine.device"}:
            msg = (
                f"--set {setting}: a resumed run keeps its recipe; only engine.workers and "
                "engine.device may change"
            )
            raise RecipeError(msg)


def _is_finished(run: RunFiles, recipe: Recipe) -> bool:
    ended = run.result.get("status") == "finished"
    return ended and bool(run.rounds) and run.done == recipe.train.num_rounds


@app.command(rich_help_panel=RUN)
def partition(
    recipe: RecipeOrDemo = None,
    settings: Settings = None,
    png: Annotated[Path | None, typer.Option(help="File to draw it into, too.")] = None,
    data_root: DataRoot = None,
) -> None:
    """Print and draw how many rows of each class each client has, before any training."""
    parsed = read(find_recipe(recipe), settings or [])
    world = make_world(parsed, Given(root=data_root))
    split = class_counts(world.data, world.partition)
    counts = split["train"]
    screen = console()
    screen.print(SheetView(_partition_sheet(world, counts)))
    if png:
        partition_png(counts, split["classes"], png)
        screen.print(words(f"drawn in {png}"))


def _partition_sheet(world: World, counts: list[list[int]], most: int = 40) -> Sheet:
    peak = max((n for line in counts for n in line), default=1) or 1
    rows = world.partition
    models = {client.id: client.architectures[0] for client in world.population.clients}
    lines = []
    for i, line in enumerate(counts[:most]):
        shades = "".join("·░▒▓█"[0 if n == 0 else 1 + min(3, 4 * n // (peak + 1))] for n in line)
        sizes = [str(len(part[i])) for part in (rows.train, rows.validation, rows.test)]
        called = rows.names[i] if rows.names else str(i)
        lines.append((called, *sizes, models.get(i, models[0]), shades))
    if len(counts) > most:
        lines.append((f"and {len(counts) - most} more", "", "", "", "", ""))
    sizes_in_order = sorted(sum(line) for line in counts)
    return Sheet(
        f"{world.data.name}, {world.server.recipe.partition.name}",
        ("client", "train", "valid", "test", "model", "classes"),
        tuple(lines),
        f"rows of each client; classes: 0 to {world.data.num_classes - 1} from the left, darker is "
        f"more. {len(counts)} clients; training rows: {sizes_in_order[0]} at least, "
        f"{sizes_in_order[len(counts) // 2]} median, {sizes_in_order[-1]} at most",
    )
