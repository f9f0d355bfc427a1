"""Every registered method with its defaults, and the example methods of the laws."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fedgist.methods import METHODS
from fedgist.testing.example_methods import EXAMPLES

METHOD_OBJECTS = {name: cls() for name, cls in METHODS.items()} | dict(EXAMPLES)
# one of each kind of message: weights, sums, classes declared, relayed
QUICK = ("fedavg", "fedlog", "fedproto", "relay")


def each(names: Iterable[str] = METHOD_OBJECTS) -> list[object]:
    """Return names for a test of every method; the quick gate tries one of each kind."""
    return [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in names]
