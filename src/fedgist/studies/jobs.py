"""Run many jobs in parallel, one process each, in ordinary run directories.

Finished runs are skipped, and killed runs are resumed from their checkpoint. A process dies with
its parent. After Ctrl-C or SIGTERM every process finishes its round and saves it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fedgist.engines.process_control import die_with_parent, keep_memory
from fedgist.errors import DiskFullError, Interrupted, RecipeError, Stopped, exhausted
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import read
from fedgist.runs import atomic_files, runner
from fedgist.runs.corrections import computed_by, lacking
from fedgist.runs.record import (
    RECIPE,
    RESULT,
    ROUNDS,
    Line,
    is_over,
    read_lines,
    read_result,
)
from fedgist.runs.run_seals import seal_of
from fedgist.runs.stop_signals import stoppable
from fedgist.studies.archive import Archive
from fedgist.studies.job import Event, Job, Listener, difference
from fedgist.world.server_context import ServerContext

AGAIN = "--rerun does it again"


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


def is_stale(folder: Path) -> bool:
    """Return whether a folder holds a finished run that lacks a correction that applies to it."""
    result = read_result(folder)
    recipe = read(folder / RECIPE).model_dump(mode="json") if result else {}
    return bool(lacking(recipe, computed_by(result)))


def run_jobs(
    jobs: Iterable[Job],
    at_once: int,
    listener: Listener,
    data_root: Path | None = None,
    archive: Archive | None = None,
    *,
    rerun: bool = False,
) -> None:
    """Run the jobs, ``at_once`` at a time; the next job is taken when a process is free.

    ``listener`` is called with every event of every job. Jobs in the archive are not run again, and
    each job that ends is added to the archive. A job whose files do not match their seal fails;
    with ``rerun`` it is run again.
    """
    processes = _Processes(iter(jobs), at_once, listener, data_root, archive, rerun=rerun)
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
        data_root: Path | None,
        archive: Archive | None,
        *,
        rerun: bool,
    ) -> None:
        self.todo, self.at_once, self.listener, self.data_root = todo, at_once, listener, data_root
        self.archive, self.rerun = archive, rerun
        self.running: dict[Connection, _JobProcess] = {}
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
            process = _JobProcess(job, self.data_root, anew=bool(broken))
            self.running[process.connection] = process

    def wait_for_event(self) -> None:
        """Wait until a process sends an event, and hand it to the listener."""
        for ready in wait(list(self.running)):
            assert isinstance(ready, Connection)  # only connections were waited for
            process = self.running[ready]
            event = process.next_event()
            if self._tell(process.job, event):
                process.stop()
            if event.kind in {"done", "stopped", "failed"}:
                del self.running[ready]
                process.join()

    def _tell(self, job: Job, event: Event) -> bool:
        """Hand an event to the listener; archive the job's run first if the job is done."""
        if self.archive and event.kind == "done":
            self.archive.add(job)
        return self.listener(job, event)

    def stop(self) -> None:
        """Start no more jobs, and let the running jobs save and stop."""
        self.closed = True
        for process in list(self.running.values()):
            process.stop()

    def kill(self) -> None:
        """Kill the processes at once; their checkpoints stay."""
        for process in list(self.running.values()):
            process.kill()


class _JobProcess:
    """A process that runs one job."""

    def __init__(self, job: Job, data_root: Path | None, *, anew: bool = False) -> None:
        self.job, self.stopped = job, False
        if anew or not (job.folder / RECIPE).exists():
            atomic_files.write(job.folder / RECIPE, job.recipe.to_toml())
        fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
        context: Any = fork if sys.platform.startswith("linux") else spawn
        self.connection, child_end = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_do, args=(job.folder, data_root, child_end), kwargs={"anew": anew}
        )
        self.process.start()
        child_end.close()

    def next_event(self) -> Event:
        """Wait for the process's next event and return it; a dead process is a failed job."""
        try:
            event: Event = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            text = (
                f"its process died with exit code {self.process.exitcode}; if memory ran out, "
                "lower --jobs"
            )
            return Event("failed", text=text)
        return event

    def stop(self) -> None:
        """Ask the process once to save and stop."""
        if not self.stopped:
            self.stopped = True
            self.process.terminate()

    def kill(self) -> None:
        """Kill the process at once."""
        self.process.kill()

    def join(self) -> None:
        """Wait for the end of the process."""
        self.connection.close()
        self.process.join()


class _EventSender:
    """Sends the parent an event for each step of the run."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def began(self, server: ServerContext, folder: str, done: int) -> None:
        """Send the number of rounds that are already done."""
        del server, folder
        self.connection.send(Event("began", line={"round": done}))

    def finished_round(self, line: Line) -> None:
        """Send the round's line."""
        self.connection.send(Event("round", line=line))

    def note(self, text: str) -> None:
        """Send a note."""
        self.connection.send(Event("note", text=text))


def _do(folder: Path, data_root: Path | None, connection: Connection, *, anew: bool) -> None:
    """Run the recipe in ``folder`` on one core, from its checkpoint if there is one."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches only the parent, which passes it on
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    keep_memory()
    try:
        recipe = read(folder / RECIPE)
        settings = {"engine.workers": 1}
        if recipe.engine.server_threads == "auto":
            settings["engine.server_threads"] = 1
        anew = anew or is_stale(folder)
        runner.run(
            recipe.changed(settings),
            Overrides(root=data_root),
            _EventSender(connection),
            folder=folder,
            resume=not anew,
            overwrite=anew,
        )
        connection.send(Event("done"))
    except Stopped:
        connection.send(Event("stopped"))
    except KeyboardInterrupt:
        connection.send(Event("stopped"))
    except DiskFullError as full:
        connection.send(Event("failed", text=full.reason))
    except Exception as error:  # noqa: BLE001  # the parent reports every error
        text = exhausted(error) or f"{type(error).__name__}: {error}"
        connection.send(Event("failed", text=text))
