"""Running recipes, and using what was trained."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedgist.cli.progress import observing
from fedgist.cli.recipe_files import find_recipe
from fedgist.cli.shared_options import RUN, ClientId, DataRoot, Settings, app
from fedgist.cli.shared_options import Recipe as RecipeName
from fedgist.data import read_examples
from fedgist.errors import RecipeError
from fedgist.federation import atomic_files as files
from fedgist.federation import runner as api
from fedgist.federation import world as worlds
from fedgist.federation.recipe import Recipe, read
from fedgist.federation.record import RECIPE, to_json
from fedgist.federation.round_loop import Observer
from fedgist.federation.trained_models import client_model
from fedgist.federation.trained_models import export as export_model
from fedgist.report import figures
from fedgist.report import formatting as text
from fedgist.report import run_files as runs

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start again in a folder that holds a run.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="One line of JSON a round, and one for the result.")
]


@app.command(rich_help_panel=RUN)
def run(
    recipe: RecipeName = None,
    settings: Settings = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help="Run so many seeds, from the recipe's on, each in its own folder."
        ),
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Run directory. Default: runs/RECIPE-METHOD.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in DIR.")
    ] = None,
    overwrite: Overwrite = False,  # noqa: FBT002
    data_root: DataRoot = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Run a recipe: without one, FedLog on ten clients of scikit-learn's digits.

    Examples
    --------
    fedgist run recipes/fedlog/mnist.toml --seeds 3
    fedgist run --set method.name=fedavg --set train.num_rounds=50
    fedgist run --resume runs/mnist-fedlog
    """
    console = Console()
    with observing(console, quiet=quiet, as_json=as_json) as observer:
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
        console.print(text.overview(runs.find(folders)))
        shown = {f.parent if f.name.startswith("seed-") else f for f in folders}
        console.print(Text(f"fedgist show {' '.join(sorted(str(f) for f in shown))}", style="dim"))


def _start(
    recipe: str | None,
    settings: list[str],
    seeds: int,
    out: Path | None,
    data_root: Path | None,
    observer: Observer,
    *,
    overwrite: bool,
) -> Iterator[api.Result]:
    path = find_recipe(recipe)
    parsed = read(path, settings)
    out = out or Path("runs") / f"{path.stem}-{parsed.method.name}"
    other = any(out.glob(f"seed-*/{RECIPE}")) if seeds == 1 else (out / RECIPE).exists()
    if other and not overwrite:
        msg = (
            f"{out} holds {'runs of several seeds' if seeds == 1 else 'a run of one seed'}; "
            "choose another --out"
        )
        raise RecipeError(msg)
    if seeds == 1:
        yield api.run(parsed, out=out, overwrite=overwrite, data_root=data_root, observer=observer)
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
) -> Iterator[api.Result]:
    for seed in seeds:
        one, folder = recipe.model_copy(update={"seed": seed}), out / f"seed-{seed}"
        try:
            yield api.run(
                one, out=folder, overwrite=overwrite, data_root=data_root, observer=observer
            )
        except api.Stopped as stopped:
            raise api.Stopped(out, f" --seeds {count}") from stopped


def _resume(
    folder: Path, settings: list[str], seeds: int, data_root: Path | None, observer: Observer
) -> Iterator[api.Result]:
    if strange := [
        s
        for s in settings
        if s.partition("=")[0].strip() not in {"engine.workers", "engine.device"}
    ]:
        msg = (
            f"--set {strange[0]}: a resumed run keeps its recipe; only engine.workers and "
            "engine.device may change"
        )
        raise RecipeError(msg)
    found = runs.find([folder])
    if any(folder not in {one.folder, one.folder.parent} for one in found):
        msg = (
            f"{folder} holds runs of several settings: give the command that began them again, or "
            "resume one"
        )
        raise RecipeError(msg)
    for one in found:
        recipe = read(one.folder / RECIPE, settings)
        if (
            one.result.get("status") == "finished"
            and one.rounds[-1:]
            and one.rounds[-1]["round"] == recipe.train.num_rounds
        ):
            observer.note(f"{one.folder} is finished ({recipe.train.num_rounds} rounds)")
            continue
        yield api.run(recipe, out=one.folder, resume=True, data_root=data_root, observer=observer)
    if found[0].folder != folder:  # seeds that had not begun
        have = {one.recipe["seed"] for one in found}
        missing = [s for s in range(min(have), min(have) + seeds) if s not in have]
        yield from _seeds(recipe, missing, folder, data_root, observer, count=seeds)


