"""Run jobs and show their progress: bars in a terminal, one line per finished job in a pipe."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn

from fedgist.cli.shared_options import same_command
from fedgist.core.objectives.metrics import CHOSEN_METRICS, LOSS, Metric, name_in_columns
from fedgist.errors import Interrupted, JobsError, RecipeError, one_of, printable
from fedgist.report.formatting import duration, score_text
from fedgist.report.terminal.console import column, console, say, words
from fedgist.report.tracking.job_tracking import JobTracking
from fedgist.report.tracking.sending import LiveSender
from fedgist.report.tracking.tracker_names import trackers
from fedgist.runs.files.columns import of_main
from fedgist.runs.files.record import Line
from fedgist.studies.archive import Archive
from fedgist.studies.job import ENDS, Event, Job, Listener, Places


@dataclass(frozen=True)
class Machines:
    """Where jobs run, as the options say; without ``at_once``, as many as there is room for."""

    on: str
    at_once: int | None
    cores: int
    gpus: float
    data_root: Path | None

    def places(self) -> tuple[Places, int]:
        """Return the places of the jobs, and the number of jobs at once.

        Raises
        ------
        InputError
            If the options contradict each other, or there is no such place.
        """
        from fedgist.engines.worker_pool import default_workers
        from fedgist.studies.job_process import OnThisMachine

        if one_of(self.on, ("local", "ray"), "--on") == "local":
            if (self.cores, self.gpus) != (1, 0.0):
                raise RecipeError("--cores and --gpus are for --on ray: here a run has one core")
            return OnThisMachine(self.data_root), self.at_once or default_workers("cpu")
        try:
            from fedgist.studies.ray_jobs import OnRay, Slot
        except ModuleNotFoundError as error:
            raise RecipeError("--on ray needs Ray: pip install 'fedgist[ray]'") from error
        cluster = OnRay(Slot(self.cores, self.gpus), self.data_root)
        return cluster, self.at_once or cluster.number


def do_jobs(
    jobs: Iterable[Job],
    count: int | None,
    machines: Machines,
    *,
    quiet: bool,
    listener: Listener | None = None,
    metric: str = "",
    archive: Archive | None = None,
    rerun: bool = False,
    before: Iterable[Job] = (),
    live: LiveSender | None = None,
) -> dict[str, str]:
    """Run the jobs and show their progress; return the names of failed jobs with the reasons.

    ``rerun`` repeats jobs whose files do not match their seal; without it those jobs fail.
    ``metric`` is the column to show, by default the column of each job's main metric. ``live``
    sends the jobs' rounds to trackers. Jobs that ran ``before`` must have had the same data.
    """
    # it loads torch, which --help and the check of a recipe do not need
    from fedgist.studies.jobs import fault_of, is_done, run_jobs

    failed: dict[str, str] = {}
    listed_jobs = jobs if isinstance(jobs, list) else []
    for note in dict.fromkeys(note for job in listed_jobs for note in job.recipe.dropped):
        say(note, error=True)
    for job in listed_jobs:
        # a folder with another run is refused before any job starts
        if not fault_of(job, archive) and not (archive and archive.holds(job)):
            is_done(job)
    tracker = JobTracking(live or LiveSender({}, None, say))
    with display(count, metric, quiet=quiet) as show, contextlib.closing(tracker.live):

        def on_event(job: Job, event: Event) -> bool:
            show(job, event)
            tracker(job, event)
            if event.kind == "failed":
                failed[job.name] = event.text
            return listener(job, event) if listener else False

        try:
            places, number = machines.places()
            run_jobs(jobs, number, on_event, places, archive, rerun=rerun, before=before)
        except Interrupted:
            raise Interrupted(
                f"stopped; what was running is saved; go on with: {same_command()}"
            ) from None
    return failed


def live_sender(track: Sequence[str] | None, out: Path) -> LiveSender:
    """Return what sends the rounds of jobs in ``out`` to trackers; check the trackers."""
    return LiveSender(trackers(track), out, functools.partial(say, error=True))


def raise_failures(failed: Mapping[str, str], at_least: int = 1) -> None:
    """Raise JobsError if ``at_least`` jobs failed; jobs with the same reason share a line."""
    if len(failed) < max(1, at_least):
        return
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in failed.items():
        names_by_reason.setdefault(reason, []).append(name)
    lines = [f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
    head = f"{len(failed)} run{'s' if len(failed) > 1 else ''} failed:"
    raise JobsError("\n".join([head, *lines, f"go on with: {same_command()}"]))


@contextlib.contextmanager
def display(count: int | None, metric: str, *, quiet: bool) -> Iterator[Listener]:
    """Yield a listener that shows the jobs' events on standard error."""
    screen = console(stderr=True)
    if quiet:
        yield lambda _job, _event: False
    elif screen.is_terminal:
        columns = (
            column("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            column("{task.fields[score]}"),
        )
        with Progress(*columns, TimeElapsedColumn(), console=screen) as progress:
            yield _Bars(progress, count, metric)
    else:
        yield _Lines(count, metric)


def job_score(job: Job, line: Line | None, metric: str) -> str:
    """Return a job's score in a round's line, or an empty text.

    It is the column ``metric``, or the job's main metric. A user's own metric has no unit here,
    because its code is not loaded.
    """
    main = name_in_columns(next(iter(job.recipe.objective.metrics), LOSS.name))
    measure = CHOSEN_METRICS.get(main, Metric(main, main, "", "higher"))
    columns = (metric,) if metric else of_main(main)
    value = next((line[name] for name in columns if line and name in line), None)
    return "" if value is None else score_text(value, measure)


class _Lines:
    """Prints one line for each job that ends."""

    def __init__(self, count: int | None, metric: str) -> None:
        self.metric = metric
        self.of, self.ended = "" if count is None else f"/{count}", 0
        self.scores: dict[str, str] = {}
        self.began: dict[str, float] = {}

    def __call__(self, job: Job, event: Event) -> bool:
        self.began.setdefault(job.name, time.perf_counter())
        if text := job_score(job, event.line, self.metric):
            self.scores[job.name] = text
        if event.kind in ENDS:
            self.ended += 1
            reached = ""
            if job.name in self.scores:
                took = duration(time.perf_counter() - self.began[job.name])
                reached = f" {self.scores[job.name]} {took}"
            text = f": {event.text}" if event.text else ""
            line = f"[{self.ended}{self.of}] {job.name} {event.kind}{reached}{text}"
            say(line, error=True)
        return False


class _Bars:
    """Shows a bar for all jobs, and one for each running job."""

    def __init__(self, progress: Progress, count: int | None, metric: str) -> None:
        self.progress, self.metric = progress, metric
        self.whole = progress.add_task("all runs", total=count, score="")
        self.bars: dict[str, TaskID] = {}

    def __call__(self, job: Job, event: Event) -> bool:
        if job.name not in self.bars:
            rounds = job.recipe.train.num_rounds
            self.bars[job.name] = self.progress.add_task(
                printable(job.name), total=rounds, score=""
            )
        bar = self.bars[job.name]
        if event.line:
            self.progress.update(bar, completed=event.line["round"])
            if text := job_score(job, event.line, self.metric):
                self.progress.update(bar, score=text)
        if event.kind in ENDS:
            self.progress.remove_task(bar)
            self.progress.advance(self.whole)
            if event.kind == "failed":
                self.progress.console.print(words(f"{job.name}: {event.text}", "red"))
        return False
