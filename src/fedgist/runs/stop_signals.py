"""Ctrl-C and SIGTERM: the first lets a run save and stop, the second stops it at once."""

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
    """Yield a function that returns whether a signal has asked to stop.

    ``first`` is called at the first signal; at the second one, ``second`` is called and
    KeyboardInterrupt raised. Outside the main thread, which alone may catch signals, the function
    always returns False.
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
