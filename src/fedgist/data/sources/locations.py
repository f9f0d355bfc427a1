"""Where data lies: the data root, paths of the user, and packages that only some sources need."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from fedgist.errors import DataError


def data_root(root: Path | None = None) -> Path:
    """Return the folder of downloaded data.

    The argument, else FEDGIST_DATA, else the user's cache folder.
    """
    if root is not None:
        return Path(root).expanduser()
    if named := os.environ.get("FEDGIST_DATA"):
        return Path(named).expanduser()
    dirs = need(
        "platformdirs", "finding the cache folder needs platformdirs: pip install platformdirs"
    )
    return Path(dirs.user_cache_path("fedgist")) / "data"


def absent(name: str, file: str, root: Path, where: str) -> DataError:
    """Say in one line which file is missing, and how to get it there."""
    ways = "another root is set with --data-root or FEDGIST_DATA"
    return DataError(
        f"{name} is not here: looked for {file} in {root}; {where.replace('ROOT', str(root))}; "
        f"{ways}"
    )


def existing(path: str | Path, *, folder: bool = False) -> Path:
    """Expand the user's path and return it, if a file (or a folder) is there."""
    found = Path(path).expanduser()
    if not (found.is_dir() if folder else found.is_file()):
        state = (
            "is not a " + ("folder" if folder else "file") if found.exists() else "does not exist"
        )
        msg = f"{found} {state}"
        raise DataError(msg)
    return found


def need(module: str, msg: str) -> Any:
    """Import a package that only some sources need, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(msg) from error


def first_line(error: BaseException) -> str:
    """Shorten another package's error to one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
