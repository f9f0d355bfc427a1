"""Every registered method with its defaults, and the example methods of the laws."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from fedgist.methods import METHODS
from fedgist.testing.example_methods import EXAMPLES

METHOD_OBJECTS = {name: cls() for name, cls in METHODS.items()} | dict(EXAMPLES)
# one of each kind of message: weights, sums, classes declared, relayed
QUICK = ("fedavg", "fedlog", "fedproto", "relay")
# one of each mechanism, for `make test`; a test of the laws says what each of these stands for
CHOSEN = (
    *QUICK,
    "centralized",
    "local",
    "fedrep",
    "fedadam",
    "cs_fl",
    "fedbn",
    "per_fedavg",
    "two_stages",
    "digest",
)
PLAIN: dict[str, object] = {"optimizer": "sgd"}
#: What methods need in [train], beside a test's own settings.
TRAINS: dict[str, dict[str, object]] = {"scaffold": PLAIN, "fednova": PLAIN, "pfedme": PLAIN}
EVERYWHERE = (pytest.mark.slow, pytest.mark.environment)


def marks(name: str, chosen: Collection[str] = CHOSEN) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a test of this method: few for `make check`, then ``chosen``."""
    if name in QUICK:
        return ()
    return (pytest.mark.slow,) if name in chosen else EVERYWHERE


def each(names: Iterable[str] = METHOD_OBJECTS, chosen: Collection[str] = CHOSEN) -> list[object]:
    """Return names for a test of every method, with their marks."""
    return [pytest.param(name, marks=marks(name, chosen)) for name in names]
