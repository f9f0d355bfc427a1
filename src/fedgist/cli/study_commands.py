"""Commands that start many runs: sweep, tune, privacy, reproduce."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Group

from fedgist.cli.job_progress import Machines, do_jobs, live_sender, raise_failures
from fedgist.cli.queue_runs import ALL, JobsOf, QueueOptions, run_queue
from fedgist.cli.recipe_files import find_recipe, find_space, find_table
from fedgist.cli.result_commands import Reference, TargetOption
from fedgist.cli.shared_options import (
    SEARCH,
    DataRoot,
    RecipeOrDemo,
    SettingsOption,
    TrackOption,
    app,
    refuse_unread,
    same_runs,
)
from fedgist.cli.value_origins import naming_origins
from fedgist.errors import RecipeError, ReportError, one_of
from fedgist.recipe.privacy_section import PrivacySection
from fedgist.recipe.reading import Recipe, read
from fedgist.report import privacy_words
from fedgist.report.formatting import score_text
from fedgist.report.pictures import drawing, varied
from fedgist.report.tables import comparison
from fedgist.report.tables import study_tables as tables
from fedgist.report.tables.comparison import Study
from fedgist.report.tables.paper_comparison import side_by_side
from fedgist.report.terminal import table_formats
from fedgist.report.terminal.console import SheetView, console, say, words
from fedgist.runs.composition import notes_on
from fedgist.runs.files import atomic_files
from fedgist.runs.finished import run_reader
from fedgist.studies.archive import Archive
from fedgist.studies.job import Job, jobs_of_seeds
from fedgist.studies.paper_table import Scale, cells, read_paper_table
from fedgist.studies.private_choice import HOW, NOT_COVERED
from fedgist.studies.queue import QUEUE
from fedgist.studies.sweep import grid
from fedgist.studies.tune import BEST, Tuner, storing

AtOnce = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", min=1, help="Runs at a time, one core each. Default: the number of cores."
    ),
]
SeedsOption = Annotated[
    int, typer.Option(min=1, help="Number of seeds per cell, counted from the recipe's seed.")
]
RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe file, or the name of one that comes with fedgist."
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only the table and errors.")
]

ArchiveFolder = Annotated[
    Path | None,
    typer.Option(
        "--archive",
        help="Folder of finished runs as small CSV files. Runs in it are not repeated, and each "
        "run that ends is added.",
    ),
]

On = Annotated[
    str,
    typer.Option(
        "--on",
        help="local, or ray: the cluster of RAY_ADDRESS, or one of this machine (docs/cluster.md).",
    ),
]
Cores = Annotated[int, typer.Option(min=1, help="With --on ray: cores of each run.")]
Gpus = Annotated[
    float, typer.Option(min=0.0, help="With --on ray: GPUs of each run; 0.5 lets two share one.")
]

Rerun = Annotated[
    bool,
    typer.Option(
        "--rerun",
        help="Repeat runs whose files do not match their seal. Default: such runs are left out and "
        "named, and the exit code is 1.",
    ),
]

OF_QUEUE = frozenset(  # parameters of ``fedgist reproduce`` that the queue reads
    {
        *("table", "queue", "archive", "out", "hours", "plan"),
        *("device", "jobs", "data_root", "quiet"),
    }
)
MOST_TIES = 3  # number of ties that are named
SCALES: dict[str, Scale] = {scale: scale for scale in get_args(Scale)}
REPRODUCE_FORMATS: dict[str, table_formats.Format] = {
    "terminal": "terminal",
    "markdown": "markdown",
    "latex": "latex",
}


def sweep_jobs(
    recipe: str, axes: list[str], settings: list[str] | None, seeds: int, out: Path, **_: object
) -> list[Job]:
    """Return the jobs of ``fedgist sweep`` with these options; others do not matter."""
    return grid(find_recipe(recipe), settings or [], axes, seeds, out)


def table_cells(
    table: str,
    scale: str,
    column: list[str] | None,
    method: list[str] | None,
    seeds: int | None,
    settings: list[str] | None,
    out: Path,
    **_: object,
) -> tuple[list[Job], dict[str, Recipe]]:
    """Return the jobs and the columns' recipes of ``fedgist reproduce`` with these options."""
    return cells(
        read_paper_table(find_table(table)),
        SCALES[one_of(scale, SCALES, "scale")],
        find_recipe,
        out,
        seeds=seeds,
        columns=column or (),
        methods=method or (),
        settings=settings or (),
    )


#: The jobs of a command's options, for the commands that a queue may have.
JOBS_OF: dict[str, JobsOf] = {
    "sweep": sweep_jobs,
    "reproduce": lambda **options: table_cells(**options)[0],
}


