"""Locations of data: the folder of downloaded data, and paths given by users."""

from __future__ import annotations

import os
from pathlib import Path

from fedgist.data.sources.file_sizes import missing, regular
from fedgist.data.sources.optional_packages import need
from fedgist.errors import DataError, first_line


def data_root(root: Path | None = None) -> Path:
    """Return the folder of downloaded data.

    It is ``root`` if given, else the environment variable FEDGIST_DATA, else a folder in the user's
    cache.
    """
    if root is not None:
        return expanded_path(root)
    if from_environment := os.environ.get("FEDGIST_DATA"):
        return expanded_path(from_environment)
    platformdirs = need(
        "platformdirs", "finding the cache folder needs platformdirs: pip install platformdirs"
    )
    return Path(platformdirs.user_cache_path("fedgist")) / "data"


def absent(name: str, file: str, root: Path, advice: str) -> DataError:
    """Return the one-line error that names a missing file and how to get it.

    ``advice`` names the download and its folder; ROOT in it stands for ``root``.
    """
    return DataError(
        f"{name} was not found: looked for {file} in {root}; {advice.replace('ROOT', str(root))}; "
        "--data-root or FEDGIST_DATA sets another folder"
    )


def existing(path: str | Path, *, folder: bool = False) -> Path:
    """Return the user's path with ~ expanded; raise DataError if it does not exist."""
    expanded = expanded_path(path)
    if not folder:
        return regular(expanded)
    if expanded.is_dir():
        return expanded
    raise DataError(f"{expanded} is not a folder") if expanded.exists() else missing(expanded)


def expanded_path(path: str | Path) -> Path:
    """Return a path with ~ expanded."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{path}: {first_line(error)}") from error
