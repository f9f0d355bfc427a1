"""Local training: every client trains its own model, and no message is sent.

A reference without a paper. See docs/methods/local.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.core.method import Method


@dataclass(frozen=True)
class Local(Method):
    """Local training without an exchange: all functions are the defaults of ``Method``."""