@app.command(rich_help_panel=RUN)
def partition(
    recipe: RecipeName = None,
    settings: Settings = None,
    png: Annotated[Path | None, typer.Option(help="Also draw it into this file.")] = None,
    data_root: DataRoot = None,
) -> None:
    """Print and draw who has what, before anything is trained."""
    parsed = read(find_recipe(recipe), settings or [])
    world = worlds.make_world(parsed, worlds.Given(root=data_root))
    split = worlds.class_counts(world)
    counts = split["train"]
    console = Console()
    console.print(_partition_table(world, counts))
    sizes = sorted(sum(line) for line in counts)
    console.print(
        f"{len(counts)} clients; training rows: "
        f"{sizes[0]} at least, {sizes[len(sizes) // 2]} median, {sizes[-1]} at most"
    )
    if png:
        figures.partition_png(counts, split["classes"], png)
        console.print(f"drawn in {png}")


def _partition_table(world: worlds.World, counts: list[list[int]], most: int = 40) -> Table:
    table = Table(title=f"{world.data.name}, {world.recipe.partition.name}", title_justify="left")
    for name in ("client", "model", "train", "valid", "test"):
        table.add_column(name, justify="left" if name == "model" else "right")
    table.add_column(
        f"training rows of classes 0..{world.data.num_classes - 1}: darker is more", no_wrap=True
    )
    peak = max((n for line in counts for n in line), default=1) or 1
    p = world.partition
    models = {c.id: c.architectures[0] for c in world.population.clients}
    for i, line in enumerate(counts[:most]):
        cells = "".join("·░▒▓█"[0 if n == 0 else 1 + min(3, 4 * n // (peak + 1))] for n in line)
        table.add_row(
            str(i),
            models.get(i, models[0]),
            *(str(len(r[i])) for r in (p.train, p.validation, p.test)),
            cells,
        )
    if len(counts) > most:
        table.add_row("...", f"{len(counts) - most} more")
    return table


@app.command(rich_help_panel=RUN)
def predict(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    data: Annotated[
        Path,
        typer.Argument(
            help="Examples: .npz or .npy, a table (.csv, .tsv, .parquet), an image or a folder."
        ),
    ],
    client: ClientId,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="CSV file. Default: standard output.")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Predict labels and probabilities by a client's own final model, as CSV."""
    federation = api.load_run(folder, worlds.Given(root=data_root))
    world = federation.world
    x = read_examples(data, world.data, world.recipe.data.name, world.recipe.data.options)
    probabilities = client_model(federation, client).probabilities(x)
    names = world.data.classes or tuple(str(c) for c in range(world.data.num_classes))
    lines = [["row", "label", *(f"p_{name}" for name in names)]]
    for i, row in enumerate(probabilities.tolist()):
        lines.append([str(i), names[row.index(max(row))], *(f"{p:.6g}" for p in row)])
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    if out is None:
        sys.stdout.write(buffer.getvalue())
    else:
        files.write(out, buffer.getvalue())


@app.command("export", rich_help_panel=RUN)
def export_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    client: ClientId,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .pt2 or .safetensors.")],
    data_root: DataRoot = None,
) -> None:
    """Write a client's own final model to a file that loads without fedgist."""
    federation = api.load_run(folder, worlds.Given(root=data_root))
    export_model(client_model(federation, client), out)
    Console().print(f"client {client} of {folder} written to {out}")
