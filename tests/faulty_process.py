"""fedgist's command line in a process that kills itself once, at a chosen point of its work."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMESPACE, NEW_NETWORK = "TEST_NETWORK_NAMESPACE", 0x40000000  # CLONE_NEWNET
#: What kills a process, by name: a module, a class in it, a function of the class, and the
#: purpose of a request, if it matters.
POINTS = {
    "site training": ("fedgist.engines.client_host", "ClientHost", "train", ""),
    "server updating": ("fedgist.runs.round", "ServerRun", "_update", ""),
    **{
        f"site at {step}": ("fedgist.wire.secure.site", "SecureSite", "_answer", step)
        for step in ("share", "mask", "confirm", "unmask")
    },
}


def run(words: list[str]) -> None:
    """Run fedgist with the words after the first three: a point, a round, a marker.

    The process is killed as by ``kill -9`` when it reaches the point in this round. It makes the
    file called as the marker before, and a process that has this file is not killed.
    """
    if space := os.environ.get(NAMESPACE):
        enter(space)
    point, number, marker, *sys.argv[1:] = words
    sys.argv[0] = "fedgist"
    if point:
        module, owner, name, purpose = POINTS[point]
        kind = getattr(importlib.import_module(module), owner)
        setattr(kind, name, killing(getattr(kind, name), int(number), Path(marker), purpose))
    importlib.import_module("fedgist.cli.main").main()


def enter(space: str) -> None:
    """Move this process into a network namespace."""
    with Path("/run/netns", space).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def killing(
    function: Callable[..., Any], number: int, marker: Path, purpose: str = ""
) -> Callable[..., Any]:
    """Return a function that kills the process in a round, instead of being called."""

    def killed(*given: Any, **named: Any) -> Any:
        rounds = [getattr(value, "round", None) for value in given[1:]]
        asked = not purpose or purpose in [getattr(value, "purpose", None) for value in given[1:]]
        if number in rounds and asked and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    return killed
