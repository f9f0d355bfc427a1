"""The queue of results: experiments in order of value, and which of their runs comes next.

A queue is a TOML file beside an archive. Each experiment has the command that makes its runs, the
number of cells of a paper's tables that it fills, and the cost of one run in rounds of workload W2
(``bench/workloads.py``), so that hours can be told on any machine.
"""

from __future__ import annotations

import shutil
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fedgist.core.bounds import NonNegativeInt, Positive, PositiveInt
from fedgist.errors import DataError, RecipeError, first_line
from fedgist.options import checked
from fedgist.runs.files import atomic_files
from fedgist.runs.files.record import ROUNDS, read_lines
from fedgist.runs.files.run_directory import is_held
from fedgist.studies.archive import Archive
from fedgist.studies.job import Event, Job

QUEUE = Path("docs/results/queue.toml")
ROUND_S = {"cpu": 2.8, "cuda": 0.1}  # seconds of a round of W2: of one core, and of an H200
SPARE = 1.5  # a run begins if it fits so many times into the time that is left
MOST_CUT = 20_000_000  # bytes of an unfinished run that is kept beside the queue


class Experiment(BaseModel):
    """Some runs of the queue.

    ``of`` names the page and the experiment that shows them. ``seeds`` are fewer than the command
    has: the others come later in the queue. ``gpu`` says that they want a GPU. Runs with ``cut``
    may begin although their time is not left: an unfinished one is kept beside the queue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    of: str
    command: str
    cells: NonNegativeInt = 0
    cost: Positive
    seeds: PositiveInt | None = None
    gpu: bool = False
    cut: bool = False


class _Queue(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    experiments: tuple[Experiment, ...]


def read_queue(path: Path) -> tuple[Experiment, ...]:
    """Return the experiments of a queue's file; RecipeError if it cannot be used."""
    if not path.is_file():
        raise RecipeError(f"--queue {path}: no such file; a checkout of fedgist has {QUEUE}")
    try:
        queue: _Queue = checked(_Queue, tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: {first_line(error)}") from error
    return queue.experiments


@dataclass(frozen=True)
class Run:
    """A run of an experiment."""

    job: Job
    of: Experiment

    def cost(self) -> float:
        """Return the rounds of W2 that the rest of the run costs."""
        done = _rounds_done(self.job)
        return self.of.cost * max(0.0, 1 - done / max(1, self.job.recipe.train.num_rounds))


def _rounds_done(job: Job) -> int:
    lines = read_lines(job.folder / ROUNDS)
    return int(lines[-1]["round"]) if lines else 0


def in_order(
    experiments: Iterable[Experiment],
    jobs_of: Callable[[Experiment], Sequence[Job]],
    *,
    on_gpu: bool,
) -> list[Run]:
    """Return all runs: what wants a GPU first on a GPU and last without, else as the file has them.

    All methods of an experiment have their first seed before one has its second.
    """
    ordered = sorted(experiments, key=lambda of: of.gpu != on_gpu)
    runs: dict[Path, Run] = {}
    for of in ordered:
        jobs = jobs_of(of)
        first = min((job.recipe.seed for job in jobs), default=0)
        for job in sorted(jobs, key=lambda job: job.recipe.seed):
            if of.seeds is None or job.recipe.seed < first + of.seeds:
                runs.setdefault(job.folder, Run(job, of))
    return list(runs.values())


def split(runs: Iterable[Run], archive: Archive) -> tuple[list[Run], list[Run], list[str]]:
    """Return the runs that the archive holds, those that it lacks, and the faults of others."""
    held: list[Run] = []
    lacking: list[Run] = []
    problems: list[str] = []
    for run in runs:
        if fault := archive.fault(run.job):
            problems.append(fault)
            continue
        try:
            (held if archive.holds(run.job) else lacking).append(run)
        except (RecipeError, DataError) as error:
            problems.append(str(error))
    return held, lacking, problems


@dataclass
class Clock:
    """The time that is left, and this machine's speed, learned from the rounds that it does."""

    hours: float | None
    round_s: float  # of W2, until there is better
    began: float = field(default_factory=time.monotonic)
    spent_s: float = 0.0
    spent_cost: float = 0.0
    since: dict[Path, float] = field(default_factory=dict)

    def left_s(self) -> float:
        """Return the seconds that are left."""
        if self.hours is None:
            return float("inf")
        return self.began + self.hours * 3600 - time.monotonic()

    def seconds(self, cost: float) -> float:
        """Return how long a cost takes on one core of this machine."""
        return cost * (self.spent_s / self.spent_cost if self.spent_cost else self.round_s)

    def fits(self, run: Run) -> bool:
        """Return whether a run may begin."""
        left = self.left_s()
        return left > 0 and (run.of.cut or SPARE * self.seconds(run.cost()) <= left)

    def saw(self, run: Run, event: Event) -> None:
        """Learn from the time of a round."""
        now, folder = time.monotonic(), run.job.folder
        if event.kind == "round":
            self.spent_s += now - self.since.get(folder, now)
            rounds = run.job.recipe.train.num_rounds
            self.spent_cost += run.of.cost / max(1, rounds) if folder in self.since else 0.0
        if event.kind in {"began", "round"}:
            self.since[folder] = now


def next_jobs(waiting: list[Run], clock: Clock, cut: CutRuns) -> Iterator[Job]:
    """Yield jobs as there is room for one: the first of those that wait that fits into the time."""
    while run := next(filter(clock.fits, waiting), None):
        waiting.remove(run)
        cut.restore(run)
        yield run.job


@dataclass(frozen=True)
class CutRuns:
    """Unfinished runs of an experiment with ``cut``: beside the queue, to go on anywhere."""

    folder: Path
    runs: Path

    def place(self, run: Run) -> Path:
        """Return where an unfinished run is kept."""
        return self.folder / run.job.folder.relative_to(self.runs)

    def restore(self, run: Run) -> None:
        """Bring a kept run into its folder, if it has more rounds than what is there."""
        kept = self.place(run)
        here = len(read_lines(run.job.folder / ROUNDS))
        if kept.is_dir() and len(read_lines(kept / ROUNDS)) > here:
            shutil.rmtree(run.job.folder, ignore_errors=True)
            shutil.copytree(kept, run.job.folder)

    def keep(self, run: Run) -> str:
        """Keep an unfinished run; return why it is not kept, or an empty text."""
        files = [path for path in run.job.folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        if size > MOST_CUT:
            return f"{run.job.folder} has {size / 1e6:.0f} MB: only here can it go on"
        place = self.place(run)
        part = place.with_name(f".{place.name}.part")
        with atomic_files.room_for(place):
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(run.job.folder, part)
            shutil.rmtree(place, ignore_errors=True)
            part.rename(place)
        return ""

    def remove(self, run: Run) -> None:
        """Remove a run that has ended, and the folders that this leaves empty."""
        shutil.rmtree(self.place(run), ignore_errors=True)
        for above in self.place(run).parents:
            if above == self.folder.parent or not above.is_dir() or any(above.iterdir()):
                break
            above.rmdir()


@dataclass(frozen=True)
class Progress:
    """How many runs an experiment has, are archived, run now and were begun, and what is left."""

    of: Experiment
    runs: int
    done: int
    running: int
    begun: int
    cost: float


def progress(held: Sequence[Run], lacking: Sequence[Run]) -> list[Progress]:
    """Return the progress of each experiment, in the order of its first run that lacks."""
    rows = []
    for of in dict.fromkeys(run.of for run in [*lacking, *held]):
        left = [run for run in lacking if run.of is of]
        done = sum(run.of is of for run in held)
        running = [run for run in left if is_held(run.job.folder)]
        begun = sum(_rounds_done(run.job) > 0 and run not in running for run in left)
        cost = sum(run.cost() for run in left)
        rows.append(Progress(of, len(left) + done, done, len(running), begun, cost))
    return rows
