"""What the sections of a recipe have in common, and the bounds that several of them use."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name, re.ASCII):
        msg = "must be auto, cpu, cuda or cuda:NUMBER"
        raise ValueError(msg)
    return name


Device = Annotated[str, AfterValidator(_device)]  # whether there is one, the run finds out
CLOSED = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # no keys but the fields
