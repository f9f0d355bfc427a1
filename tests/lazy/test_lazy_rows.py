"""Lazy rows are views without reads, and a read gives the rows that were asked for."""

from __future__ import annotations

import random as python_random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core import random
from fedgist.data.lazy_rows import LazyRows, as_numbers, held
from fedgist.data.normalization import _merged
from fedgist.data.sources.splits import moments
from fedgist.engines.reader_pool import ReaderPool, _divided
from fedgist.errors import DataError


@dataclass
class Counting:
    """A reader of the rows of a tensor, which counts its reads."""

    x: torch.Tensor
    name: str = "rows"
    draws: bool = False
    reads: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.x)

    def __call__(self, row: int) -> object:
        self.reads.append(row)
        return self.x[row] + torch.rand(()) if self.draws else self.x[row]

    def file_of(self, row: int) -> str:
        return f"{row}.bin"

    def identity(self) -> Sequence[str] | None:
        return None


ROWS = torch.arange(60.0).view(20, 3)


@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=30),
    st.lists(st.integers(0, 29), max_size=12),
    st.data(),
)
def test_a_view_of_a_view_has_its_rows_and_reads_nothing(
    first: list[int], second: list[int], data: st.DataObject
) -> None:
    second = [row % len(first) for row in second]
    reader = Counting(ROWS)
    x = LazyRows.of(reader)
    reader.reads.clear()
    view = x[torch.tensor(first)][torch.tensor(second, dtype=torch.int64)]
    begin = data.draw(st.integers(0, len(second)))
    part = view[begin:]
    assert reader.reads == []
    expected = ROWS[torch.tensor(first)][torch.tensor(second, dtype=torch.int64)]
    assert torch.equal(held(view, "x"), expected)
    assert torch.equal(held(part, "x"), expected[begin:])
    mask = torch.rand(len(second)) < 0.5
    assert torch.equal(held(view[mask], "x"), expected[mask])
    assert view.shape == expected.shape


@given(st.lists(st.lists(st.integers(-1, 19), min_size=4, max_size=4), min_size=1, max_size=5))
def test_a_batch_has_the_first_row_for_absent_rows(table: list[list[int]]) -> None:
    rows = torch.tensor([sorted(line, key=lambda row: row < 0) for line in table])
    reader = Counting(ROWS)
    x = LazyRows.of(reader)
    reader.reads.clear()
    batch = x.ask_batch(rows, None)()
    assert len(reader.reads) == int((rows >= 0).sum())
    for line, values in zip(rows, batch, strict=True):
        for row, value in zip(line.tolist(), values, strict=True):
            first = int(line[0])
            shown = ROWS[row] if row >= 0 else ROWS[first] if first >= 0 else torch.zeros(3)
            assert torch.equal(value, shown)


@pytest.mark.parametrize("each", [1, 2, 3])
def test_processes_read_what_this_process_reads(each: int) -> None:
    x = LazyRows.of(Counting(ROWS, draws=True))
    pool = ReaderPool([x.source], each)
    served = LazyRows(x.source, x.numbers, service=pool)
    rows = torch.tensor([[3, 1, -1], [19, 0, 7]])
    keys = random.fold(random.key(0), "client", torch.arange(2))
    pool.start(1)
    pool.use(0)
    try:
        waiting = served.ask_batch(rows, keys)
        dropped = served.ask_batch(rows, None)  # nobody waits for it
        again = served.ask_batch(rows, keys)
        expected = x.ask_batch(rows, keys)()
        assert torch.equal(waiting(), expected)
        assert torch.equal(again(), expected)
        assert callable(dropped)
        many = torch.arange(20).repeat(400)  # more than may be asked for ahead
        assert torch.equal(served.read(many), x.read(many))
    finally:
        pool.close()


@given(st.integers(0, 50), st.integers(1, 9))
def test_a_batch_is_divided_evenly(count: int, parts: int) -> None:
    sizes = _divided(count, parts)
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


def numbers_of_numpy() -> list[int]:
    return list(np.random.get_state(legacy=False)["state"]["key"])


def test_generators_are_restored_after_reads() -> None:
    x = LazyRows.of(Counting(ROWS, draws=True))
    before = (
        torch.get_rng_state(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        python_random.getstate(),
    )
    seeds = torch.tensor([1, 2])
    first = x.read(torch.tensor([0, 0]), seeds)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numbers_of_numpy() == before[1]
    assert python_random.getstate() == before[2]
    assert not torch.equal(first[0], first[1])
    assert torch.equal(x.read(torch.tensor([0, 0]), seeds), first)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (torch.zeros(4), r"rows: row 2 \(counted from 0, 2.bin\) is float32 \[4\], row 0 is"),
        (torch.zeros(3, dtype=torch.uint8), r"row 2 .* is uint8 \[3\], row 0 is float32 \[3\]"),
        (torch.tensor([0.0, torch.inf, 0.0]), r"row 2 .* holds a number that is not finite: inf"),
        ("text", r"row 2 .* cannot be read: a str is not a tensor or an array"),
        (torch.zeros(3) + 1j, r"row 2 .* cannot be read: complex numbers"),
        (None, r"row 2 .* cannot be read: a NoneType"),
    ],
)
def test_a_row_that_does_not_fit_is_named(odd: object, message: str) -> None:
    class Odd(Counting):
        def __call__(self, row: int) -> object:
            return odd if row == 2 else super().__call__(row)

    x = LazyRows.of(Odd(ROWS))
    assert torch.equal(x.read(torch.tensor([1])), ROWS[1:2])
    with pytest.raises(DataError, match=message):
        x.read(torch.arange(4))


def test_numbers_of_any_kind_are_read() -> None:
    assert as_numbers(np.array([1, 65535], dtype=np.uint16)).tolist() == [1, 65535]
    assert as_numbers(np.array([1, 2], dtype=np.uint8)).dtype == torch.uint8
    assert as_numbers([0.5, 2]).dtype == torch.float32
    assert as_numbers(np.array([1700000000, 2])).dtype == torch.float64
    with pytest.raises(DataError, match="rows has no rows"):
        LazyRows.of(Counting(ROWS[:0]))
    with pytest.raises(DataError, match="it holds no numbers"):
        LazyRows.of(Counting(torch.zeros(3)))


@given(st.integers(1, 30), st.integers(1, 12))
def test_moments_of_pieces_are_those_of_all_rows(count: int, size: int) -> None:
    x = random.normal(random.key(count), (count, 2, 3)) + 5
    x[:, 1] = 7.0
    mean, std = _merged(iter(torch.split(x, size)), 2.0)
    expected = moments(x, 2.0)
    assert mean == pytest.approx(expected[0], rel=1e-9)
    assert std == pytest.approx(expected[1], rel=1e-6, abs=1e-7)
