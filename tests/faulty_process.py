"""Run fedgist's command line in a process that kills itself once, at a chosen point of its work.

    python tests/faulty_process.py POINT ROUND MARKER ARGUMENTS...

The process is killed as by ``kill -9`` when it reaches POINT in round ROUND for the first time. It
then makes the file MARKER, and a process that has this file is not killed again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedgist.cli.main import main
from fedgist.engines.client_host import ClientHost
from fedgist.runs.round import Federation


def killing(function: Callable[..., Any], applies: Callable[..., bool], marker: Path) -> Any:
    """Return a function that kills the process instead of being called, the first time."""

    def killed(*given: Any, **named: Any) -> Any:
        if applies(*given) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    return killed


def prepare(point: str, number: int, marker: Path) -> None:
    """Replace the function of a point by one that kills."""
    if point == "site training":
        ClientHost.train = killing(  # type: ignore[method-assign]
            ClientHost.train,
            lambda _, sent: sent.round == number,
            marker,
        )
    elif point == "server updating":
        Federation._update = killing(  # type: ignore[method-assign]
            Federation._update, lambda _, replies, ctx, record: ctx.round == number, marker
        )
    else:
        raise ValueError(point)


if __name__ == "__main__":
    sys.argv, (place, at, mark) = ["fedgist", *sys.argv[4:]], sys.argv[1:4]
    prepare(place, int(at), Path(mark))
    main()
