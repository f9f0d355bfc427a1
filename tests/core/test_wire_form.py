"""Forms on the wire: what travels, what it costs, and what cannot travel."""

from __future__ import annotations

from dataclasses import field

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.core.message import (
    Form,
    message,
    pack,
    payload_bytes,
    payloads,
    unpack,
    why_not_summable,
    why_refused,
)
from fedgist.core.tree import map_leaves, stack, tree
from fedgist.core.wire_form import FLAGS, NONZERO, SIGNS, rows_where
from fedgist.engines.message_form import screen_uploads
from fedgist.errors import MessageError

few = settings(max_examples=60)


@message(reduce="sum")
class Votes:
    signs: dict[str, Tensor] = field(metadata=SIGNS)
    weight: Tensor


@message(reduce="sum")
class Means:
    total: Tensor = field(metadata=rows_where("count"))
    count: Tensor = field(metadata=NONZERO)
    here: Tensor = field(metadata=FLAGS)


@tree
class Pieces:
    rows: dict[str, Tensor] = field(metadata=rows_where("there"))
    there: dict[str, Tensor] = field(metadata=FLAGS)


@message(reduce="sum")
class Parcel:
    pieces: Pieces
    number: Tensor


def votes(lengths: list[tuple[int, ...]], seed: int) -> Votes:
    draw = np.random.default_rng(seed)
    signs = {
        f"layer|{i}": torch.from_numpy(draw.choice([-1.0, 1.0], shape)).float()
        for i, shape in enumerate(lengths)
    }
    return Votes(signs, torch.tensor(float(seed)))


def means(counts: list[int], width: int = 3) -> Means:
    count = torch.tensor(counts, dtype=torch.float32)
    total = torch.arange(1.0, len(counts) * width + 1).view(len(counts), width) * (
        count != 0
    ).unsqueeze(1)
    return Means(total, count, (count > 1).float())


def travelling(value: object) -> int:
    """The bytes of the arrays in a packed message, read by safetensors alone."""
    arrays = safetensors.torch.load(pack(value)).values()
    return sum(array.numel() * array.element_size() for array in arrays)


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=3)


@few
@given(shapes, st.integers(0, 99))
def test_signs_travel_as_bits_and_come_back(lengths: list[tuple[int, ...]], seed: int) -> None:
    # rejects four bytes a sign, and one byte a sign
    value = votes(lengths, seed)
    assert unpack(Votes, pack(value)) == value
    expected = 4 + sum(int(np.ceil(np.prod(shape) / 8)) for shape in lengths)
    assert payload_bytes(value) == travelling(value) == expected


@few
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=12), st.integers(0, 5))
def test_rows_that_are_not_there_cost_nothing_and_come_back_as_zeros(
    counts: list[int], width: int
) -> None:
    # rejects paying for all rows, and taking a noised count below 0 for an absent row
    value = means(counts, width)
    assert unpack(Means, pack(value)) == value
    there = sum(count != 0 for count in counts)
    expected = (4 * width + 4) * there + 2 * int(np.ceil(len(counts) / 8))
    assert payload_bytes(value) == travelling(value) == expected


@few
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=10), max_size=3), st.integers(1, 5))
def test_arrays_of_a_dictionary_have_rows_of_their_own_at_any_depth(
    there: list[list[bool]], width: int
) -> None:
    # rejects flags of another array, and forms that only the message's own fields have
    flags = {f"layer.{i}": torch.tensor(one).float() for i, one in enumerate(there)}
    rows = {name: torch.ones(len(f), width) * f.unsqueeze(1) for name, f in flags.items()}
    value = Parcel(Pieces(rows, flags), torch.ones(()))
    assert unpack(Parcel, pack(value)) == value
    expected = 4 + sum(4 * width * sum(one) + int(np.ceil(len(one) / 8)) for one in there)
    assert payload_bytes(value) == travelling(value) == expected


def test_noise_on_the_counts_makes_every_row_travel() -> None:
    value = map_leaves(lambda leaf: leaf + 0.5, means([2, 0, 0, 1]))
    assert why_refused(Means(value.total, value.count, torch.ones(4)), Form.of(value)) is None
    assert payload_bytes(value) == 4 * 3 * 4 + (1 + 4 * 4) + 1


def test_each_message_of_a_stack_costs_what_it_costs_alone() -> None:
    several = [means([2, 0, 0, 1]), means([0, 0, 0, 0]), means([1, 1, 1, 1])]
    assert payloads(stack(several), 3) == [payload_bytes(value) for value in several]
    assert payloads(stack([votes([(9,)], seed) for seed in range(2)]), 2) == [6, 6]


