"""A case of the fuzz suite: one door, one number, which decides everything about it.

A door makes something broken in an empty folder and hands it to fedgist. A case is good if fedgist
takes it, or refuses it in one printable line, soon and without much memory.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from commands import HANG_S
from fedgist.errors import FedgistError, InputError

MOST_MEMORY = 1 << 30  # by which a case may raise the peak: what it reads has kilobytes
ROOM = 6 << 30  # of addresses: what asks for more than this at once gets a MemoryError


class HungError(BaseException):
    """Not an Exception: nothing that fedgist catches."""


@dataclass(frozen=True)
class Door:
    """A way into fedgist, and how many of a thousand cases go through it."""

    name: str
    share: int
    enter: Callable[[Random, Path], None]


@dataclass(frozen=True)
class Outcome:
    """How fedgist took a case; of one that failed, what was wrong with that."""

    kind: Literal["taken", "refused", "failed"]
    text: str = ""


def outcome(door: Door, number: int, place: Path) -> Outcome:
    """Do a case in an empty folder."""
    before = peak()
    try:
        with no_longer_than(HANG_S), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            door.enter(Random(f"{door.name} {number}"), place)
    except FedgistError as error:
        if isinstance(error, InputError) and not str(error).isprintable():
            return Outcome("failed", f"more than one printable line: {error!r}")
        done = Outcome("refused", str(error))
    except HungError:
        return Outcome("failed", f"hung for {HANG_S:.0f} s:\n{traceback.format_exc()}")
    except Exception:  # noqa: BLE001  # this is what is looked for
        return Outcome("failed", traceback.format_exc())
    else:
        done = Outcome("taken")
    if peak() - before > MOST_MEMORY:
        return Outcome("failed", f"took {(peak() - before) >> 20} MB")
    return done


def peak() -> int:
    """Return the most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def little_room() -> Iterator[None]:
    """Let this process have so many more addresses, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
