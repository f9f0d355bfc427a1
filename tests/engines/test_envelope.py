"""Envelopes: what was sealed comes out again, and nothing else does."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.core.message import message
from fedgist.core.method import Count
from fedgist.errors import MessageError
from fedgist.wire.envelope import CHECKSUM, MAGIC, Header, seal, unseal

LIMIT = 1 << 20


@message(reduce="each")
class Several:
    arrays: dict[str, torch.Tensor]


def header(**changes: Any) -> Header:
    fields = {"purpose": "train", "run": "r", "round": 3, "stage": "train", "client": 1}
    return Header(**{**fields, "architecture": "mlp", **changes})


GOOD = seal(
    header(), {"download": Several({"a": torch.arange(6.0)}), "loss": Count(torch.ones(()))}
)


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 5), max_size=4),
    st.integers(0, 2**53 - 1),
    st.text(max_size=20),
)
def test_what_was_sealed_comes_out(sizes: dict[str, int], number: int, stage: str) -> None:
    arrays = {name: torch.arange(float(n)) for name, n in sizes.items() if "/" not in name}
    sealed = seal(header(round=number, stage=stage), {"m": Several(arrays)})
    back, messages = unseal(sealed, LIMIT)
    assert (back.round, back.stage) == (number, stage)
    assert messages["m"].arrays.keys() == arrays.keys()
    assert all(torch.equal(messages["m"].arrays[name], a) for name, a in arrays.items())


@settings(max_examples=200)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place: int, by: int) -> None:
    changed = bytearray(GOOD)
    changed[place] ^= by
    with pytest.raises(MessageError):
        unseal(bytes(changed), LIMIT)


@settings(max_examples=100)
@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda blob: MAGIC + blob))
def test_no_bytes_at_all_do_anything_but_raise(blob: bytes) -> None:
    with pytest.raises(MessageError):
        unseal(blob, LIMIT)


@pytest.mark.parametrize("cut", [1, 30, len(GOOD) // 2, len(GOOD) - 1])
def test_a_cut_envelope_is_refused(cut: int) -> None:
    with pytest.raises(MessageError):
        unseal(GOOD[:cut], LIMIT)


def test_the_size_is_compared_before_anything_is_parsed() -> None:
    with pytest.raises(MessageError, match="an envelope of 2000 bytes; at most 1000 are accepted"):
        unseal(b"x" * 2000, 1000)


def forged(**changes: Any) -> bytes:
    """Return an envelope with a changed header that has the right digest, as a forger makes it."""
    start = len(MAGIC) + 4 + CHECKSUM
    length = int.from_bytes(GOOD[len(MAGIC) : len(MAGIC) + 4], "big")
    fields = json.loads(GOOD[start : start + length])
    for key, value in changes.items():
        if key == "type":
            fields["messages"]["download"]["type"] = value
        else:
            fields[key] = value
    head = json.dumps(fields).encode()
    checksum = hashlib.sha256(head).digest()
    return MAGIC + len(head).to_bytes(4, "big") + checksum + head + GOOD[start + length :]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"type": "os:system"}, "unknown message type 'os:system'"),
        ({"type": "fedgist.core.method:Method"}, "unknown message type"),
        ({"round": "3"}, "header cannot be read: round"),
        ({"round": -1}, "header cannot be read: round"),
        ({"round": 1e400}, "header cannot be read"),
        ({"purpose": "shutdown"}, "header cannot be read: purpose"),
        ({"more": 1}, "header cannot be read: more"),
        ({"stage": "s" * 1000}, "header cannot be read: stage"),
    ],
)
def test_a_forged_header_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(MessageError, match=says):
        unseal(forged(**changes), LIMIT)
