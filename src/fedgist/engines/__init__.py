"""Engines: what runs clients. Each has one verb, ``ask``, and none knows any method."""

from typing import Literal

EngineName = Literal["local", "loopback"]
