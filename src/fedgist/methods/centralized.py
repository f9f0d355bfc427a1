"""Centralized training: one model on all clients' rows, as if data could be moved.

See docs/methods/centralized.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedgist.core.method import Method


@dataclass(frozen=True)
class Centralized(Method):
    """One client that holds all rows; it is evaluated on every client's test rows."""

    merges_clients: ClassVar[bool] = True
