"""Ctrl-C, SIGTERM and SIGHUP: the first signal saves and stops a run, the second stops it at once.

``timeout``, ``systemctl stop``, schedulers and closed terminals signal every process of a group, so
a process that another of fedgist's processes ends ignores these signals.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AS_ONE_S = 1.0  # timeout and shells send a signal twice: seconds in which signals count as one


@contextlib.contextmanager
def stoppable(
    first: Callable[[], None], second: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a stop signal has arrived.

    ``first`` is called at the first signal. At a signal that is more than a second later,
    ``second`` is called and KeyboardInterrupt is raised. Only the main thread can catch signals; in
    other threads the function always returns False. A SIGTERM or SIGHUP that is ignored stays
    ignored: ``nohup`` does that.
    """
    received: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number: int, frame: Any) -> None:
        del frame
        if number == signal.SIGHUP:
            _leave_terminal()
        received.append(time.monotonic())
        if len(received) == 1:
            first()
        elif received[-1] - received[0] > AS_ONE_S:
            second()
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in _heeded()}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of the stop signals, which Ray replaces when it connects."""
    before = {number: signal.getsignal(number) for number in STOPS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def interrupt() -> None:
    """Do what Ctrl-C does in Python."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def stops_held() -> Iterator[None]:
    """Let stop signals wait while a process is forked, which has this process's handlers first.

    The new process calls ``ignore_stops`` or ``end_at_stops``, with which its signals arrive.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stops() -> None:
    """Ignore the stop signals from now on: another process decides, or this one is ending."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def end_at_stops() -> None:
    """End this process at a stop signal from now on, until a run catches them."""
    for number in _heeded():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _heeded() -> list[signal.Signals]:
    """Return the stop signals that this process was not started to ignore.

    A shell without job control ignores SIGINT for commands in the background, and ``kill -INT``
    stops them all the same.
    """
    ignored = [n for n in STOPS if n != signal.SIGINT and signal.getsignal(n) == signal.SIG_IGN]
    return [number for number in STOPS if number not in ignored]


def _leave_terminal() -> None:
    """Write to nowhere in place of a closed terminal: a failed message would end the run."""
    for stream in range(3):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
