"""Ctrl-C and SIGTERM: the first signal saves and stops a run, the second stops it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stoppable(
    first: Callable[[], None], second: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a stop signal has arrived.

    ``first`` is called at the first signal. At the second signal, ``second`` is called and
    KeyboardInterrupt is raised. Only the main thread can catch signals; in other threads the
    function always returns False.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number: int, frame: Any) -> None:
        del frame
        if received:
            second()
            raise KeyboardInterrupt
        received.append(number)
        first()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
