"""Messages over the wire: round trips, sizes, and the gate."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.core.message import (
    Form,
    Nothing,
    message,
    pack,
    payload_bytes,
    reduction,
    registered,
    total,
    type_name,
    unpack,
    why_refused,
)
from fedgist.core.tree import build, named, tree
from fedgist.errors import MessageError

ITEM_BYTES = {torch.uint8: 1, torch.bool: 1, torch.int64: 8, torch.float16: 2, torch.float32: 4}
NUMPY = {"U8": np.uint8, "BOOL": np.bool_, "I64": np.int64, "F16": np.float16, "F32": np.float32}
few = settings(max_examples=60)


@tree
class Inner:
    weights: dict[str, Tensor]
    bias: Tensor


@message(reduce="each")
class Outer:
    x: Tensor
    inner: Inner
    pools: dict[str, dict[str, Tensor]]
    perhaps: Tensor | None = None


@message(reduce="sum")
class Pair:
    a: Tensor
    b: Tensor


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw a tensor of any shape and type, laid out in memory in any way."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(list(ITEM_BYTES)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randint(0, 200, shape, generator=generator).to(dtype)
    layout = draw(st.sampled_from(["plain", "strided", "turned", "part"]))
    if layout == "strided":
        return torch.stack([values, values], dim=-1)[..., 0]
    if layout == "turned" and values.dim() > 1:
        return values.transpose(0, -1)
    return torch.stack([values, values])[1] if layout == "part" else values


names = st.text(min_size=1, max_size=5).filter(lambda s: "/" not in s)
dicts = st.dictionaries(names, tensors(), max_size=3)
messages = st.builds(
    Outer,
    x=tensors(),
    inner=st.builds(Inner, weights=dicts, bias=tensors()),
    pools=st.dictionaries(
        names, st.dictionaries(names, tensors(), min_size=1, max_size=2), max_size=2
    ),
    perhaps=st.none() | tensors(),
)


def plain(value: object) -> Any:
    """Return a value as lists and dictionaries, to be compared with ==."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_of(v)]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors_of(getattr(value, f.name))]
    return []


def read_bytes_or_empty(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@few
@given(messages)
def test_a_message_survives_the_wire(value: Outer) -> None:
    assert plain(unpack(Outer, pack(value))) == plain(value)


@few
@given(messages)
def test_a_message_survives_being_named(value: Outer) -> None:
    assert plain(build(Outer, named(value))) == plain(value)


@few
@given(messages)
def test_payload_is_the_bytes_of_the_declared_tensors(value: Outer) -> None:
    # rejects counting elements, or bytes of the serialized form
    assert payload_bytes(value) == sum(t.numel() * ITEM_BYTES[t.dtype] for t in tensors_of(value))


@few
@given(messages)
def test_a_packed_message_is_a_header_and_raw_numbers_and_no_code(value: Outer) -> None:
    blob = pack(value)
    (length,) = struct.unpack("<Q", blob[:8])
    header, body = json.loads(blob[8 : 8 + length]), blob[8 + length :]
    header.pop("__metadata__", None)
    assert len(body) == payload_bytes(value)
    arrays = named(value)
    assert set(header) == set(arrays)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        array = np.frombuffer(body[start:end], dtype=NUMPY[entry["dtype"]]).reshape(entry["shape"])
        assert array.tolist() == arrays[name].tolist()


STORE = torch.arange(12.0)


@pytest.mark.parametrize(
    "value",
    [
        Pair(STORE, STORE),
        Pair(STORE[:8], STORE[4:]),
        Pair(STORE[:3].expand(4, 3)[0], STORE[:3].expand(4, 3)[1]),
        Pair(STORE[0], STORE[0]),
    ],
    ids=["same", "overlapping", "expanded", "scalars"],
)
def test_tensors_that_share_storage_travel(value: Pair) -> None:
    assert plain(unpack(Pair, pack(value))) == plain(value)


def test_gradients_do_not_travel() -> None:
    w = torch.ones(2, requires_grad=True)
    assert not unpack(Pair, pack(Pair(w, 2 * w))).b.requires_grad


WHOLE = pack(Pair(torch.arange(3.0), torch.tensor(1)))


@few
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x80\x04\x95.")
@example(struct.pack("<Q", 2**63) + b"{}")
@example(read_bytes_or_empty({}))
@example(read_bytes_or_empty({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"1"))
def test_garbage_is_a_value_error(blob: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # whatever the reader found wrong with it
        unpack(Pair, blob)


@pytest.mark.parametrize("shape", [[0, 2**63], [0, 2**62, 5]])
def test_a_shape_that_torch_cannot_make_is_a_value_error(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="not a Pair"):
        unpack(
            Pair,
            read_bytes_or_empty({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}),
        )


@pytest.mark.parametrize("length", range(0, len(WHOLE), 7))
def test_a_truncated_message_is_a_value_error(length: int) -> None:
    with pytest.raises(ValueError, match="not a Pair"):
        unpack(Pair, WHOLE[:length])


@settings(max_examples=300)
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_damaged_message_is_a_value_error_or_a_message(place: int, byte: int) -> None:
    try:
        value = unpack(Pair, WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :])
    except ValueError:
        return
    assert isinstance(value, Pair)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"a": STORE}, "'b' is missing"),
        (
            {"a": STORE[:2].clone(), "b": STORE[2:].clone(), "c": {"d": torch.ones(1)}},
            "Pair has no field for 'c/d'",
        ),
    ],
)
def test_a_message_of_another_type_says_what_is_wrong(arrays: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        unpack(Pair, pack(arrays))


GOOD = Pair(torch.ones(2, 3), torch.zeros((), dtype=torch.int64))


@message(reduce="sum")
class Named:
    rows: dict[str, torch.Tensor]


EXPECTED = Form.of(GOOD)
NAMED = Form.of(Named({"a": GOOD.a, "b": GOOD.b}))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (GOOD, None),
        (Pair(torch.full((2, 3), float("nan")), GOOD.b), "a is not finite"),
        (Pair(torch.tensor([[0, 0, 0], [0, 0, -float("inf")]]), GOOD.b), "a is not finite"),
        (Pair(torch.ones(2, 3).half(), GOOD.b), "a is float16, not float32"),
        (Pair(torch.ones(3, 2), GOOD.b), r"a has shape [3, 2], not [2, 3]"),
        (Pair(torch.ones(10**6, 3), GOOD.b), r"a has shape [1000000, 3], not [2, 3]"),
        (Pair(GOOD.a, torch.zeros(1, dtype=torch.int64)), r"b has shape [1], not []"),
        (Nothing(), "it is a Nothing, not a Pair"),
        (Named({"x": GOOD.b}), "it is a Named, not a Pair"),
    ],
)
def test_the_gate_says_why_it_refuses(value: object, why: str | None) -> None:
    assert why_refused(value, EXPECTED) == why


