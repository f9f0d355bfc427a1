"""Processes of this machine that run jobs, one each. A process dies with its parent."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fedgist.engines.process_control import die_with_parent, keep_memory
from fedgist.engines.stop_signals import STOPS, end_at_stops, stops_held
from fedgist.errors import DiskFullError, Stopped, exhausted
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import read
from fedgist.runs import runner
from fedgist.runs.files import atomic_files
from fedgist.runs.files.record import RECIPE, RECIPE_MARK, STATE, Line, read_result
from fedgist.runs.files.run_directory import check_own_files
from fedgist.runs.files.seals import header_of
from fedgist.runs.round import Observer
from fedgist.runs.versions import goes_on, is_current
from fedgist.studies.job import Event, Job, Running
from fedgist.world.server_context import ServerContext


class OnThisMachine:
    """The cores of this machine."""

    def __init__(self, data_root: Path | None = None) -> None:
        self.data_root = data_root

    def begin(self, job: Job, *, anew: bool) -> JobProcess:
        """Begin or resume a job, or do it again from its start."""
        return JobProcess(job, self.data_root, anew=anew)

    def wait(self, running: Sequence[Running]) -> list[Running]:
        """Wait until some jobs have an event, and return these."""
        processes = {p.connection: p for p in running if isinstance(p, JobProcess)}
        ready = wait(list(processes))
        return [process for connection, process in processes.items() if connection in ready]

    def close(self) -> None:
        """Do nothing: every process has been joined or killed."""


class JobProcess:
    """A process of this machine that runs one job."""

    def __init__(
        self,
        job: Job,
        data_root: Path | None,
        *,
        anew: bool = False,
        cores: int = 1,
        may_fork: bool = True,
    ) -> None:
        self.job, self.stopped = job, False
        may_fork = may_fork and _can_be_forked(job)
        write_recipe(job, anew=anew)
        fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
        context: Any = fork if may_fork else spawn
        self.connection, child_end = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_do,
            args=(job.folder, data_root, child_end),
            kwargs={"anew": anew, "cores": cores},
        )
        with stops_held():
            self.process.start()
        child_end.close()

    def next_event(self) -> Event:
        """Wait for the process's next event and return it; a dead process is a failed job."""
        try:
            event: Event = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            if -(self.process.exitcode or 0) in STOPS:
                return Event("stopped")  # it had not begun
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


def write_recipe(job: Job, *, anew: bool) -> None:
    """Write the recipe of a job that begins into its folder, unless the job is to be resumed."""
    check_own_files(job.folder)
    if anew or not (job.folder / RECIPE).exists():
        atomic_files.write(job.folder / RECIPE, job.recipe.to_toml() + RECIPE_MARK)


def _can_be_forked(job: Job) -> bool:
    """Return whether a forked process can do a job: a GPU cannot be used by a fork of its user."""
    uses_cuda = job.recipe.engine.device != "cpu" and torch.version.cuda is not None
    return sys.platform.startswith("linux") and not uses_cuda


def is_stale(folder: Path) -> bool:
    """Return whether a folder holds a finished or stopped run of an earlier version."""
    result = read_result(folder)
    recipe = read(folder / RECIPE)
    if not result:
        try:
            begun = header_of(folder).get("inputs") if (folder / STATE).exists() else None
        except (OSError, ValueError, RecursionError):
            return False  # the run itself says what is wrong with its checkpoint
        return isinstance(begun, dict) and not goes_on(recipe.method.name, begun)
    return not is_current(recipe.method.name, result)


class _EventSender(Observer):
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


def _do(
    folder: Path, data_root: Path | None, connection: Connection, *, anew: bool, cores: int
) -> None:
    """Run the recipe in ``folder`` on some cores, from its checkpoint if there is one."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches only the parent, which passes it on
    end_at_stops()
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    keep_memory()
    try:
        recipe = read(folder / RECIPE)
        settings = {"engine.workers": cores}
        if recipe.engine.server_threads == "auto":
            settings["engine.server_threads"] = 1
        if not anew and is_stale(folder):
            anew = True
            connection.send(Event("note", text=f"{folder} is of an earlier version: begun again"))
        runner.run(
            recipe.changed(settings),
            Overrides(root=data_root),
            _EventSender(connection),
            folder=folder,
            resume=not anew,
            overwrite=anew,
        )
        connection.send(Event("done"))
    except (Stopped, KeyboardInterrupt):
        connection.send(Event("stopped"))
    except DiskFullError as full:
        connection.send(Event("failed", text=full.reason))
    except Exception as error:  # noqa: BLE001  # the parent reports every error
        text = exhausted(error) or f"{type(error).__name__}: {error}"
        connection.send(Event("failed", text=text))
