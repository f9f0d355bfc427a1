"""How a process of ours behaves: its torch threads, its memory, its end with its parent."""

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
    """Tell the C library to keep freed memory, which it gives back and faults in at each step.

    Page faults cost more than some layers do. Only workers do this, and only with glibc; elsewhere
    nothing happens.
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
    """End this process with its parent, even one killed in the middle of a task."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    os._exit(1)
