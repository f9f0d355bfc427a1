"""How fedgist's own processes behave: their torch threads, their memory, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import wait

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt, from malloc.h


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, as workers do: the same bits, and faster for small nets."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_memory() -> None:
    """Make the C library keep freed memory instead of returning it to the system at each step.

    The page faults that follow cost more than some layers do. Only workers call this, and it has an
    effect with glibc alone.
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
    """Wait until the parent process ends, even if it is killed, and end this process then."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)