@app.command(rich_help_panel=SEARCH)
@naming_origins
def sweep(
    recipe: RecipeName,
    axes: Annotated[
        list[str],
        typer.Option(
            "--grid",
            metavar="SECTION.KEY=V,V...",
            help="Values of a key. Several --grid options give every combination.",
        ),
    ],
    settings: SettingsOption = None,
    seeds: SeedsOption = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the runs. Default: runs/sweep-RECIPE, or runs/NAME for an archive NAME."
        ),
    ] = None,
    jobs: AtOnce = None,
    track: TrackOption = None,
    reference: Reference = None,
    target_accuracy: TargetOption = None,
    data_root: DataRoot = None,
    on: On = "local",
    cores: Cores = 1,
    gpus: Gpus = 0.0,
    archive: ArchiveFolder = None,
    rerun: Rerun = False,
    quiet: QuietOption = False,
) -> None:
    """Run a grid of settings and seeds in parallel, and compare the results.

    Use it to study the effect of a few settings. Finished runs are skipped and stopped runs are
    resumed: after Ctrl-C or a kill, give the same command again.

    Examples
    --------
    fedgist sweep demo --grid method.name=fedlog,fedavg,local --grid train.lr=1e-3,1e-2 --seeds 5
    """
    path = find_recipe(recipe)
    # sweeps of one recipe may differ in settings that are not in the names of their cells
    out = out or Path("runs") / (archive.name if archive else f"sweep-{path.stem}")
    live = live_sender(track, out)
    todo = sweep_jobs(recipe, axes, settings, seeds, out)
    if not quiet:
        for note in notes_on([job.recipe for job in todo]):
            say(note, error=True)
    kept = Archive(archive, out, same_runs()) if archive else None
    machines = Machines(on, jobs, cores, gpus, data_root)
    failed = do_jobs(todo, len(todo), machines, quiet=quiet, archive=kept, rerun=rerun, live=live)
    raise_failures(failed, at_least=len(todo))
    goal = None if target_accuracy is None else target_accuracy / 100
    runs = run_reader.find(_places(todo, kept))
    study = comparison.study(runs, reference=reference, target_accuracy=goal)
    console().print(table_formats.render(study, "terminal"))
    raise_failures(failed)


@app.command(rich_help_panel=SEARCH)
@naming_origins
def privacy(
    context: typer.Context,
    recipe: RecipeOrDemo = None,
    settings: SettingsOption = None,
    epsilons: Annotated[
        str | None,
        typer.Option(metavar="EPSILON,...", help="Budgets to run, such as 0.5,1,3,8."),
    ] = None,
    seeds: SeedsOption = 3,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: runs/privacy-RECIPE.")
    ] = None,
    jobs: AtOnce = None,
    data_root: DataRoot = None,
    quiet: QuietOption = False,
) -> None:
    """Say what a privacy budget means; with --epsilons, run the recipe with each and draw the cost.

    Use it to choose a budget in a simulation. On real rows each point is a release, and they add
    up.

    Examples
    --------
    fedgist privacy
    fedgist privacy p.toml --epsilons 0.5,1,3,8
    """
    shown = console()
    if epsilons is None:
        refuse_unread(context, "without --epsilons", ())
        for sheet in privacy_words.screen():
            shown.print(SheetView(sheet))
        for text in privacy_words.QUESTIONS:
            shown.print(words(f"- {text}"))
        return
    path = find_recipe(recipe)
    out = out or Path("runs") / f"privacy-{path.stem}"
    base = read(path, settings or [])
    if base.privacy.unit == "none":
        raise RecipeError(
            f"{path} has no privacy: state privacy.unit, privacy.delta and privacy.clip, in the "
            "recipe or by --set; fedgist privacy says how to choose them"
        )
    todo = grid(path, settings or [], [f"privacy.epsilon={epsilons}"], seeds, out)
    if not quiet:
        for note in notes_on([job.recipe for job in todo]):
            say(note, error=True)
    without = base.changed({"privacy": PrivacySection()})
    todo += jobs_of_seeds("without privacy", without, seeds, out / "without-privacy")
    machines = Machines("local", jobs, 1, 0.0, data_root)
    failed = do_jobs(todo, len(todo), machines, quiet=quiet)
    raise_failures(failed, at_least=len(todo))
    study = comparison.study(run_reader.find([job.folder for job in todo]))
    columns = ("final", "interval", "epsilon", "seeds")
    shown.print(table_formats.render(study, "terminal", columns))
    for epsilon in sorted({row.epsilon for row in study.rows if row.epsilon is not None}):
        shown.print(words(privacy_words.in_words(epsilon, base.privacy.unit)))
    drawing.write([varied.over(study, "privacy.epsilon")], out)
    shown.print(words(f"drawn in {out / 'over-privacy.epsilon.png'}"))
    raise_failures(failed)


