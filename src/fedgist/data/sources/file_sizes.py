"""What files claim to hold, compared with their own size and the machine's memory before reading.

A file of a few kilobytes can promise, or unpack to, more than any machine has. What it promises is
refused in one line; what is read is read in pieces, never past the promise.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fedgist.errors import DataError, exhausted, first_line

_PIECE = 1 << 20  # bytes read at a time: a promise alone allocates nothing
_SMALL = 64 << 20  # bytes that are unpacked however far they were packed
_MOST_TIMES = 100  # data that unpack to more than this many times their size hold almost nothing
_GROUP_LIMITS = (  # of a container on Linux, by the two versions of control groups
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def usable_memory() -> int:
    """Return how many bytes data, or stacks of clients, may take: half of the memory there is.

    That is the machine's, or what its container may use.
    """
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not on every system
        whole = 8 << 30
    for limit in _GROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or the word "max"
            whole = min(whole, int(limit.read_text()))
    return whole // 2


def check_memory(size: int, what: str, advice: str = "") -> None:
    """Raise DataError if ``what`` would take more bytes than data may."""
    if size > (most := usable_memory()):
        raise DataError(
            f"{what} would take {_in_words(size)}; half of this machine's memory is "
            f"{_in_words(most)}{advice and '; '}{advice}"
        )


def check_packing(packed: int, size: int, what: str, advice: str) -> None:
    """Raise DataError if ``packed`` bytes unpack to so many that they are no data worth packing."""
    if size > max(_SMALL, _MOST_TIMES * packed):
        raise DataError(
            f"{what} is {_in_words(packed)} that unpack to {_in_words(size)}, more than "
            f"{_MOST_TIMES} times as much; if that is meant, {advice}"
        )


def read_up_to(stream: IO[bytes], size: int) -> bytearray:
    """Read ``size`` bytes, or all that there are, a piece at a time."""
    content = bytearray()
    while len(content) < size and (piece := stream.read(min(_PIECE, size - len(content)))):
        content += piece
    return content


def regular(path: Path) -> Path:
    """Return ``path`` if it is an ordinary file: opening a pipe would wait for ever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise DataError(f"{path} does not exist") from error
    if stat.S_ISREG(mode):
        return path
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise DataError(f"{path} is {kind}, not a file")


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn what the system cannot do into a DataError of one line that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{what} cannot be read: {first_line(error)}") from error
    except (MemoryError, RuntimeError) as error:
        if (lacking := exhausted(error)) is None:
            raise
        raise DataError(f"{what} cannot be read: {lacking}") from error


def _in_words(size: int) -> str:
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    power = min((len(str(size)) - 1) // 3, len(units) - 1)
    return f"{size / 1000**power:.3g} {units[power]}" if size < 10**18 else f"{size:.0e} bytes"
