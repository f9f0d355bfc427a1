"""Many runs at once: grids, searches, papers' tables."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedgist.cli.recipe_files import find_recipe, find_table
from fedgist.cli.result_commands import Reference, Target
from fedgist.cli.shared_options import SEARCH, DataRoot, Settings, app
from fedgist.engines.worker_pool import default_workers
from fedgist.errors import JobsError, one_of
from fedgist.federation import atomic_files as files
from fedgist.report import paper_comparison as side
from fedgist.report import run_files as runs
from fedgist.report import tables
from fedgist.report.comparison import Study, study
from fedgist.report.formatting import duration, percent
from fedgist.studies.jobs import Event, Hear, Interrupted, Job, is_done, run_jobs
from fedgist.studies.paper_table import Scale, cells, read_table
from fedgist.studies.sweep import grid
from fedgist.studies.tune import OBJECTIVE, Tuner

AtOnce = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", min=1, help="Runs at a time, one core each. Default: as many as cores."
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Seeds of each cell, from the recipe's on.")]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the table and errors.")]


@app.command(rich_help_panel=SEARCH)
def sweep(
    recipe: RecipeName,
    axes: Annotated[
        list[str],
        typer.Option(
            "--grid",
            metavar="SECTION.KEY=V,V...",
            help="Values of a key; may be given again: every combination.",
        ),
    ],
    settings: Settings = None,
    seeds: Seeds = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: runs/sweep-RECIPE.")
    ] = None,
    jobs: AtOnce = None,
    reference: Reference = None,
    target_accuracy: Target = None,
    data_root: DataRoot = None,
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Run a grid of settings and seeds side by side, and compare them.

    What is done is skipped and what was stopped goes on: after Ctrl-C or a kill, give the same
    command again.

    Examples
    --------
    fedgist sweep demo --grid method.name=fedlog,fedavg,local --grid train.lr=1e-3,1e-2 --seeds 5
    """
    path = find_recipe(recipe)
    out = out or Path("runs") / f"sweep-{path.stem}"
    todo = grid(path, settings or [], axes, seeds, out)
    failed = _do(todo, len(todo), jobs, data_root, quiet=quiet)
    _complain(failed, at_least=len(todo))
    goal = None if target_accuracy is None else target_accuracy / 100
    found = runs.find(dict.fromkeys(job.folder.parent for job in todo))
    Console().print(
        tables.render(study(found, reference=reference, target_accuracy=goal), "terminal")
    )
    _complain(failed)


@app.command(rich_help_panel=SEARCH)
def tune(
    recipe: RecipeName,
    space: Annotated[
        Path,
        typer.Option(
            help='TOML: ["train.lr"] low = 1e-4, high = 0.1, log = true; or choices = [].'
        ),
    ],
    trials: Annotated[
        int, typer.Option(min=1, help="Trials in all; those of earlier calls count.")
    ] = 20,
    settings: Settings = None,
    seeds: Seeds = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study. Default: runs/tune-RECIPE.")
    ] = None,
    jobs: AtOnce = None,
    data_root: DataRoot = None,
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Search hyper-parameters by Optuna, on validation data only; bad trials are stopped early.

    A recipe without validation data gives up a fifth of each client's training rows. The study goes
    on after Ctrl-C or a kill: give the same command again. The best settings are written to
    best.toml.

    Examples
    --------
    fedgist tune demo --space space.toml --trials 30
    """
    path = find_recipe(recipe)
    out = out or Path("runs") / f"tune-{path.stem}"
    tuner = Tuner(path, settings or [], space, out, seeds)
    failed = _do(
        tuner.jobs(trials), None, jobs, data_root, quiet=quiet, hear=tuner.hear, metric=OBJECTIVE
    )
    console = Console()
    if folders := tuner.folders():
        found = study(runs.find(folders), metric=OBJECTIVE)
        best_first = sorted(found.rows, key=lambda row: -row.final.mean if row.final else 0.0)
        whole = replace(found, rows=tuple(best_first))
        console.print(tables.in_words(tables.sheets(whole)[:1], [], "terminal"))
    best, chosen = tuner.best(), tuner.best_recipe()
    if best is None or chosen is None:
        console.print("no trial is complete")
        _complain(failed)
        return
    files.write(out / "best.toml", chosen.to_toml())
    words = ", ".join(f"{key} = {value}" for key, value in best[0].items())
    console.print(
        Text(f"best of {tuner.finished} trials on validation data, {percent(best[1])}: {words}")
    )
    console.print(Text(f"fedgist run {out / 'best.toml'} --seeds 5", style="dim"))
    _complain(failed)


@app.command(rich_help_panel=SEARCH)
def reproduce(
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="A paper's table, such as fedlog/table1.")
    ],
    scale: Annotated[
        str, typer.Option(help="small (for two cores) or paper (its settings).")
    ] = "small",
    column: Annotated[
        list[str] | None, typer.Option(help="Only this experiment; may be given several times.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this method; may be given several times.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds. Default: the table's at this scale.")
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: runs/TABLE-SCALE.")
    ] = None,
    jobs: AtOnce = None,
    form: Annotated[
        str, typer.Option("--format", help="terminal, markdown or latex.")
    ] = "terminal",
    data_root: DataRoot = None,
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Run every cell of a paper's table and print ours beside the paper's.

    Resumable: after Ctrl-C or a kill, give the same command again.

    Examples
    --------
    fedgist reproduce fedlog/table1 --column mnist
    """
    path = find_table(table)
    size: Scale = one_of(scale, get_args(Scale), "scale")  # type: ignore[assignment]  # one of them
    chosen: tables.Format = one_of(form, ["terminal", "markdown", "latex"], "format")  # type: ignore[assignment]
    parsed = read_table(path)
    out = out or Path("runs") / f"{path.parent.name}-{path.stem}-{scale}"
    todo, recipes = cells(
        parsed,
        size,
        find_recipe,
        out,
        seeds=seeds,
        columns=column or (),
        methods=method or (),
        settings=settings or (),
    )
    failed = _do(todo, len(todo), jobs, data_root, quiet=quiet)
    _complain(failed, at_least=len(todo))
    have = {job.folder.parent.name for job in todo}
    reference = parsed.table.reference if parsed.table.reference in have else None
    studies: dict[str, Study] = {}
    for name, one in recipes.items():
        goal = one.paper.target_accuracy
        folders = dict.fromkeys(
            job.folder.parent for job in todo if job.folder.parents[1].name == name
        )
        studies[name] = study(
            runs.find(folders),
            reference=reference,
            target_accuracy=None if goal is None else goal / 100,
        )
    sheets = side.side_by_side(studies, recipes, parsed.table.methods, parsed.table.source)
    notes = list(
        dict.fromkeys(f"{name}: {note}" for name, found in studies.items() for note in found.notes)
    )
    shown = tables.in_words(sheets, notes, chosen)
    if isinstance(shown, str):
        sys.stdout.write(shown)
    else:
        Console().print(shown)
    _complain(failed)


