"""Local training alone: every client trains its own model, and nothing is sent.

See docs/methods/local.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.core.method import Method


@dataclass(frozen=True)
class Local(Method):
    """No exchange: all functions are a method's defaults."""
