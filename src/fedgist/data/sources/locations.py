"""Where data lies: the folder of downloaded data, and paths that a user gives."""

from __future__ import annotations

import os
from pathlib import Path

from fedgist.data.sources.optional_packages import need
from fedgist.errors import DataError


def data_root(root: Path | None = None) -> Path:
    """Return the folder of downloaded data.

    This is ``root`` if given, else the environment variable FEDGIST_DATA, else a folder in the
    user's cache.
    """
    if root is not None:
        return Path(root).expanduser()
    if from_environment := os.environ.get("FEDGIST_DATA"):
        return Path(from_environment).expanduser()
    platformdirs = need(
        "platformdirs", "finding the cache folder needs platformdirs: pip install platformdirs"
    )
    return Path(platformdirs.user_cache_path("fedgist")) / "data"


def absent(name: str, file: str, root: Path, where: str) -> DataError:
    """Return the error that says in one line which file is missing, and how to get it.

    ``where`` tells what to download and where to put it; ROOT in it stands for ``root``.
    """
    return DataError(
        f"{name} was not found: looked for {file} in {root}; {where.replace('ROOT', str(root))}; "
        "--data-root or FEDGIST_DATA sets another folder"
    )


def existing(path: str | Path, *, folder: bool = False) -> Path:
    """Return the user's path with ~ expanded.

    Raises
    ------
    DataError
        If there is no such file (or no such folder, with ``folder``).
    """
    expanded = Path(path).expanduser()
    if expanded.is_dir() if folder else expanded.is_file():
        return expanded
    kind = "folder" if folder else "file"
    state = f"is not a {kind}" if expanded.exists() else "does not exist"
    msg = f"{expanded} {state}"
    raise DataError(msg)
