"""Centralized training: one model is trained on all clients' rows, as if data could be moved.

A reference without a paper. See docs/methods/centralized.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedgist.core.method import Method


@dataclass(frozen=True)
class Centralized(Method):
    """Centralized training by one client with all rows, evaluated on every client's test rows."""

    merges_clients: ClassVar[bool] = True