def test_the_gate_names_what_is_missing_or_too_much() -> None:
    assert why_refused(Named({"a": GOOD.a}), NAMED) == "rows/b is missing"
    extra = Named({"a": GOOD.a, "b": GOOD.b, "c": GOOD.b})
    assert why_refused(extra, NAMED) == "rows/c was not asked for"


def test_the_norm_is_that_of_all_arrays_together() -> None:
    # rejects a bound on each array by itself
    value = Named({"a": torch.full((1,), 3.0), "b": torch.full((1,), 4.0)})
    form = Form.of(value)
    assert why_refused(value, dataclasses.replace(form, max_norm=5.0)) is None
    why = "its norm is 5, above clients.max_norm = 4.9"
    assert why_refused(value, dataclasses.replace(form, max_norm=4.9)) == why


def test_a_type_is_found_by_its_registered_name_alone() -> None:
    assert registered(type_name(Pair)) is Pair
    for name in ("os:system", "fedgist.core.message:Form", ""):
        with pytest.raises(MessageError, match="unknown message type"):
            registered(name)


def test_an_array_with_an_empty_key_is_no_message() -> None:
    # seen: it was built, and the gate raised in place of refusing
    for name in ("rows/", "rows//a", "/"):
        blob = safetensors.torch.save({name: torch.zeros(1)})
        with pytest.raises(MessageError, match="not a Named"):
            unpack(Named, blob)


def test_total_adds_every_array_and_leaves_the_terms_alone() -> None:
    terms = [Pair(torch.full((2,), float(i)), torch.tensor(i)) for i in range(4)]
    added = total(terms)
    assert (added.a.tolist(), int(added.b)) == ([6.0, 6.0], 6)
    assert terms[0].a.tolist() == [0.0, 0.0]


def test_a_message_says_how_it_reaches_the_server() -> None:
    assert (reduction(Pair), reduction(Outer), reduction(Nothing)) == ("sum", "each", "sum")
    assert payload_bytes(Nothing()) == 0
    assert plain(unpack(Nothing, pack(Nothing()))) == {}
    with pytest.raises(TypeError, match="Inner is not a message"):
        reduction(Inner)
