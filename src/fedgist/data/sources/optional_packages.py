"""Packages that only some sources need: their import, and their errors in one line."""

from __future__ import annotations

import importlib
from typing import Any

from fedgist.errors import DataError


def need(module: str, msg: str) -> Any:
    """Return an imported module of a package that only some sources need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(msg) from error
