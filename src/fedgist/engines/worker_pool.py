"""Forked worker processes with one torch thread each, which get one task at a time.

Torch's own threads make small nets slower; a process per core makes them faster. Forking gives
every worker the data and the clients' memory without a copy, and only messages need be picklable.
Results come back in the order of the tasks, so they do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.core.tree import map_leaves
from fedgist.engines.process_control import (
    as_workers_do,
    begin_forked,
    keep_memory,
    start_forked,
)
from fedgist.engines.reader_pool import ReaderPool
from fedgist.errors import FedgistError, RecipeError, WorkerError, exhausted

Work = Callable[[Any], Any]


def default_workers(device: str) -> int:
    """Return one worker per core; one on a GPU, or if processes cannot be forked safely."""
    return 1 if device != "cpu" or not _can_fork() else usable_cores()


def _can_fork() -> bool:
    """Return whether processes can be forked safely, and Python lets this process start others."""
    return sys.platform.startswith("linux") and not multiprocessing.current_process().daemon


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform.startswith("linux"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_readers(workers: int) -> int:
    """Return the number of readers of each worker: none if each core has a worker."""
    if not _can_fork():
        return 0
    each = -(-usable_cores() // max(1, workers))
    return 0 if each == 1 else each


class WorkerPool:
    """A pool that runs a function on tasks: in this process, or in several forked workers."""

    def __init__(self, work: Work, size: int, readers: ReaderPool | None = None) -> None:
        """Make a pool of ``size`` workers, which read rows with these readers."""
        self.work, self.size, self.readers = work, size, readers or ReaderPool((), 0)
        self.workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, tasks: Sequence[Any]) -> list[Any]:
        """Return the results of the tasks, in their order."""
        if self.size == 1:
            with as_workers_do():
                return [self.work(task) for task in tasks]
        if not self.workers:
            self.start()
        results: list[Any] = [None] * len(tasks)
        todo = iter(enumerate(tasks))
        busy: dict[Any, int] = {}
        for _, connection in self.workers:
            self._next(connection, todo, busy)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)  # nothing else was waited for
                results[busy.pop(ready)] = self._result(ready)
                self._next(ready, todo, busy)
        return results

    def start(self) -> None:
        """Fork the readers, and the workers if there are several."""
        self.readers.start(self.size)
        if self.size == 1:
            self.readers.use(0)
        if self.size == 1 or self.workers:
            return
        if multiprocessing.current_process().daemon:
            raise RecipeError(
                f"engine.workers = {self.size}: a process of a multiprocessing.Pool starts no "
                "others; use engine.workers = 1, or concurrent.futures.ProcessPoolExecutor"
            )
        fork = multiprocessing.get_context("fork")
        with warnings.catch_warnings():
            # Python warns that a forked child could hang on a lock of another thread; ours only
            # computes, on one thread.
            warnings.simplefilter("ignore", DeprecationWarning)
            for number in range(self.size):
                parent_end, worker_end = fork.Pipe()
                process = fork.Process(
                    target=_serve,
                    args=(
                        self.work,
                        worker_end,
                        [*(c for _, c in self.workers), parent_end],
                        functools.partial(self.readers.use, number),
                    ),
                    daemon=True,
                )
                start_forked(process)
                worker_end.close()
                self.workers.append((process, parent_end))

    def close(self) -> None:
        """End the workers and the readers."""
        self.readers.close()
        for process, connection in self.workers:
            connection.close()
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self.workers = []

    def _next(
        self, connection: Connection, todo: Iterator[tuple[int, Any]], busy: dict[Any, int]
    ) -> None:
        for index, task in todo:
            # a dead worker is noticed by the wait for its result
            with contextlib.suppress(OSError):
                connection.send_bytes(_dump(task))
            busy[connection] = index
            return

    def _result(self, connection: Connection) -> Any:
        try:
            good, value = _load(connection.recv_bytes())
        except (EOFError, OSError) as error:
            process = next(p for p, c in self.workers if c is connection)
            process.join(timeout=5)
            self.close()
            raise WorkerError(
                f"a worker process died (exit code {process.exitcode}); if memory ran out, lower "
                "engine.workers or engine.cohort_size"
            ) from error
        if not good:
            self.close()
            raise value if isinstance(value, FedgistError) else WorkerError(value)
        return value


def _serve(
    work: Work,
    connection: Connection,
    parents_ends: Sequence[Connection],
    begin: Callable[[], None],
) -> None:
    """Call ``begin``, and run tasks until the other end is closed."""
    begin_forked(parents_ends)
    keep_memory()
    begin()
    while True:
        try:
            task = _load(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            connection.send_bytes(_dump(attempt(work, task)))
        except OSError:
            os._exit(0)


def attempt(work: Callable[..., object], *arguments: object) -> tuple[bool, object]:
    """Call a function for another process; return whether it succeeded, and its result or error."""
    try:
        return True, work(*arguments)
    except FedgistError as error:  # about a row, say
        return False, error
    except Exception as error:  # noqa: BLE001  # whatever it is, the other process reports it
        return False, exhausted(error) or traceback.format_exc()


def _dump(value: object) -> bytes:
    """Pickle a value for another of fedgist's own processes.

    Tensors are sent as arrays, because torch would send file handles.
    """
    return pickle.dumps(
        map_leaves(lambda v: v.detach().cpu().numpy() if isinstance(v, Tensor) else v, value),
        protocol=5,
    )


def _load(blob: bytes) -> Any:
    value = pickle.loads(blob)  # noqa: S301  # written by our own forked process
    return map_leaves(lambda v: torch.from_numpy(v) if isinstance(v, np.ndarray) else v, value)
