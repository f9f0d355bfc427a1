"""Bounds of numbers in recipes and in methods, declared in their types.

A recipe's values are checked when it is read. The fields of a method are checked when it is made,
also where a method is made in Python: :func:`check_bounds`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field
from pydantic.fields import FieldInfo

from fedgist.errors import InputError, MethodError, one_of
from fedgist.options import checked

T = TypeVar("T")
_MOST = 2**31 - 1  # of whole numbers

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(ge=1e-6)]  # logits divided by less leave float32
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]  # a share above 0
BelowOne = Annotated[float, Field(ge=0, lt=1)]  # a share of which something is left
PositiveInt = Annotated[int, Field(ge=1, le=_MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=_MOST)]
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
        bounds = tuple(_bounds_in(hints[field.name]))
        for name, number in (inner or {key: value}).items():
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check(number, bounds, name)


def _check(number: float, bounds: tuple[FieldInfo, ...], name: str) -> None:
    kind: Any = type(number)
    try:
        checked(Annotated[(kind, *bounds)] if bounds else kind, number, name)
    except InputError as error:
        raise MethodError(str(error)) from error


def _bounds_in(hint: object) -> Iterator[FieldInfo]:
    """Yield the bounds in a type, also in the members of a union."""
    for part in typing.get_args(hint):
        if isinstance(part, FieldInfo):
            yield part
        else:
            yield from _bounds_in(part)
