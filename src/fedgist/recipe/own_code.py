"""A user's own code, named ``package.module:thing`` by a recipe or a run directory.

To import it is to run it, so it is imported here and nowhere else: whoever reads recipes of others
is told before, or has it refused.
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
def asking(before: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``before(key, place)`` ahead of each import within; its error refuses the import."""
    token = _before.set(before)
    try:
        yield
    finally:
        _before.reset(token)


def load_own(key: str, place: str) -> Any:
    """Import what the recipe's ``key`` names as ``package.module:thing``, and return it."""
    _before.get()(key, place)
    try:
        return load_attribute(place)
    except FedgistError:
        raise
    except Exception as error:  # a user's module may fail in any way
        raise RecipeError(f"{key} = {shown(place)}: {first_line(error)}") from error
