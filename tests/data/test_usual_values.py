"""Usual ranges of columns against quantiles of sorted lists, and values outside them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.data.table_columns import Column
from fedgist.data.usual_values import unusual_values, with_measured_ranges, with_stated_ranges
from fedgist.errors import DataError

AGE, TOWN = Column("age"), Column("town", ("Bonn", "Ulm"))
numbers = st.floats(-1e6, 1e6, width=32)


def measured(values: list[float]) -> tuple[float, float] | None:
    [column] = with_measured_ranges([AGE], torch.tensor(values).unsqueeze(1))
    return column.usual


@given(st.lists(numbers, min_size=20, max_size=300))
def test_a_range_is_quantiles_that_no_row_alone_decides(values: list[float]) -> None:
    # a wrong formula: the smallest and largest number, or an interpolation that contains them
    low, high = measured(values) or (math.nan, math.nan)
    ordered = sorted(torch.tensor(values).tolist())
    beyond = max(1, math.ceil(0.01 * (len(values) - 1)))
    inner = ordered[beyond : len(values) - beyond]
    assert low <= inner[0]
    assert inner[-1] <= high
    for end, value in ((low, inner[0]), (high, inner[-1])):
        assert abs(end - value) <= 0.1 * abs(value)  # two digits
        assert float(f"{end:.1e}") == end
    # other extremes, the same range
    extremes = [min(values) - 1e6, max(values) + 1e6]
    assert measured([*ordered[1:-1], *extremes]) == (low, high)


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (36.1, 41.3, (36.0, 42.0)),
        (1951.0, 2009.0, (1900.0, 2100.0)),
        (-0.0123, 0.0, (-0.013, 0.0)),
        (5.0, 5.0, (5.0, 5.0)),
        (0.3, 0.7, (0.3, 0.7)),  # not 0.29 or 0.71: float32's next digits are not the number's
    ],
)
def test_ranges_are_rounded_outwards_to_two_digits(
    least: float, most: float, expected: tuple[float, float]
) -> None:
    # a wrong formula: rounding to the nearest would make years of birth 2000 to 2000
    assert measured([least] * 10 + [most] * 10) == expected


def test_fewer_than_20_rows_have_no_range() -> None:
    assert measured([float(i) for i in range(19)]) is None
    assert measured([float(i) for i in range(20)]) == (1.0, 18.0)


def test_unusual_are_numbers_outside_and_categories_that_a_column_lacks() -> None:
    columns = with_stated_ranges([TOWN, AGE, Column("weight")], {"age": (18, 90)}, "x.csv")
    assert [column.usual for column in columns] == [None, (18, 90), None]
    x = torch.tensor([[1, 0, 18, -9], [0, 0, 90, 9], [0, 1, 17.9, 0], [0, 0, 90.1, 0]])
    unusual = {c.name: rows.tolist() for c, rows in unusual_values(columns, x).items()}
    assert unusual == {"town": [False, True, False, True], "age": [False, False, True, True]}


@pytest.mark.parametrize("name", ["town", "size"])
def test_a_range_of_no_numeric_column_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=rf"^data.ranges names '{name}'; x.csv has .* age$"):
        with_stated_ranges([TOWN, AGE], {name: (0, 1)}, "x.csv")
