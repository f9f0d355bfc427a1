"""Frames and notes: whatever bytes come, the result is a value or a MessageError."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.errors import MessageError
from fedgist.federation.network.frames import (
    BEGIN,
    ID_BYTES,
    LARGEST_NOTE,
    LARGEST_SIGNATURE,
    NOTE,
    PIECE,
    PIECE_BYTES,
    TO_SERVER,
    TO_SITE,
    Assembly,
    Begin,
    note,
    pieces,
    read_begin,
    read_note,
    signed_bytes,
)
from fedgist.federation.network.invitation import Greeting, Hello, Invitation, Versions, parsed_note
from fedgist.wire.envelope import Header, seal

NUMBERS = st.integers() | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=10,
)
NOTES = st.dictionaries(st.text(st.characters()), VALUES)
FINITE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
KINDS = st.sampled_from(["", "N", "B", "P"]).map(str.encode)


@given(KINDS, st.binary() | st.text(st.characters()).map(json.dumps).map(str.encode))
def test_any_bytes_are_a_note_or_an_error(kind: bytes, content: bytes) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(read_note(kind + content), dict)


@settings(max_examples=50)
@given(st.dictionaries(st.text(st.characters()), FINITE))
def test_a_note_comes_back(content: dict[str, object]) -> None:
    assert read_note(note(content)) == content


@settings(max_examples=50)
@given(NOTES)
def test_a_note_of_any_values_is_a_frame_or_an_error(content: dict[str, object]) -> None:
    try:
        frame = note(content)
    except MessageError:
        return
    assert json.loads(frame[1:]) == json.loads(json.dumps(content))


@pytest.mark.parametrize(
    "content",
    [b'{"a":' * 100_000, b"[" * 100_000, b'{"a": ' + b"9" * 10_000 + b"}", b"\xff\xfe", b"NaN"],
)
def test_what_breaks_parsers_is_an_error(content: bytes) -> None:
    with pytest.raises(MessageError):
        read_note(NOTE + content)


def test_a_note_that_is_too_large_is_neither_made_nor_read() -> None:
    with pytest.raises(MessageError, match="at most"):
        note({"a": "x" * LARGEST_NOTE})
    with pytest.raises(MessageError, match="not a note"):
        read_note(NOTE + b" " * LARGEST_NOTE)


IDENTS = st.binary(min_size=ID_BYTES, max_size=ID_BYTES)
SIZES = st.integers(0, 2**64 - 1)


@given(IDENTS, SIZES, st.binary(max_size=LARGEST_SIGNATURE))
def test_a_beginning_comes_back(ident: bytes, size: int, signature: bytes) -> None:
    begin = Begin(ident, size, signature)
    assert read_begin(begin.frame()) == begin


@settings(max_examples=50)
@given(KINDS, st.binary(max_size=ID_BYTES + 8 + LARGEST_SIGNATURE + 2))
def test_any_bytes_are_a_beginning_or_an_error(kind: bytes, content: bytes) -> None:
    try:
        begin = read_begin(kind + content)
    except MessageError:
        return
    assert kind == BEGIN or content[:1] == BEGIN
    assert begin.frame() == kind + content


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_an_envelope_comes_back_from_its_pieces(parts: Sequence[bytes]) -> None:
    whole = b"".join(parts)
    assembly = Assembly(Begin(bytes(ID_BYTES), len(whole), b""))
    complete = [assembly.add(frame) for frame in pieces(parts)]
    assert complete == [*[False] * (len(complete) - 1), True][: len(complete)]
    assert assembly.beginning() == whole
    assert assembly.take() == whole


def test_large_parts_are_cut() -> None:
    sizes = [len(frame) - 1 for frame in pieces((bytes(2 * PIECE_BYTES + 3), b"end"))]
    assert sizes == [PIECE_BYTES, PIECE_BYTES, 3, 3]


@given(
    st.integers(0, 60),
    st.lists(st.binary(max_size=30) | st.binary(max_size=30).map(lambda b: PIECE + b), max_size=6),
)
def test_any_pieces_are_held_up_to_the_announced_size_or_an_error(
    size: int, frames: Sequence[bytes]
) -> None:
    taken = b""
    try:
        with Assembly(Begin(bytes(ID_BYTES), size, b"")) as assembly:
            for frame in frames:
                complete = assembly.add(frame)
                taken += frame[1:]
                assert complete == (len(taken) == size)
    except MessageError:
        assert assembly.file.closed
        return
    assert len(taken) <= size
    assert assembly.take() == taken


def test_a_piece_that_is_too_large_is_an_error_even_if_it_was_announced() -> None:
    assembly = Assembly(Begin(bytes(ID_BYTES), 2 * PIECE_BYTES, b""))
    with pytest.raises(MessageError, match="larger than was announced"), assembly:
        assembly.add(PIECE + bytes(PIECE_BYTES + 1))


def test_a_signature_covers_direction_id_and_header() -> None:
    header = Header(purpose="reply", run="r", round=1, stage="s", client=0, architecture="a")
    envelope, ident = seal(header, {}), bytes(ID_BYTES)
    other = seal(header.model_copy(update={"round": 2}), {})
    covered = {
        signed_bytes(TO_SITE, ident, envelope),
        signed_bytes(TO_SERVER, ident, envelope),
        signed_bytes(TO_SERVER, ident[:-1] + b"1", envelope),
        signed_bytes(TO_SERVER, ident, other),
    }
    assert len(covered) == 4


@given(st.binary())
def test_bytes_without_a_header_are_not_signed(blob: bytes) -> None:
    with pytest.raises(MessageError):
        signed_bytes(TO_SERVER, bytes(ID_BYTES), blob)


# ---------------------------------------------------------------- the notes of run_plan

Kind = type[Greeting] | type[Invitation] | type[Hello]
VALID: dict[Kind, dict[str, object]] = {
    Greeting: {"process": "p", "versions": Versions.own().model_dump()},
    Invitation: {
        "run": "ab" * 8,
        "recipe": "",
        "digest": "cd" * 32,
        "number": 0,
        "names": ["berlin"],
        "certificate": "",
        "last": [1, 0, "shared"],
        "state_lost": "refuse",
    },
    Hello: {"run": "ab" * 8, "digest": "cd" * 32, "number": 0},
}
KEYS = sorted({key for content in VALID.values() for key in content} | {"outlines", "refused"})


@settings(max_examples=50)
@given(st.sampled_from(list(VALID)), st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_values_are_a_valid_note_or_an_error(kind: Kind, changed: dict[str, object]) -> None:
    content = VALID[kind] | changed
    try:
        parsed = parsed_note(kind, content)
    except MessageError:
        return
    assert isinstance(parsed, kind)
    again = parsed_note(kind, read_note(note(parsed.model_dump(mode="json"))))
    assert again == parsed


@settings(max_examples=50)
@given(st.sampled_from(list(VALID)), NOTES)
def test_any_note_is_one_of_the_kinds_or_an_error(kind: Kind, content: dict[str, object]) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(parsed_note(kind, content), kind)


@pytest.mark.parametrize("kind", VALID)
def test_a_valid_note_comes_back(kind: Kind) -> None:
    parsed = parsed_note(kind, VALID[kind])
    assert parsed_note(kind, read_note(note(parsed.model_dump(mode="json")))) == parsed