def _do(
    todo: Iterable[Job],
    count: int | None,
    at_once: int | None,
    data_root: Path | None,
    *,
    quiet: bool,
    hear: Hear | None = None,
    metric: str = runs.ACCURACY,
) -> dict[str, str]:
    """Do the jobs, saying how far they are; return which ones failed and why.

    Raises
    ------
    Interrupted
        After Ctrl-C.
    """
    failed: dict[str, str] = {}
    for job in todo if isinstance(todo, list) else ():
        is_done(job)  # a folder with another run is found before anything runs
    with _showing(count, metric, quiet=quiet) as show:

        def heard(job: Job, event: Event) -> bool:
            show(job, event)
            if event.kind == "failed":
                failed[job.name] = event.text
            return hear(job, event) if hear else False

        try:
            run_jobs(todo, at_once or default_workers("cpu"), heard, data_root)
        except Interrupted:
            command = " ".join(["fedgist", *sys.argv[1:]])
            msg = f"stopped; what was running is saved; go on with: {command}"
            raise Interrupted(msg) from None
    return failed


def _complain(failed: Mapping[str, str], at_least: int = 1) -> None:
    """Name the runs that failed, those of one reason together."""
    if len(failed) < max(1, at_least):
        return
    reasons: dict[str, list[str]] = {}
    for name, text in failed.items():
        reasons.setdefault(text, []).append(name)
    lines = [f"{', '.join(names)}: {text}" for text, names in reasons.items()]
    msg = "\n".join([f"{len(failed)} run{'s' if len(failed) > 1 else ''} failed:", *lines])
    raise JobsError(msg)


@contextlib.contextmanager
def _showing(count: int | None, metric: str, *, quiet: bool) -> Iterator[Hear]:
    """Yield what tells a person how the jobs go.

    Bars in a terminal, a line for each end in a pipe.
    """
    console = Console(stderr=True)
    if quiet:
        yield lambda _job, _event: False
    elif console.is_terminal:
        yield from _bars(console, count, metric)
    else:
        yield _Lines(count, metric)


class _Lines:
    """A line for each job that ends."""

    def __init__(self, count: int | None, metric: str) -> None:
        self.metric = metric
        self.of, self.ended = "" if count is None else f"/{count}", 0
        self.accuracy: dict[str, float] = {}
        self.began: dict[str, float] = {}

    def __call__(self, job: Job, event: Event) -> bool:
        self.began.setdefault(job.name, time.perf_counter())
        if event.line and self.metric in event.line:
            self.accuracy[job.name] = event.line[self.metric]
        if event.kind in {"done", "stopped", "failed"}:
            self.ended += 1
            took = duration(time.perf_counter() - self.began[job.name])
            reached = (
                f" {percent(self.accuracy[job.name])} {took}" if job.name in self.accuracy else ""
            )
            text = f": {event.text}" if event.text else ""
            sys.stderr.write(f"[{self.ended}{self.of}] {job.name} {event.kind}{reached}{text}\n")
        return False


def _bars(console: Console, count: int | None, metric: str) -> Iterator[Hear]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        whole = progress.add_task("all runs", total=count, accuracy="")
        bars = {}

        def hear(job: Job, event: Event) -> bool:
            if job.name not in bars:
                bars[job.name] = progress.add_task(
                    job.name, total=job.recipe.train.num_rounds, accuracy=""
                )
            bar = bars[job.name]
            if event.line:
                progress.update(bar, completed=event.line["round"])
                if metric in event.line:
                    progress.update(bar, accuracy=percent(event.line[metric]))
            if event.kind in {"done", "stopped", "failed"}:
                progress.remove_task(bar)
                progress.advance(whole)
                if event.kind == "failed":
                    progress.console.print(Text(f"{job.name}: {event.text}", style="red"))
            return False

        yield hear
