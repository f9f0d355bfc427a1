"""Run many jobs in parallel, in processes of this machine or of a cluster.

Finished runs are skipped, and killed runs are resumed from their checkpoint. After Ctrl-C,
SIGTERM or SIGHUP every process finishes its round and saves it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedgist.engines.stop_signals import stoppable
from fedgist.errors import Interrupted, RecipeError
from fedgist.recipe.reading import flat, read
from fedgist.runs.files.record import (
    RECIPE,
    RESULT,
    ROUNDS,
    STATE,
    is_over,
    read_lines,
    read_result,
)
from fedgist.runs.files.seals import header_of, seal_of
from fedgist.runs.resuming import HOW_READ
from fedgist.studies.archive import Archive
from fedgist.studies.job import ENDS, Event, Job, Listener, Places, Running, difference
from fedgist.studies.job_process import OnThisMachine, is_stale

AGAIN = "--rerun does it again"
DATA = "the data"  # in the inputs of a checkpoint
OF_NO_DATA = ("method.", "train.", "model.", "evaluate.")  # settings that data do not depend on


def is_done(job: Job) -> bool:
    """Return whether the job's folder holds its finished run."""
    if not (job.folder / RECIPE).exists():
        return False
    recipe = read(job.folder / RECIPE)
    if change := difference(job.recipe, recipe):
        raise RecipeError(
            f"{job.folder} holds a run with {change}; choose another --out, or remove it"
        )
    lines, result = read_lines(job.folder / ROUNDS), read_result(job.folder)
    done = bool(lines) and bool(result) and not is_stale(job.folder)
    return done and is_over(recipe.train.num_rounds, lines[-1]["round"], result)


def fault_of(job: Job, archive: Archive | None = None) -> str:
    """Return which file of a finished job does not match its seal, or an empty text.

    The job's archived file is checked if there is one, else its folder. A run without a result
    is not checked here: its checkpoint is checked when it is resumed.
    """
    if archive and archive.place(job).exists():
        return archive.fault(job)
    if not (job.folder / RESULT).exists():
        return ""
    seal = seal_of(job.folder)
    text = f"{job.folder} does not match its seal: {'; '.join(seal.problems)}"
    return text if seal.is_broken else ""


def _data_settings(job: Job) -> str:
    """Return the settings of a job on which its data may depend, as text."""
    settings = flat(job.recipe.settings()).items()
    kept = {key: value for key, value in settings if not key.startswith(OF_NO_DATA)}
    return json.dumps(kept, sort_keys=True, default=str)


def _digest_of_data(folder: Path) -> str | None:
    """Return the digest of a run's data, if its checkpoint has one.

    Of rows that are read lazily it covers the times of files, which a copy of the files changes.
    """
    try:
        inputs = header_of(folder).get("inputs") if (folder / STATE).exists() else None
    except (OSError, ValueError, RecursionError):
        return None  # the seal says what is wrong with it
    if not isinstance(inputs, dict) or HOW_READ in inputs:
        return None
    return inputs.get(DATA)


def run_jobs(
    jobs: Iterable[Job],
    at_once: int,
    listener: Listener,
    places: Places | None = None,
    archive: Archive | None = None,
    *,
    rerun: bool = False,
    before: Iterable[Job] = (),
) -> None:
    """Run the jobs, ``at_once`` at a time; the next job is taken when one of ``places`` is free.

    The places are by default the cores of this machine.

    ``listener`` is called with every event of every job. Jobs in the archive are not run again, and
    each job that ends is added to the archive. A job whose files do not match their seal fails;
    with ``rerun`` it is run again. Jobs that ran ``before`` are compared with, and not run.

    Raises
    ------
    RecipeError
        If the data changed between two runs whose settings have the same data.
    """
    places = places or OnThisMachine()
    processes = _Processes(iter(jobs), at_once, listener, places, archive, rerun=rerun)
    for job in before:
        processes.check_data(job)
    try:
        with stoppable(processes.stop, processes.kill) as stopping:
            while processes.start():
                processes.wait_for_event()
            if stopping():
                raise Interrupted
    finally:  # no process outlives an error above
        processes.kill()


class _Processes:
    """The running processes, and the jobs that wait."""

    def __init__(
        self,
        todo: Iterator[Job],
        at_once: int,
        listener: Listener,
        places: Places,
        archive: Archive | None,
        *,
        rerun: bool,
    ) -> None:
        self.todo, self.at_once, self.listener, self.places = todo, at_once, listener, places
        self.archive, self.rerun = archive, rerun
        self.running: list[Running] = []
        self.data: dict[str, tuple[Path, str]] = {}  # the first run, and its digest, by settings
        self.checked: set[Path] = set()
        self.closed = False

    def start(self) -> bool:
        """Start jobs until ``at_once`` are running; return whether any is running."""
        while (
            len(self.running) < self.at_once
            and not self.closed
            and (job := next(self.todo, None)) is not None
        ):
            self._begin(job)
        return bool(self.running)

    def _begin(self, job: Job) -> None:
        """Start a job; if it is already finished, check its files instead."""
        fault = fault_of(job, self.archive)
        if not fault and self.archive and self.archive.holds(job):
            self.listener(job, Event("done"))
            return
        broken = fault_of(job)
        if (fault or broken) and not self.rerun:
            self.listener(job, Event("failed", text=f"{fault or broken}; {AGAIN}"))
        elif not broken and is_done(job):
            self._tell(job, Event("done"))
        else:
            self.running.append(self.places.begin(job, anew=bool(broken)))
            if self.closed:  # a signal came while it began
                self.running[-1].stop()

    def wait_for_event(self) -> None:
        """Wait until a process sends an event, and hand it to the listener."""
        for process in self.places.wait(self.running):
            event = process.next_event()
            if self._tell(process.job, event):
                process.stop()
            if event.kind in ENDS:
                self.running.remove(process)
                process.join()

    def _tell(self, job: Job, event: Event) -> bool:
        """Hand an event to the listener; archive the job's run first if the job is done."""
        if event.kind in {"round", "done"}:
            self.check_data(job)
        if self.archive and event.kind == "done":
            self.archive.add(job)
        return self.listener(job, event)

    def check_data(self, job: Job) -> None:
        """Raise RecipeError if a job's run has other data than those before with its settings."""
        if job.folder in self.checked or (digest := _digest_of_data(job.folder)) is None:
            return
        self.checked.add(job.folder)
        folder, first = self.data.setdefault(_data_settings(job), (job.folder, digest))
        if digest != first:
            raise RecipeError(
                f"{folder} and {job.folder} were run on different data, which changed between "
                "them; choose another --out, or remove the runs on the old data"
            )

    def stop(self) -> None:
        """Start no more jobs, and let the running jobs save and stop."""
        self.closed = True
        for process in self.running:
            process.stop()

    def kill(self) -> None:
        """Kill the processes at once; their checkpoints stay."""
        while self.running:
            self.running.pop().kill()
        self.places.close()
