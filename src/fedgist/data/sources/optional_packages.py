"""Packages that only some sources need: their import, and their errors in one line."""

from __future__ import annotations

import importlib
from typing import Any

from fedgist.errors import DataError


def need(module: str, msg: str) -> Any:
    """Return an imported module of a package that only some sources need.

    Raises
    ------
    DataError
        With ``msg``, which says how to install the package, if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(msg) from error


def first_line(error: BaseException) -> str:
    """Return the first line of another package's message, or the error's type if it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
