"""Identity of files that are not read: their names, sizes and times of change."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedgist.errors import DataError, first_line


def identity_of(files: Sequence[str]) -> Iterator[str]:
    """Yield the name, size and time of change of each file; names begin below a common folder.

    Raises
    ------
    DataError
        If a file does not exist.
    """
    paths = [Path(file).absolute() for file in files]
    top = os.path.commonpath([path.parent for path in paths]) if paths else ""
    for path in paths:
        try:
            facts = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {first_line(error)}") from error
        yield f"{path.relative_to(top).as_posix()} {facts.st_size} {facts.st_mtime_ns}"
