"""Bounds of hyper-parameters, written in their types and checked once, when a method is made."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Annotated

from fedgist.errors import MethodError


@dataclass(frozen=True)
class Bounds:
    """The least value of a number (with ``above``, it must be greater than that) and the most."""

    least: float
    above: bool = False
    most: float = math.inf


NonNegative = Annotated[float, Bounds(0)]
Positive = Annotated[float, Bounds(0, above=True)]
Share = Annotated[float, Bounds(0, most=1)]
Fraction = Annotated[float, Bounds(0, above=True, most=1)]  # a share above 0
PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]


def check_bounds(method: object, table: str = "method") -> None:
    """Raise MethodError if a number of a dataclass is not finite, or outside its type's bounds."""
    if not dataclasses.is_dataclass(method):
        return
    hints = typing.get_type_hints(type(method), include_extras=True)
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            msg = f"{table}.{field.name} must be a finite number, not {value}"
            raise MethodError(msg)
        for bounds in getattr(hints[field.name], "__metadata__", ()):
            if not isinstance(bounds, Bounds) or not isinstance(value, int | float):
                continue
            fits = value > bounds.least if bounds.above else value >= bounds.least
            if not fits or value > bounds.most:
                words = (
                    f"greater than {bounds.least}" if bounds.above else f"at least {bounds.least}"
                )
                words += f" and at most {bounds.most}" if math.isfinite(bounds.most) else ""
                msg = f"{table}.{field.name} must be {words}, not {value}"
                raise MethodError(msg)