@app.command(rich_help_panel=SEARCH)
@naming_origins
def tune(
    recipe: RecipeName,
    space: Annotated[
        str,
        typer.Option(
            help='TOML: ["train.lr"] low = 1e-4, high = 0.1, log = true; or choices = []. '
            "A file, or a space that comes with fedgist, such as codistillation/merged_codist."
        ),
    ],
    trials: Annotated[
        int, typer.Option(min=1, help="Number of trials, including those of earlier calls.")
    ] = 20,
    settings: SettingsOption = None,
    seeds: SeedsOption = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study. Default: runs/tune-RECIPE.")
    ] = None,
    jobs: AtOnce = None,
    track: TrackOption = None,
    data_root: DataRoot = None,
    on: On = "local",
    cores: Cores = 1,
    gpus: Gpus = 0.0,
    quiet: QuietOption = False,
) -> None:
    """Search hyper-parameters with Optuna on validation data only; bad trials are stopped early.

    If the recipe holds out no validation data, a fifth of each client's training rows is held out.
    After Ctrl-C or a kill, the same command resumes the study. The recipe with the best settings is
    written to best.toml. Under privacy, trials are random and run to their end, and report noisy
    max chooses the best trial with the privacy budget tune.epsilon.

    Examples
    --------
    fedgist tune demo --space space.toml --trials 30
    """
    path = find_recipe(recipe)
    out = out or Path("runs") / f"tune-{path.stem}"
    live = live_sender(track, out)
    with storing(out):
        tuner = Tuner(path, settings or [], find_space(space), out, seeds)
        if tuner.private:
            _say_how(track, quiet=quiet)
        for note in tuner.notes if not quiet else ():
            say(f"! {note}", error=True)
        failed = do_jobs(
            tuner.jobs(trials),
            None,
            Machines(on, jobs, cores, gpus, data_root),
            quiet=quiet,
            listener=tuner.listen,
            before=tuner.jobs_before(),
            metric=tuner.column,
            live=live,
        )
        if not tuner.finished:  # there is nothing to compare, and the failures say why
            raise_failures(failed)
        if not tuner.private and (folders := tuner.folders()):
            _print_trials(folders, tuner)
        print_best(tuner, out)
    raise_failures(failed)


def _say_how(track: Sequence[str] | None, *, quiet: bool) -> None:
    """Say how a private search chooses; refuse to send the scores of its trials."""
    if track:
        raise ReportError(
            "--track: trackers would get the scores of all trials, which the privacy budget "
            "tune.epsilon does not cover"
        )
    if not quiet:
        say(HOW, error=True)


def print_best(tuner: Tuner, out: Path) -> None:
    """Print the best trial and its ties, and write the recipe with the best settings."""
    screen = console()
    best, best_recipe = tuner.best(), tuner.best_recipe()
    if best is None or best_recipe is None:
        screen.print(words("no trial is complete"))
        return
    atomic_files.write(out / BEST, best_recipe.to_toml())
    score = score_text(best[1], tuner.metric)
    trials = f"best of {tuner.finished} trials on validation data"
    how = "by report noisy max over correct rows" if tuner.private else score
    screen.print(words(f"{trials}, {how}: {_settings(best[0])}"))
    if tuner.private:
        screen.print(words(f"{tuner.promise()}; {NOT_COVERED.format(out=out)}"))
    elif ties := tuner.ties():
        more = f", and {len(ties) - MOST_TIES} more" if len(ties) > MOST_TIES else ""
        others = "; ".join(map(_settings, ties[:MOST_TIES]))
        screen.print(words(f"! a tie: as good, {score}, are {others}{more}; the first was taken"))
    command = shlex.join(["fedgist", "run", str(out / BEST), "--seeds", "5"])
    screen.print(words(command, "dim"))


def _settings(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in params.items())


def _print_trials(folders: Sequence[Path], tuner: Tuner) -> None:
    runs = run_reader.find(folders)
    for problem in run_reader.problems_of(runs):
        say(f"! {problem}", error=True)
    if not any(run.usable for run in runs):
        return
    trials = comparison.study(runs, metric=tuner.column)
    sign = -1 if tuner.metric.better == "higher" else 1
    scored = [row for row in trials.rows if row.final]
    best_first = sorted(scored, key=lambda row: sign * row.final.mean if row.final else 0.0)
    best_first += [row for row in trials.rows if not row.final]
    results = tables.result_sheet(replace(trials, rows=tuple(best_first)))
    console().print(table_formats.in_words([results], [], "terminal"))


