"""How the rows of a data source are read."""

from __future__ import annotations

from typing import Literal

Read = Literal["auto", "once", "lazy"]  # into memory, when they are used, or as fits
