"""A user's own code, named ``package.module:thing`` by a recipe or a run directory.

Importing such code runs it, so this module is the only place that imports it. A reader of other
people's recipes can be warned before an import, or can refuse it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from fedgist.errors import FedgistError, RecipeError, first_line, shown
from fedgist.registry import load_attribute

# called with the key and the place that it names; it may refuse by an error
_before: ContextVar[Callable[[str, str], None]] = ContextVar("before", default=lambda _k, _p: None)


@contextlib.contextmanager
def before_each_import(before: Callable[[str, str], None]) -> Iterator[None]:
    """Inside this context, call ``before(key, place)`` before each import of a user's code.

    An exception that ``before`` raises prevents the import.
    """
    token = _before.set(before)
    try:
        yield
    finally:
        _before.reset(token)


def load_own(key: str, place: str) -> Any:
    """Import ``package.module:thing``, the value of the recipe's ``key``, and return the thing."""
    _before.get()(key, place)
    try:
        return load_attribute(place)
    except FedgistError:
        raise
    except Exception as error:  # a user's module may fail in any way
        raise RecipeError(f"{key} = {shown(place)}: {first_line(error)}") from error
