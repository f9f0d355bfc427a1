"""Many runs side by side, a process each, in ordinary run directories.

What is done is skipped; what was killed goes on from its checkpoint; a child dies with its parent.
Ctrl-C and SIGTERM let every child finish and save its round.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

from fedgist.engines.worker_pool import die_with_parent, keep_memory
from fedgist.errors import RecipeError
from fedgist.federation import atomic_files as files
from fedgist.federation import runner as api
from fedgist.federation.recipe import Recipe, read
from fedgist.federation.record import RECIPE, RESULT, ROUNDS, Line, read_lines
from fedgist.federation.stop_signals import stoppable
from fedgist.federation.world import World


@dataclass(frozen=True)
class Job:
    """One run to be done: what it is called, its recipe, its folder."""

    name: str
    recipe: Recipe = field(repr=False)
    folder: Path


@dataclass(frozen=True)
class Event:
    """What a job says.

    It began, did a round, or ended; ``text`` says how it failed, or is a note of it.
    """

    kind: Literal["began", "round", "note", "done", "stopped", "failed"]
    line: Line | None = None
    text: str = ""


Hear = Callable[[Job, Event], bool]  # return True to have the job stop after its round


class Interrupted(Exception):  # noqa: N818  # no error: somebody asked
    """All jobs were stopped and saved; the same command goes on."""


def is_done(job: Job) -> bool:
    """Whether the job's folder holds the finished run.

    Raises
    ------
    RecipeError
        If it holds another run: other settings.
    """
    if not (job.folder / RECIPE).exists():
        return False
    old = read(job.folder / RECIPE)
    if _bare(old) != _bare(job.recipe):
        here, there = _bare(job.recipe), _bare(old)
        section = next(name for name in here if here[name] != there[name])
        msg = (
            f"{job.folder} holds a run with other settings in [{section}]; choose another --out, "
            "or remove it"
        )
        raise RecipeError(msg)
    lines = read_lines(job.folder / ROUNDS) if (job.folder / RESULT).exists() else []
    return bool(lines) and lines[-1]["round"] >= old.train.num_rounds


def _bare(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(exclude={"engine", "paper"})


def run_jobs(jobs: Iterable[Job], at_once: int, hear: Hear, data_root: Path | None = None) -> None:
    """Do the jobs, ``at_once`` at a time; ``jobs`` is asked for the next one when there is room.

    Raises
    ------
    Interrupted
        After Ctrl-C or SIGTERM, when every running job has saved its round.
    """
    crowd = _Crowd(iter(jobs), at_once, hear, data_root)
    try:
        with stoppable(crowd.stop, crowd.kill) as stopping:
            while crowd.fill():
                crowd.listen()
            if stopping():
                raise Interrupted
    finally:  # whatever went wrong here, no child goes on alone
        crowd.kill()


class _Crowd:
    """The children at work, and the jobs to come."""

    def __init__(
        self, todo: Iterator[Job], at_once: int, hear: Hear, data_root: Path | None
    ) -> None:
        self.todo, self.at_once, self.hear, self.data_root = todo, at_once, hear, data_root
        self.running: dict[Connection, _Child] = {}
        self.closed = False

    def fill(self) -> bool:
        """Start jobs while there is room; return whether any is running."""
        while (
            len(self.running) < self.at_once
            and not self.closed
            and (job := next(self.todo, None)) is not None
        ):
            if is_done(job):
                self.hear(job, Event("done"))
            else:
                child = _Child(job, self.data_root)
                self.running[child.connection] = child
        return bool(self.running)

    def listen(self) -> None:
        """Wait until some child says something, and hear it."""
        for ready in wait(list(self.running)):
            assert isinstance(ready, Connection)  # of all that can be waited for, these were
            child = self.running[ready]
            event = child.next_event()
            if self.hear(child.job, event):
                child.stop()
            if event.kind in {"done", "stopped", "failed"}:
                del self.running[ready]
                child.join()

    def stop(self) -> None:
        """Begin nothing more, and let the children save and stop."""
        self.closed = True
        for child in list(self.running.values()):
            child.stop()

    def kill(self) -> None:
        """End the children at once: their checkpoints stay."""
        for child in list(self.running.values()):
            child.process.kill()


class _Child:
    """A process that does one job."""

    def __init__(self, job: Job, data_root: Path | None) -> None:
        self.job, self.stopped = job, False
        if not (job.folder / RECIPE).exists():
            files.write(job.folder / RECIPE, job.recipe.to_toml())
        fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
        context: Any = fork if sys.platform.startswith("linux") else spawn
        self.connection, there = context.Pipe()
        self.process: BaseProcess = context.Process(target=_do, args=(job.folder, data_root, there))
        self.process.start()
        there.close()

    def next_event(self) -> Event:
        """Wait for what it says next; a process that died has failed."""
        try:
            event: Event = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return Event(
                "failed",
                text=f"its process died ({self.process.exitcode}); out of memory? lower --jobs",
            )
        return event

    def stop(self) -> None:
        """Ask it to save and stop, once."""
        if not self.stopped:
            self.stopped = True
            self.process.terminate()

    def join(self) -> None:
        """Wait for its end."""
        self.connection.close()
        self.process.join()


class _Teller:
    """Tells the parent how the run goes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def began(self, world: World, folder: str, done: int) -> None:
        """Say after which round it goes on."""
        del world, folder
        self.connection.send(Event("began", line={"round": done}))

    def finished_round(self, line: Line) -> None:
        """Send the round's line."""
        self.connection.send(Event("round", line=line))

    def note(self, text: str) -> None:
        """Send a note."""
        self.connection.send(Event("note", text=text))


def _do(folder: Path, data_root: Path | None, connection: Connection) -> None:
    """Do or go on with the run in ``folder``, on one core."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent alone, who passes it on
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    keep_memory()
    try:
        recipe = read(folder / RECIPE)
        alone = recipe.model_copy(
            update={"engine": recipe.engine.model_copy(update={"workers": 1})}
        )
        api.run(alone, out=folder, resume=True, data_root=data_root, observer=_Teller(connection))
        connection.send(Event("done"))
    except api.Stopped:
        connection.send(Event("stopped"))
    except KeyboardInterrupt:
        connection.send(Event("stopped"))
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent reports it
        connection.send(Event("failed", text=f"{type(error).__name__}: {error}"))
