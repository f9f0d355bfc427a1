"""The queue of results: its commands as runs, its plan, and the work on it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from typer.core import TyperGroup

from fedgist.cli.job_progress import Machines, do_jobs, raise_failures
from fedgist.cli.shared_options import app
from fedgist.errors import RecipeError, one_of
from fedgist.report.formatting import Sheet, duration
from fedgist.report.terminal import table_formats
from fedgist.report.terminal.console import console, say, words
from fedgist.studies.archive import Archive
from fedgist.studies.job import Event, Job
from fedgist.studies.queue import (
    ROUND_S,
    Clock,
    CutRuns,
    Experiment,
    Run,
    in_order,
    next_jobs,
    progress,
    read_queue,
    split,
)

ALL = "all"  # in place of a table's name
OUT = Path("runs/queue")
LEAST_PRIORITY = 19
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # of click, or of typer's copy of it
JobsOf = Callable[..., list[Job]]  # of a command's options, by name


@dataclass(frozen=True)
class QueueOptions:
    """What ``fedgist reproduce all`` is given."""

    file: Path
    archive: Path | None
    out: Path | None
    hours: float | None
    plan: bool
    device: str
    jobs: int | None
    data_root: Path | None
    quiet: bool


def jobs_of_command(command: str, kinds: dict[str, JobsOf], out: Path) -> tuple[list[Job], Path]:
    """Return the jobs of a command, and its archive; ``kinds`` makes jobs by the command's name.

    The jobs' folders are below ``out``. RecipeError if it is no command that makes runs.
    """
    program, name, *words = shlex.split(command, comments=True)
    commands = typer.main.get_command(app)
    assert isinstance(commands, TyperGroup)
    if program != "fedgist" or name not in kinds:
        raise RecipeError(f"{command}: expected fedgist {' or fedgist '.join(kinds)}")
    try:
        given = commands.commands[name].make_context(name, words).params
    except UsageError as error:
        raise RecipeError(f"{command}: {error}") from error
    if given["archive"] is None:
        raise RecipeError(f"{command}: it has no --archive")
    return kinds[name](**{**given, "out": out}), Path(given["archive"])


def run_queue(given: QueueOptions, kinds: dict[str, JobsOf]) -> None:
    """Do the runs of a queue that the archive lacks, or show only what is left."""
    from fedgist.engines.device_choice import usable_device  # these load torch
    from fedgist.engines.worker_pool import default_workers

    experiments = read_queue(given.file)
    device = one_of(given.device, ("auto", "cpu", "cuda"), "--device")
    on_gpu = usable_device(device) != "cpu"
    out, data = given.out or OUT, given.file.parent / "data"
    archive = Archive(given.archive or data, out)
    settings = {} if device == "auto" else {"engine.device": device}

    def jobs_of(of: Experiment) -> list[Job]:
        return _jobs(of, kinds, out, data, settings)

    held, lacking, problems = split(in_order(experiments, jobs_of, on_gpu=on_gpu), archive)
    clock = Clock(given.hours, ROUND_S["cuda" if on_gpu else "cpu"])
    at_once = given.jobs or default_workers("cpu")
    for problem in problems:
        say(f"! left out: {problem}", error=True)
    _show_plan(held, lacking, clock, at_once)
    if given.plan or not lacking:
        return
    if hasattr(os, "nice"):
        os.nice(LEAST_PRIORITY)
    machines = Machines("local", at_once, 1, 0.0, given.data_root)
    cut = CutRuns(given.file.with_suffix(""), out)
    failed = _work(lacking, clock, archive, cut, machines, given)
    held_now, left, _ = split(lacking, archive)
    _show_plan([*held, *held_now], left, replace(clock, hours=None), at_once)
    raise_failures(failed)


def _jobs(
    of: Experiment, kinds: dict[str, JobsOf], out: Path, data: Path, settings: Mapping[str, str]
) -> list[Job]:
    """Return the jobs of an experiment, each in the folder that its archive's file has."""
    _, archive = jobs_of_command(of.command, kinds, out)
    if not archive.is_relative_to(data):
        raise RecipeError(f"{of.command}: its --archive is not below {data}")
    jobs, _ = jobs_of_command(of.command, kinds, out / archive.relative_to(data))
    command = of.command.replace(f" --archive {archive}", "")
    return [
        Job(f"{of.of}: {job.name}", job.recipe.changed(settings), job.folder, command)
        for job in jobs
    ]


def _work(
    lacking: list[Run],
    clock: Clock,
    archive: Archive,
    cut: CutRuns,
    machines: Machines,
    given: QueueOptions,
) -> dict[str, str]:
    """Do runs until none is left or none fits; return those that failed."""
    runs = {run.job.folder: run for run in lacking}

    def on_event(job: Job, event: Event) -> bool:
        run = runs[job.folder]
        clock.saw(run, event)
        if event.kind == "done":
            cut.remove(run)
        elif event.kind == "stopped" and run.of.cut and (reason := cut.keep(run)):
            say(f"! {reason}", error=True)
        return clock.left_s() <= 0

    jobs, count, quiet = next_jobs(list(lacking), clock, cut), len(lacking), given.quiet
    return do_jobs(jobs, count, machines, quiet=quiet, listener=on_event, archive=archive)


def _show_plan(held: Sequence[Run], lacking: Sequence[Run], clock: Clock, at_once: int) -> None:
    """Print what is done, running and left of each experiment, with the time that it takes here."""
    rows, every = [], progress(held, lacking)
    for row in every:
        if row.done == row.runs:
            continue
        rows.append(
            (
                row.of.of,
                f"{row.done}/{row.runs}",
                str(row.running) if row.running else "-",
                str(row.begun) if row.begun else "-",
                duration(clock.seconds(row.cost) / at_once) if row.cost else "-",
                str(row.of.cells) if row.of.cells else "-",
                "yes" if row.of.gpu else "-",
            )
        )
    columns = ("experiment", "done", "running", "begun", "left", "cells", "GPU")
    caption = f"{len(held)} of {len(held) + len(lacking)} runs are in the archive"
    if not rows:
        console().print(words(caption))
        return
    left, whole = sum(row.cost for row in every), sum(row.of.cost * row.runs for row in every)
    (here, gpu), (all_here, all_gpu) = (
        (duration(clock.seconds(cost) / at_once), duration(cost * ROUND_S["cuda"]))
        for cost in (left, whole)
    )
    caption += (
        f"; the rest takes about {here} here, {at_once} runs at a time, or {gpu} on an H200, one "
        f"at a time. All runs would take {all_here}, or {all_gpu}. Not listed: "
        f"{len(every) - len(rows)} experiments that are complete"
    )
    sheet = Sheet("The queue of results", columns, tuple(rows), caption).filled()
    console().print(table_formats.in_words([sheet], [], "terminal"))
