"""Jobs on the machines of a Ray cluster. Each has a slot: some cores, and a share of a GPU.

A job runs in a folder of its machine. Whenever it has saved a checkpoint, its files are collected
into the job's folder here. So a job whose machine dies goes on elsewhere from that checkpoint, and
after a kill of this process the same command goes on.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from fedgist.engines.ray_cluster import Connection, check_versions, versions
from fedgist.engines.sharded_engine import Value
from fedgist.errors import FedgistError, RecipeError, first_line
from fedgist.recipe.reading import Recipe, read
from fedgist.runs.files import atomic_files
from fedgist.runs.files.record import RECIPE, RESULT, STATE
from fedgist.runs.files.run_directory import LOCK, locked
from fedgist.studies.job import ENDS, Event, Job, Running
from fedgist.studies.job_process import JobProcess, write_recipe

LIVES = 3  # how often a job is begun in all, if its machines die
PATIENCE_S = 0.5  # seconds of waiting before signals are looked at
Files = dict[str, bytes]  # contents by path in a job's folder


@dataclass(frozen=True)
class Slot:
    """What each job has of a machine: whole cores, and a share of a GPU."""

    cores: int = 1
    gpus: float = 0.0


class OnRay:
    """The slots of a Ray cluster."""

    def __init__(self, slot: Slot, data_root: Path | None = None) -> None:
        """Connect to the cluster of ``RAY_ADDRESS``, or start one on this machine."""
        self.slot, self.data_root = slot, data_root
        self.connection = Connection()

    @property
    def number(self) -> int:
        """The number of jobs that the cluster has room for at once."""
        room = self.connection.room(self.slot.cores, self.slot.gpus)
        if not room:
            needs = f"--cores {self.slot.cores} --gpus {self.slot.gpus:g}"
            raise RecipeError(f"{needs}: no machine of the Ray cluster has room for such a run")
        return room

    def begin(self, job: Job, *, anew: bool) -> RayJob:
        """Begin or resume a job, or do it again from its start."""
        if job.recipe.engine.name == "ray":
            raise RecipeError(
                f"{job.name}: engine.name = 'ray' spreads one run, and --on ray many: choose one"
            )
        return RayJob(job, self.slot, self.data_root, anew=anew)

    def wait(self, running: Sequence[Running]) -> list[Running]:
        """Wait a moment for events of some jobs, and return the jobs that have any."""
        jobs = {job.answer: job for job in running if isinstance(job, RayJob)}
        ready, _ = ray.wait(list(jobs), num_returns=1, timeout=PATIENCE_S)
        return [jobs[answer] for answer in ready]

    def close(self) -> None:
        """Leave the cluster."""
        self.connection.close()


class RayJob:
    """A job on some machine of the cluster."""

    def __init__(self, job: Job, slot: Slot, data_root: Path | None, *, anew: bool) -> None:
        self.job, self.slot, self.data_root, self.lives = job, slot, data_root, LIVES
        self.stopping = False
        write_recipe(job, anew=anew)
        self.lock = ExitStack()
        self.lock.enter_context(locked(job.folder))
        self._begin(anew=anew)

    def _begin(self, *, anew: bool) -> None:
        files = read_files(self.job.folder)
        self.kept = {name: _digest(blob) for name, blob in files.items()}
        if anew:
            files = {RECIPE: files[RECIPE]}
        place: Value = ray.remote(Place).options(
            num_cpus=self.slot.cores, num_gpus=self.slot.gpus, max_concurrency=2
        )
        self.actor = place.remote()
        arguments = self.job.name, files, self.data_root, self.slot.cores
        begun = self.actor.begin.remote(versions(), *arguments, anew=anew)
        self.answer = self.actor.next.remote(begun)

    def next_event(self) -> Event:
        """Wait for the next event and return it; collect the job's files if it has saved them."""
        try:
            event: Event
            event, files = ray.get(self.answer)
        except RayTaskError as error:
            is_ours = isinstance(error.cause, FedgistError)
            return Event("failed", text=str(error.cause if is_ours else error))
        except RayError as error:
            return self._lost(first_line(error))
        if files is not None:
            self._collect(files)
        if event.kind not in ENDS:
            self.answer = self.actor.next.remote()
        return event

    def _lost(self, why: str) -> Event:
        """Begin again where the job was last collected, if it has not died too often."""
        self.lives -= 1
        if self.stopping:
            return Event("stopped")
        if not self.lives:
            return Event("failed", text=f"its process died {LIVES} times ({why})")
        self._begin(anew=False)
        return Event("note", text=f"{self.job.name}: its process died; it goes on elsewhere")

    def _collect(self, files: Files) -> None:
        """Write a job's files, so that at any moment they are those of a run that was killed."""
        last = [str(STATE), RESULT]  # whoever resumes trusts the checkpoint
        digests = {name: _digest(blob) for name, blob in files.items()}
        for name in sorted(files, key=lambda n: last.index(n) if n in last else -1):
            if self.kept.get(name) != digests[name]:
                atomic_files.write(self.job.folder / name, files[name])
        for name in self.kept.keys() - files.keys():
            (self.job.folder / name).unlink(missing_ok=True)
        self.kept = digests

    def stop(self) -> None:
        """Ask the job once to save and stop."""
        if not self.stopping:
            self.stopping = True
            self.actor.stop.remote()

    def kill(self) -> None:
        """Kill the job at once."""
        self.join()

    def join(self) -> None:
        """Give the slot back."""
        ray.kill(self.actor)
        self.lock.close()