def test_the_gate_refuses_what_cannot_travel_and_says_who() -> None:
    good = votes([(5,)], 1)
    half = Votes({"layer|0": torch.full((5,), 0.5)}, torch.ones(()))
    why = "signs/layer|0 holds something else than -1 and 1"
    assert why_refused(half, Form.of(good)) == why
    passed, reasons = screen_uploads(stack([good, half, good]), Form.of(good), 3)
    assert reasons == {1: why}
    assert torch.equal(passed.signs["layer|0"], 2 * good.signs["layer|0"])
    bad = Means(torch.ones(2, 3), torch.tensor([1.0, 0.0]), torch.ones(2))
    assert why_refused(bad, Form.of(bad)) == "total is not zero where count is"
    assert screen_uploads(stack([means([1, 2]), bad]), Form.of(bad), 2)[1] == {
        1: why_refused(bad, Form.of(bad))
    }
    short = Means(torch.ones(3, 3), torch.ones(2), torch.ones(2))
    assert why_refused(short, Form.of(short)) == "total must begin with the shape of count"
    flags = Means(torch.ones(2, 3), torch.ones(2), torch.tensor([0.0, -1.0]))
    assert why_refused(flags, Form.of(flags)) == "here holds something else than 0 and 1"


def test_sums_of_signs_are_numbers() -> None:
    several = [votes([(70,)], seed) for seed in range(5)]
    total, _ = screen_uploads(stack(several), Form.of(several[0]), 5)
    expected = torch.stack([value.signs["layer|0"] for value in several]).sum(0)
    assert torch.equal(total.signs["layer|0"], expected)
    assert int(expected.abs().max()) > 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16, torch.uint8])
def test_integers_and_halves_are_not_summed(dtype: torch.dtype) -> None:
    wrong = Votes({"a": torch.ones(2)}, torch.ones((), dtype=dtype))
    name = str(dtype).removeprefix("torch.")
    assert why_not_summable(Form.of(wrong)) == (
        f"weight of Votes is {name}, and is to be summed: sums are of float32 or float64"
    )
    assert why_not_summable(Form.of(votes([(2,)], 0))) is None


def test_rows_of_a_field_that_does_not_exist_are_no_message() -> None:
    with pytest.raises(TypeError, match=r"the rows of Wrong\.total are those of counts, which is"):

        @message(reduce="sum")
        class Wrong:
            total: Tensor = field(metadata=rows_where("counts"))
            count: Tensor


FOUR = torch.zeros(4, dtype=torch.uint8)


@pytest.mark.parametrize(
    "arrays",
    [
        {"signs/a|33": FOUR, "weight": torch.ones(())},
        {"signs/a|32x-1": FOUR, "weight": torch.ones(())},
        {"signs/a|": FOUR, "weight": torch.ones(())},
        {"signs/a|" + "9" * 5000: FOUR, "weight": torch.ones(())},
        {"signs/a|zwei": FOUR, "weight": torch.ones(())},
        {"signs/a": FOUR, "weight": torch.ones(())},
        {"signs/a|32": torch.ones(4), "weight": torch.ones(())},
        {"signs|32": FOUR, "weight": torch.ones(())},
    ],
)
def test_damaged_bits_are_a_message_error(arrays: dict[str, Tensor]) -> None:
    with pytest.raises(MessageError, match="not a Votes"):
        unpack(Votes, safetensors.torch.save(arrays))


def test_damaged_rows_are_a_message_error() -> None:
    whole = safetensors.torch.load(pack(means([1, 0, 2])))
    for change in (
        {"total": torch.ones(3, 3)},
        {"total": torch.ones(())},
        {"count": torch.ones(3)},
    ):
        with pytest.raises(MessageError, match="not a Means"):
            unpack(Means, safetensors.torch.save({**whole, **change}))
    with pytest.raises(MessageError, match="not a Means"):
        unpack(Means, safetensors.torch.save({k: whole[k] for k in ("total", "here|3", "count|3")}))


@pytest.mark.slow
def test_a_small_blob_cannot_take_much_memory() -> None:
    wide = Means(torch.zeros(100, 10**6), torch.zeros(100), torch.zeros(100))
    blob = pack(wide)
    assert len(blob) < 1000
    with pytest.raises(MessageError, match="total would take 400000000 bytes of memory; at most"):
        unpack(Means, blob, limit=10**6)
    many = pack(votes([(80_000,)], 0))
    with pytest.raises(MessageError, match=r"layer\|0 would take 320000 bytes"):
        unpack(Votes, many, limit=len(many))
