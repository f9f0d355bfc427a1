"""Sums in codes of 8 and 16 bits: what a client rounded is what a server reads, bit for bit."""

from __future__ import annotations

from dataclasses import field
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from fedgist.core import random
from fedgist.core.message import Form, message, pack, payload_bytes, unpack, why_refused
from fedgist.core.rounded_numbers import CODES, Code, Rounded, rounded_rows, rounded_triangles
from fedgist.errors import MessageError

EXACTNESS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 0.5 / 127}


@message(reduce="sum")
class Sums:
    rows: Tensor = field(metadata=rounded_rows("int8"))
    second: Tensor = field(metadata=rounded_triangles("int8"))


def sums(form: Rounded, size: int, seed: int) -> Tensor:
    """Return three rows of counts and sums, or three triangles of second moments."""
    z = random.normal(random.key(seed), (3, 20, size))
    z = z * 10.0 ** random.normal(random.key(seed, "scale"), (3, 1, size)).clamp(-3, 3)
    if not form.triangles:
        return torch.cat([torch.full((3, 1), 20.0), z.sum(1)], 1)
    row, column = torch.triu_indices(size, size)
    return (z.mT @ z)[:, row, column]


forms = st.builds(Rounded, st.sampled_from(get_args(Code)), st.booleans())


@given(forms, st.integers(1, 12), st.integers(0, 2**31))
def test_rounding_twice_changes_nothing(form: Rounded, size: int, seed: int) -> None:
    values = sums(form, size, seed)
    once = form.rounded(values)
    assert torch.equal(form.rounded(once), once)
    exact = form.exact(once)
    sent = form.sent(form.codes(once, exact))
    assert torch.equal(form.received(exact, sent), once)
    assert sent.dtype == CODES[form.code][0]
    assert exact.nbytes + sent.nbytes == form.wire_bytes(*values.shape)


@given(forms, st.integers(1, 12), st.integers(0, 2**31))
def test_the_error_is_half_a_step_of_the_scale(form: Rounded, size: int, seed: int) -> None:
    values = sums(form, size, seed)
    far = (form.rounded(values) - values).abs()
    if form.triangles:
        row, column = torch.triu_indices(size, size)
        diagonal = values[:, row == column]
        scale = diagonal[:, row].sqrt() * diagonal[:, column].sqrt()
        assert torch.equal(form.rounded(values)[:, row == column], diagonal)
    else:
        scale = values[:, 1:].abs().amax(1, keepdim=True).expand_as(values)
        assert torch.equal(form.rounded(values)[:, 0], values[:, 0])
    assert bool((far <= 1.01 * EXACTNESS[form.code] * scale).all())


@given(forms, st.integers(0, 2**31))
def test_clients_stacked_are_rounded_one_by_one(form: Rounded, seed: int) -> None:
    stack = torch.stack([sums(form, 5, seed + i) for i in range(4)])
    stacked = torch.func.vmap(form.rounded)(stack)
    assert torch.equal(stacked, torch.stack([form.rounded(one) for one in stack]))


def packed() -> Sums:
    both = Rounded("int8"), Rounded("int8", triangles=True)
    return Sums(*(form.rounded(sums(form, 7, 3)) for form in both))


def test_a_message_crosses_the_wire_in_its_bytes() -> None:
    sent = packed()
    assert payload_bytes(sent) == 3 * (4 + 4 + 7) + 3 * (7 * 4 + 21)
    received = unpack(Sums, pack(sent))
    assert torch.equal(received.rows, sent.rows)
    assert torch.equal(received.second, sent.second)
    assert why_refused(received, Form.of(sent)) is None


def test_numbers_without_a_code_are_refused_by_name() -> None:
    sent = packed()
    between = Sums(sent.rows, sent.second * 1.001 + 0.001)
    assert why_refused(between, Form.of(sent)) == "second holds numbers that have no code in int8"


def test_zeros_and_tiny_numbers_have_codes() -> None:
    for code in get_args(Code):
        for values in (torch.zeros(2, 6), torch.full((2, 6), 1e-38)):
            rounded = Rounded(code, triangles=True).rounded(values)
            assert torch.equal(rounded[:, 1], torch.zeros(2))
            assert not bool(Rounded(code).rounded(values)[:, 1:].any())


@pytest.mark.parametrize("what", ["exact", "codes"])
def test_parts_that_do_not_fit_are_refused(what: str) -> None:
    arrays = load(pack(packed()))
    arrays[f"second|{what}"] = arrays[f"second|{what}"][:, :-1].contiguous()
    with pytest.raises(MessageError, match="not a Sums"):
        unpack(Sums, save(arrays))
