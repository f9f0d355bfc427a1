"""Bounds of hyper-parameters, declared in their types and checked when a method is made."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

from fedgist.errors import MethodError, one_of

T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """The range of a number: ``least`` (exclusive with ``above``) and ``most``."""

    least: float
    above: bool = False
    most: float = math.inf

    def check(self, value: float, key: str) -> None:
        """Raise MethodError unless a number is within these bounds."""
        fits = value > self.least if self.above else value >= self.least
        if fits and value <= self.most:
            return
        words = f"greater than {self.least}" if self.above else f"at least {self.least}"
        words += f" and at most {self.most}" if math.isfinite(self.most) else ""
        raise MethodError(f"{key} must be {words}, not {value}")


NonNegative = Annotated[float, Bounds(0)]
Positive = Annotated[float, Bounds(0, above=True)]
Temperature = Annotated[float, Bounds(1e-6)]  # logits divided by less leave float32
Share = Annotated[float, Bounds(0, most=1)]
Fraction = Annotated[float, Bounds(0, above=True, most=1)]  # a share above 0
PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
PerPool: TypeAlias = T | dict[str, T]  # one value for all pools, or a table by pool


def of_pool(value: PerPool[T], pool: str, key: str) -> T:
    """Return a hyper-parameter's value for a pool; ``key`` is its name in a recipe.

    Raises
    ------
    InputError
        If it is a table without the pool.
    """
    if isinstance(value, dict):
        return value[one_of(pool, value, f"pool in {key}")]
    return value


def check_bounds(method: object, table: str = "method") -> None:
    """Raise MethodError if a number of a dataclass is not finite, or outside its type's bounds.

    Nested dataclasses and tables are checked as well.
    """
    if not dataclasses.is_dataclass(method):
        return
    hints = typing.get_type_hints(type(method), include_extras=True)
    for field in dataclasses.fields(method):
        value, key = getattr(method, field.name), f"{table}.{field.name}"
        check_bounds(value, key)
        inner = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {}
        bounds = list(_bounds_in(hints[field.name]))
        for name, number in (inner or {key: value}).items():
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            if not math.isfinite(number):
                raise MethodError(f"{name} must be a finite number, not {number}")
            for bound in bounds:
                bound.check(number, name)


def _bounds_in(hint: object) -> Iterator[Bounds]:
    """Yield the bounds in a type, also in the members of a union."""
    for part in typing.get_args(hint):
        if isinstance(part, Bounds):
            yield part
        else:
            yield from _bounds_in(part)
