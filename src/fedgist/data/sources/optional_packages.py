"""Import packages that only some sources need, with one-line errors."""

from __future__ import annotations

import importlib
from typing import Any

from fedgist.errors import DataError


def need(module: str, msg: str) -> Any:
    """Import and return a module of an optional package; raise DataError with ``msg`` otherwise."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(msg) from error