@app.command(rich_help_panel=SEARCH)
def reproduce(
    context: typer.Context,
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="A paper's table, such as fedlog/table1, or all: the queue."
        ),
    ],
    scale: Annotated[
        str, typer.Option(help="small (for two cores) or paper (the paper's settings).")
    ] = "small",
    column: Annotated[
        list[str] | None, typer.Option(help="Only this experiment; may be given several times.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this method; may be given several times.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of seeds. Default: the table's at this scale."),
    ] = None,
    settings: SettingsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: runs/TABLE-SCALE.")
    ] = None,
    jobs: AtOnce = None,
    track: TrackOption = None,
    form: Annotated[
        str, typer.Option("--format", help="terminal, markdown or latex.")
    ] = "terminal",
    data_root: DataRoot = None,
    on: On = "local",
    cores: Cores = 1,
    gpus: Gpus = 0.0,
    archive: ArchiveFolder = None,
    rerun: Rerun = False,
    quiet: QuietOption = False,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda: short for --set engine.device=...")
    ] = "auto",
    queue: Annotated[Path, typer.Option(help="With all: the queue's file.")] = QUEUE,
    hours: Annotated[
        float | None,
        typer.Option(min=0.0, help="With all: begin only what fits 1.5 times into these hours."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="With all: show what is done, running and left.")
    ] = False,
) -> None:
    """Run every cell of a paper's table, and print fedgist's numbers next to the paper's.

    Use it to check an implementation against its paper. After Ctrl-C or a kill, give the same
    command again. With all in place of a table, it works through a queue of experiments at low
    priority: what the archive beside the queue lacks is run and added, in the queue's order.

    Examples
    --------
    fedgist reproduce fedlog/table1 --column mnist
    fedgist reproduce all --hours 8
    """
    if table == ALL:
        refuse_unread(context, "with all: the queue states what it runs, and how", OF_QUEUE)
        given = QueueOptions(queue, archive, out, hours, plan, device, jobs, data_root, quiet)
        run_queue(given, JOBS_OF)
        return
    refuse_unread(context, "with one table", set(context.params) - {"queue", "hours", "plan"})
    path = find_table(table)
    chosen_form = REPRODUCE_FORMATS[one_of(form, REPRODUCE_FORMATS, "format")]
    parsed = read_paper_table(path)
    out = out or Path("runs") / f"{path.parent.name}-{path.stem}-{scale}"
    live = live_sender(track, out)
    settings = [*(settings or []), *([] if device == "auto" else [f"engine.device={device}"])]
    todo, recipes = table_cells(table, scale, column, method, seeds, settings, out)
    if not quiet:
        _say_budgets(todo)
    kept = Archive(archive, out, same_runs()) if archive else None
    machines = Machines(on, jobs, cores, gpus, data_root)
    failed = do_jobs(todo, len(todo), machines, quiet=quiet, archive=kept, rerun=rerun, live=live)
    raise_failures(failed, at_least=len(todo))
    studies = _studies_by_column(todo, failed, recipes, parsed.table.reference, kept)
    sheets = side_by_side(studies, recipes, parsed.table.methods, parsed.table.source)
    notes = [f"{name}: {note}" for name, column in studies.items() for note in column.notes]
    _print(table_formats.in_words(sheets, list(dict.fromkeys(notes)), chosen_form))
    raise_failures(failed)


def _print(table: str | Group) -> None:
    if isinstance(table, str):
        sys.stdout.write(table)
    else:
        console().print(table)


def _places(jobs: Sequence[Job], archive: Archive | None) -> list[Path]:
    """Return the folder to read each job's run from: its own, or the archive's."""
    return [archive.found(job) if archive else job.folder for job in jobs]


def _column(job: Job) -> str:
    """Return the experiment of a paper's table that a cell's run belongs to."""
    return job.folder.parents[1].name


def _say_budgets(jobs: Sequence[Job]) -> None:
    """Print the total privacy budget that the runs of each experiment spend."""
    for name in dict.fromkeys(map(_column, jobs)):
        for note in notes_on([job.recipe for job in jobs if _column(job) == name]):
            say(f"{name}: {note}", error=True)


def _studies_by_column(
    jobs: Sequence[Job],
    failed: Collection[str],
    recipes: Mapping[str, Recipe],
    reference: str | None,
    archive: Archive | None,
) -> dict[str, Study]:
    """Return a study of each column's runs, unless all ``failed``.

    A reference that was not run is ignored.
    """
    methods = {job.folder.parent.name for job in jobs}
    studies = {}
    for name, recipe in recipes.items():
        goal = recipe.paper.target_accuracy
        column = [job for job in jobs if _column(job) == name]
        if all(job.name in failed for job in column):
            continue  # the reasons are named at the end
        runs = run_reader.find(_places(column, archive))
        studies[name] = comparison.study(
            runs,
            reference=reference if reference in methods else None,
            target_accuracy=None if goal is None else goal / 100,
        )
    return studies
