"""Usual values of a table's columns, and which values of new rows are unusual.

A usual range is from the 1 % to the 99 % quantile of the training rows, rounded outwards to two
significant digits. Each end is a value that another row exceeds, so that no person's own extreme is
in a file that holds the range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

import numpy as np
import torch
from torch import Tensor

from fedgist.data.table_columns import Column, Range
from fedgist.errors import DataError, listed

_LEAST_ROWS = 20  # fewer have no quantile that hides a single row
_TAIL = 0.01
_DOWN, _UP = (Context(prec=2, rounding=rounding) for rounding in (ROUND_FLOOR, ROUND_CEILING))


def with_measured_ranges(columns: Sequence[Column], x: Tensor) -> tuple[Column, ...]:
    """Return the columns, the numeric ones with their usual range over rows ``x`` (rows, inputs).

    Fewer than 20 rows have none.
    """
    if len(x) < _LEAST_ROWS:
        return tuple(columns)
    parts = _parts(columns, x)
    return tuple(
        column if column.categories is not None else replace(column, usual=_range(part[:, 0]))
        for column, part in parts
    )


def with_stated_ranges(
    columns: Sequence[Column], ranges: Mapping[str, Range], name: str
) -> tuple[Column, ...]:
    """Return the columns with the stated ranges; raise DataError if one is of no numeric column."""
    numeric = [column.name for column in columns if column.categories is None]
    if others := [key for key in ranges if key not in numeric]:
        raise DataError(
            f"data.ranges names {others[0]!r}; {name} has the numeric columns "
            f"{listed(numeric) if numeric else '(none)'}"
        )
    return tuple(replace(column, usual=ranges.get(column.name)) for column in columns)


def unusual_values(columns: Sequence[Column], x: Tensor) -> dict[Column, Tensor]:
    """Return which rows ``x`` (rows, inputs) have an unusual value, Booleans (rows,) by column.

    Unusual are numbers outside the usual range, and categories that are not the column's. Columns
    without a range or categories are left out.
    """
    unusual = {}
    for column, part in _parts(columns, x):
        if column.categories is not None:
            unusual[column] = (part == 0).all(1)
        elif column.usual is not None:
            low, high = column.usual
            unusual[column] = ((part < low) | (part > high))[:, 0]
    return unusual


def _parts(columns: Sequence[Column], x: Tensor) -> Iterator[tuple[Column, Tensor]]:
    """Yield each column with its inputs (rows, inputs of the column)."""
    widths = [len(column.inputs) for column in columns]
    return zip(columns, torch.split(x, widths, 1), strict=True)


def _range(values: Tensor) -> Range:
    """Return the rounded quantiles of values (rows,)."""
    # the inner neighbours: with an interpolation, the extreme row could be computed from a quantile
    array = values.numpy()
    low = np.quantile(array, _TAIL, method="higher")
    high = np.quantile(array, 1 - _TAIL, method="lower")
    return float(_DOWN.create_decimal(str(low))), float(_UP.create_decimal(str(high)))
