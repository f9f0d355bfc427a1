"""Control of fedgist's own processes: torch's threads, the memory allocator, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize

import torch

from fedgist.engines.stop_signals import ignore_stops, stops_held

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt, from malloc.h


@contextlib.contextmanager
def as_workers_do() -> Iterator[None]:
    """Run torch with the workers' settings: the same bits, and faster for small nets."""
    threads, flushed = torch.get_num_threads(), _flushes_denormals()
    set_up_torch()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushed)


def set_up_torch() -> None:
    """Run torch on one thread, and treat numbers below 1e-38 as zero.

    When clients have fitted their few rows, gradients and Adam's second moments become so small
    that a processor needs many steps for each operation: a round of FedLog's MNIST experiment took
    twice as long after 80 rounds as after 10.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run torch on ``count`` threads: for work of the server, while workers are idle."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flushes_denormals() -> bool:
    """Return whether this thread treats the smallest numbers as zero: torch has no query."""
    return not bool(torch.tensor(1e-40) * 1.0)


def start_forked(process: BaseProcess) -> None:
    """Start a process that calls ``begin_forked``; it is killed at the end of this process.

    Python would end it with SIGTERM, which it ignores, and wait for it.
    """
    with stops_held():
        process.start()
    Finalize(None, process.kill, exitpriority=0)


def begin_forked(parents_ends: Sequence[Connection]) -> None:
    """Prepare a forked process: signals, torch's threads, and its end with the parent's.

    ``parents_ends`` are the ends of pipes that the parent had open when it forked.
    """
    # forking copied the parent's ends: a closed end is noticed only when all copies are closed
    for end in parents_ends:
        end.close()
    ignore_stops()  # they reach all processes: the parent decides
    threading.Thread(target=die_with_parent, daemon=True).start()
    set_up_torch()


def peak_bytes(*, of_ended: bool = False) -> int:
    """Return the peak memory of this process, or of the largest of its processes that ended."""
    kind = resource.RUSAGE_CHILDREN if of_ended else resource.RUSAGE_SELF
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(kind).ru_maxrss


def keep_memory() -> None:
    """Make the C library keep freed memory instead of returning it to the system at each step.

    The page faults after a return cost more time than some layers do. Only fedgist's own processes,
    workers and commands, call this function. It has an effect only with glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option, value in (
            (_TRIM_THRESHOLD, 2**31 - 1),
            (_TOP_PAD, 64 << 20),
            (_MMAP_THRESHOLD, 1 << 30),
        ):
            libc.mallopt(option, value)


def die_with_parent() -> None:
    """Wait until the parent process ends, even if it is killed, and then end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)
