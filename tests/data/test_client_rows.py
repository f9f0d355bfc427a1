"""Rows of clients and their batches, against sorting in plain Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.core import random
from fedgist.core.local_steps import steps_of
from fedgist.data.client_rows import Rows, schedule

few = settings(max_examples=60)
counts_of = st.lists(st.integers(0, 11), min_size=1, max_size=5)


def clients(counts: list[int]) -> Rows:
    """Give client i the rows 100 i, 100 i + 1, ..."""
    return Rows.of([100 * i + torch.arange(c) for i, c in enumerate(counts)])


def keys(counts: list[int], seed: int = 0) -> Tensor:
    return random.fold(random.key(seed), torch.arange(len(counts)))


def table(counts: list[int]) -> Tensor:
    return clients(counts).table(range(len(counts)))


def batches(lines: Tensor) -> list[list[int]]:
    """Return one client's batches without absent rows."""
    return [[int(r) for r in line if r >= 0] for line in lines]


@few
@given(counts_of, st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_every_epoch_sees_every_row_once_and_its_last_batch_is_short(
    counts: list[int], size: int, epochs: int, seed: int
) -> None:
    # rejects dropping the last batch, and batches across two epochs
    out = schedule(table(counts), keys(counts, seed), size, epochs)
    for i, count in enumerate(counts):
        per_epoch = -(-count // size)
        client_batches = batches(out[i])
        assert not any(client_batches[per_epoch * epochs :])
        for epoch in range(epochs):
            epoch_batches = client_batches[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert sorted(r for batch in epoch_batches for r in batch) == list(
                range(100 * i, 100 * i + count)
            )
            assert [len(b) for b in epoch_batches] == [size] * (count // size) + [count % size] * (
                count % size > 0
            )


@few
@given(counts_of, st.integers(1, 5), st.integers(0, 9), st.integers(0, 99))
def test_a_number_of_steps_cycles_through_epochs(
    counts: list[int], size: int, steps: int, seed: int
) -> None:
    out = schedule(table(counts), keys(counts, seed), size, 99, steps)
    whole = schedule(table(counts), keys(counts, seed), size, steps)  # at least so many steps
    for i, count in enumerate(counts):
        client_batches = batches(out[i])
        assert sum(bool(b) for b in client_batches) == (steps if count else 0)
        assert client_batches[:steps] == batches(whole[i])[:steps] or not count


@few
@given(
    counts_of,
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 7)),
    st.integers(0, 6),
    st.integers(0, 99),
)
def test_a_clients_batches_depend_on_its_own_rows_and_key_alone(
    counts: list[int], size: int, steps: int | None, padding: int, seed: int
) -> None:
    # rejects draws that depend on the width of the table or on the place among clients
    all_keys, rows = keys(counts, seed), table(counts)
    padded = torch.cat([rows, torch.full((len(counts), padding), -1)], dim=1)
    together = schedule(rows, all_keys, size, 2, steps)
    turned = schedule(padded.flip(0), all_keys.flip(0), size, 2, steps).flip(0)
    assert torch.equal(together, turned)
    for i, count in enumerate(counts):
        alone = schedule(clients(counts).table([i]), all_keys[i : i + 1], size, 2, steps)[0]
        assert torch.equal(together[i, : alone.shape[0], : alone.shape[1]], alone)
        assert int((alone >= 0).sum()) == int((together[i] >= 0).sum())
        assert count or not alone.numel() or bool((alone == -1).all())


def test_epochs_and_clients_and_keys_have_orders_of_their_own() -> None:
    out = schedule(table([11, 11]), keys([11, 11]), 11, 2) % 100
    orders = [
        *out.flatten(0, 1),
        *(schedule(table([11, 11]), keys([11, 11], 1), 11, 2) % 100).flatten(0, 1),
    ]
    assert len({tuple(o.tolist()) for o in orders}) == 8


@few
@given(counts_of, st.integers(1, 5), st.integers(1, 3), st.one_of(st.none(), st.integers(0, 7)))
def test_steps_of_counts_the_batches_that_are_scheduled(
    counts: list[int], size: int, epochs: int, steps: int | None
) -> None:
    out = schedule(table(counts), keys(counts), size, epochs, steps)
    assert (
        steps_of(torch.tensor(counts), size, epochs, steps).tolist()
        == (out >= 0).any(2).sum(1).tolist()
    )


def test_nobody_and_nothing_have_no_batches() -> None:
    assert schedule(table([0, 0]), keys([0, 0]), 4, 3).numel() == 0
    assert (
        schedule(
            torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 4, 3
        ).numel()
        == 0
    )
    assert batches(schedule(table([1]), keys([1]), 4, 3)[0]) == [[0]] * 3


@few
@given(counts_of)
def test_rows_are_joined_and_taken_apart(counts: list[int]) -> None:
    rows = clients(counts)
    assert (len(rows), rows.counts.tolist()) == (len(counts), counts)
    assert [rows[i].tolist() for i in range(len(rows))] == [
        list(range(100 * i, 100 * i + c)) for i, c in enumerate(counts)
    ]
    picked = list(range(len(counts)))[::-2]
    lines = rows.table(picked).tolist()
    widest = max(counts[i] for i in picked)
    assert lines == [rows[i].tolist() + [-1] * (widest - counts[i]) for i in picked]
    merged = rows.merged()
    assert (len(merged), merged[0].tolist()) == (1, rows.rows.tolist())


def test_no_clients_have_no_rows() -> None:
    assert (len(Rows.of([])), Rows.of([]).table([]).shape) == (0, (0, 0))


@few
@given(counts_of, st.integers(2, 5), st.integers(1, 3), st.integers(0, 99))
def test_a_last_batch_of_one_row_joins_the_batch_before_it(
    counts: list[int], size: int, epochs: int, seed: int
) -> None:
    # rejects dropping the row, and batches of one row
    out = schedule(table(counts), keys(counts, seed), size, epochs, least=2)
    plain = schedule(table(counts), keys(counts, seed), size, epochs)
    steps = steps_of(torch.tensor(counts), size, epochs, least=2).tolist()
    for i, count in enumerate(counts):
        own, before = batches(out[i]), [b for b in batches(plain[i]) if b]
        sizes = [size] * (count // size) + [count % size] * (count % size > 0)
        if count % size == 1:
            sizes = sizes[:-1] if count > 1 else []
            sizes = [*sizes[:-1], size + 1] if sizes else []
        assert [len(batch) for batch in own if batch] == sizes * epochs
        assert len([batch for batch in own if batch]) == steps[i]
        rows = [r for batch in before for r in batch]  # in the same order
        assert [r for batch in own for r in batch] == (rows if count > 1 or size == 1 else [])


@few
@given(counts_of, st.integers(2, 5), st.integers(1, 3), st.integers(0, 99))
def test_other_clients_batches_do_not_move(
    counts: list[int], size: int, epochs: int, seed: int
) -> None:
    out = schedule(table(counts), keys(counts, seed), size, epochs, least=2)
    plain = schedule(table(counts), keys(counts, seed), size, epochs)
    for i, count in enumerate(counts):
        if count % size != 1:
            own = [batch for batch in batches(out[i]) if batch]
            assert own == [batch for batch in batches(plain[i]) if batch]
    if all(count % size != 1 for count in counts):
        assert torch.equal(out, plain)
