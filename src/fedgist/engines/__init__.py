"""Engines run clients. They depend on the ``Method`` interface, never on a concrete method."""

from typing import Literal

EngineName = Literal["local", "loopback"]
