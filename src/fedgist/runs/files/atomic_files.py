"""Files that are written whole or not at all, and files to which lines are appended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedgist.errors import FULL, DiskFullError, OutputError

OWNER_ONLY, OWNER_ENTERS = 0o600, 0o700  # modes of a private file and of a private folder
ANYONE = 0o666  # the mode of other files, less what the process takes away


@contextlib.contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Inside this context, an error of a full disk names ``path``, the file being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DiskFullError(f"{path} cannot be written: {error.strerror}") from error


def write(path: Path, content: bytes | str, *, private: bool = False, durable: bool = True) -> None:
    """Write to a temporary file in the folder of ``path``, flush it to the disk, and rename it.

    A device or a pipe is written to directly, and a link is followed. Only the owner can read a
    ``private`` file, from its first byte on. A file that is not ``durable`` is not flushed: it is
    whole for its readers, but a power cut may lose it. Two threads must not write to the same
    ``path`` at once.
    """
    blob = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file() and not path.is_dir():
        with room_for(path):
            path.write_bytes(blob)
        return
    with whole(path, private=private, durable=durable) as part:
        part.write_bytes(blob)


@contextlib.contextmanager
def whole(path: Path, *, private: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield a new file for the content of ``path``; at the end flush it and rename it, as above."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder, not a file to write")
    target = path.resolve() if path.is_symlink() else path
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with room_for(path):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                part.touch(OWNER_ONLY if private else ANYONE, exist_ok=not private)
            except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as why:
                raise OutputError(f"{path} cannot be written: {why.strerror}") from why
            yield part
            if durable:
                with part.open("rb") as file:
                    os.fsync(file.fileno())
            part.replace(target)
    finally:
        if part.parent.is_dir():
            part.unlink(missing_ok=True)


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter, and the missing folders above it."""
    for missing in reversed([each for each in (path, *path.parents) if not each.exists()]):
        missing.mkdir(OWNER_ENTERS, exist_ok=True)
    if path.stat().st_mode & 0o777 != OWNER_ENTERS:
        path.chmod(OWNER_ENTERS)


def make_private(folder: Path) -> None:
    """Let only the owner read a folder and all that is in it."""
    folder.chmod(OWNER_ENTERS)
    for path in folder.rglob("*"):
        path.chmod(OWNER_ENTERS if path.is_dir() else OWNER_ONLY)


def append(path: Path, blob: bytes, *, private: bool = False) -> None:
    """Append to a file. Only the owner can read a ``private`` file that is made here."""
    with room_for(path):
        try:
            if private:
                path.touch(OWNER_ONLY)
            file = path.open("ab")
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}") from error
        with file:
            file.write(blob)


def sync(path: Path) -> None:
    """Wait until the lines appended to a file are on the disk. The file need not exist."""
    if path.exists():
        with room_for(path), path.open("rb") as file:
            os.fsync(file.fileno())
