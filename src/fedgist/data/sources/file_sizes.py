"""Check the sizes that files declare against their real size and the machine's memory.

A file of a few kilobytes can declare, or unpack to, more data than any machine can hold. Such a
file is refused with a one-line error. Data are read in pieces, never beyond the declared size.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import stat
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from fedgist.errors import DataError, exhausted, first_line

_PIECE = 1 << 20  # bytes read at a time: a declared size allocates no memory
_SMALL = 64 << 20  # up to this number of bytes is unpacked at any compression ratio
_MOST_TIMES = 100  # largest compression ratio: data with a larger one are almost empty
_GROUP_LIMITS = (  # memory limits of a Linux container, in versions 2 and 1 of control groups
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


class MissingFileError(DataError):
    """A file or a folder does not exist; ``path`` is its path as stated."""

    def __init__(self, message: str, path: Path = Path()) -> None:
        super().__init__(message)
        self.path = path


def missing(path: Path) -> MissingFileError:
    """Return the error that names a path, and the folder from which it was looked for."""
    place = "" if path.is_absolute() else f" in {Path.cwd()}"
    return MissingFileError(f"{path} does not exist{place}", path)


def usable_memory() -> int:
    """Return the number of bytes that data or stacks of clients may use: half of the memory.

    The memory is the machine's, or the limit of its container or of this process.
    """
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not available on every system
        whole = 8 << 30
    for limit in _GROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or the word "max"
            whole = min(whole, int(limit.read_text()))
    return min(whole, *_process_limits()) // 2


def _process_limits() -> list[int]:
    """Return the limits of this process on its memory in bytes; at least one number."""
    if find_spec("resource") is None:  # not available on every system
        return [sys.maxsize]
    resource = importlib.import_module("resource")
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return [limit if limit != resource.RLIM_INFINITY else sys.maxsize for limit in limits]


def fits(size: int, share: int = 1) -> bool:
    """Return whether ``size`` bytes fit in the usable memory divided by ``share``."""
    return size <= usable_memory() // share


def check_memory(size: int, subject: str, advice: str = "") -> None:
    """Raise DataError if ``size`` bytes for ``subject`` exceed the usable memory."""
    if size > (most := usable_memory()):
        raise DataError(
            f"{subject} would take {in_words(size)}; half of this machine's memory is "
            f"{in_words(most)}{advice and '; '}{advice}"
        )


def check_packing(packed: int, size: int, subject: str, advice: str) -> None:
    """Raise DataError if unpacking ``packed`` bytes to ``size`` has an implausible ratio."""
    if size > max(_SMALL, _MOST_TIMES * packed):
        raise DataError(
            f"{subject} is {in_words(packed)} that unpack to {in_words(size)}, more than "
            f"{_MOST_TIMES} times as much; if that is meant, {advice}"
        )


def read_up_to(stream: IO[bytes], size: int) -> bytearray:
    """Read up to ``size`` bytes, one piece at a time."""
    content = bytearray()
    while len(content) < size and (piece := stream.read(min(_PIECE, size - len(content)))):
        content += piece
    return content


def regular(path: Path) -> Path:
    """Return ``path`` if it is a regular file: opening a pipe would block forever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise missing(path) from error
    if stat.S_ISREG(mode):
        return path
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    raise DataError(f"{path} is {kind}, not a file")


@contextlib.contextmanager
def readable(subject: str) -> Iterator[None]:
    """Turn system and memory errors into a one-line DataError that begins with ``subject``."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{subject} cannot be read: {first_line(error)}") from error
    except (MemoryError, RuntimeError) as error:
        if (lacking := exhausted(error)) is None:
            raise
        raise DataError(f"{subject} cannot be read: {lacking}") from error


def in_words(size: int) -> str:
    """Return a number of bytes with three digits and a unit.

    >>> in_words(3_210_000_000)
    '3.21 GB'
    """
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    power = min((len(str(size)) - 1) // 3, len(units) - 1)
    return f"{size / 1000**power:.3g} {units[power]}" if size < 10**18 else f"{size:.0e} bytes"