class Place:
    """A slot of the cluster: it runs one job in a folder of its own, and says what happens."""

    def __init__(self) -> None:
        self.process: JobProcess | None = None
        self.stopping = False

    def begin(
        self,
        versions_there: Mapping[str, str],
        name: str,
        files: Files,
        data_root: Path | None,
        cores: int,
        *,
        anew: bool,
    ) -> None:
        """Write the job's files here, and begin it."""
        check_versions(versions_there)
        self.scratch = Path(tempfile.mkdtemp(prefix="fedgist-job-"))
        write_files(self.scratch, files)
        self.saved = self._checkpoint()
        recipe: Recipe = read(self.scratch / RECIPE)
        job = Job(name, recipe, self.scratch)
        # threads run here, and a fork would copy their locks
        self.process = JobProcess(job, data_root, anew=anew, cores=cores, may_fork=False)
        if self.stopping:  # meanwhile
            self.process.stop()

    def next(self, begun: None = None) -> tuple[Event, Files | None]:
        """Return the next event, and the job's files if it has saved a checkpoint since."""
        del begun  # it is waited for
        assert self.process is not None
        event = self.process.next_event()
        ended, saved = event.kind in ENDS, self._checkpoint()
        if not ended and saved == self.saved:
            return event, None
        self.saved, files = saved, read_files(self.scratch)
        if ended:
            self.process.join()
            shutil.rmtree(self.scratch, ignore_errors=True)
        return event, files

    def stop(self) -> None:
        """Ask the job to save and stop, also if it has not begun yet."""
        self.stopping = True
        if self.process is not None:
            self.process.stop()

    def _checkpoint(self) -> tuple[int, int] | None:
        path = self.scratch / STATE
        if not path.exists():
            return None
        facts = path.stat()
        return facts.st_mtime_ns, facts.st_ino


def _digest(blob: bytes) -> bytes:
    return hashlib.sha256(blob).digest()


def read_files(folder: Path) -> Files:
    """Return the files of a run's folder, by their paths in it, without locks and unfinished ones.

    The checkpoint is read first: what it is bound to is complete.
    """
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = [str(path.relative_to(folder)) for path in paths]
    names.sort(key=lambda name: name != str(STATE))
    kept = [n for n in names if n != str(LOCK) and not Path(n).name.startswith(".")]
    return {name: (folder / name).read_bytes() for name in kept}


def write_files(folder: Path, files: Files) -> None:
    """Write the files of a run's folder."""
    for name, blob in files.items():
        atomic_files.write(folder / name, blob, durable=False)
