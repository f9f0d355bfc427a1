"""fedgist's command line in a process that kills itself once, at a chosen point of its work."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What kills a process, by name: a module, a class in it, a function of the class.
POINTS = {
    "site training": ("fedgist.engines.client_host", "ClientHost", "train"),
    "server updating": ("fedgist.runs.round", "Federation", "_update"),
}


def run(words: list[str]) -> None:
    """Run fedgist with the words after the first three: a point, a round, a marker.

    The process is killed as by ``kill -9`` when it reaches the point in this round. It makes the
    file called as the marker before, and a process that has this file is not killed.
    """
    point, number, marker, *sys.argv[1:] = words
    sys.argv[0] = "fedgist"
    if point:
        module, owner, name = POINTS[point]
        kind = getattr(importlib.import_module(module), owner)
        setattr(kind, name, killing(getattr(kind, name), int(number), Path(marker)))
    importlib.import_module("fedgist.cli.main").main()


def killing(function: Callable[..., Any], number: int, marker: Path) -> Callable[..., Any]:
    """Return a function that kills the process in a round, instead of being called."""

    def killed(*given: Any, **named: Any) -> Any:
        rounds = [getattr(value, "round", None) for value in given[1:]]
        if number in rounds and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    return killed
