"""Envelopes: typed messages as bytes, with a header that states the run, round, stage and client.

An envelope is a magic word, the length of a header, the header (JSON, checked by its schema), and
the messages as safetensors, one after the other. The header carries the run, the round, the stage
and, for each message, its registered type, its size and its digest. No byte is parsed before the
size is compared with a limit, and no message before its digest is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedgist.core.message import pack, registered, type_name, unpack
from fedgist.core.tree import Tree
from fedgist.engines.engine import Split
from fedgist.errors import FINAL, MessageError, RefusalKind, cut, key_of, kind_of, printable

MAGIC = b"fedgist1"
LONGEST_HEADER = 1 << 16  # bytes
CHECKSUM = 32  # bytes of the digest before the header
Number = Annotated[int, Field(ge=0, lt=1 << 53)]
LONGEST_REASON = 500  # characters
MOST_PHASES = 1000
AT_SITE = "the site's log says why"
Text = Annotated[str, Field(max_length=LONGEST_REASON)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Enclosed(_Strict):
    """A message in an envelope: its registered type, its size in bytes, its SHA-256."""

    type: Text
    size: Number
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Header(_Strict):
    """The header of an envelope.

    ``purpose`` is ``train`` or ``score`` for a server's request to a client, ``finish`` for its
    last download, ``reply`` for a client's messages, and ``refusal`` for a client's reason against
    an answer, with its ``kind``. The others are the steps of a secure sum. ``attempt`` counts the
    requests for this stage: a server repeats those without a reply if too few clients answered.
    ``steps`` are those that a client took in the stage's phases, if its time was limited.
    """

    purpose: Literal[
        "train", "score", "finish", "reply", "refusal", "share", "mask", "confirm", "unmask"
    ]
    run: Text
    round: Number
    stage: Text
    client: Number
    architecture: Text
    split: Split | None = None
    attempt: Number = 1
    reason: Text = ""
    kind: RefusalKind | None = None
    steps: Annotated[tuple[Number, ...], Field(max_length=MOST_PHASES)] | None = None
    messages: dict[Text, Enclosed] = {}

    @property
    def words(self) -> str:
        """A refusal in words: its kind and its reason, as one line."""
        return printable(f"{self.kind}: {self.reason}" if self.kind else self.reason)

    @property
    def is_final(self) -> bool:
        """Whether it is a refusal that asking again cannot change."""
        return self.purpose == "refusal" and self.kind in FINAL


@dataclass(frozen=True)
class Packed:
    """A message as bytes with its digest; a broadcast is packed only once."""

    about: Enclosed
    blob: bytes

    @staticmethod
    def of(message: Tree) -> Packed:
        """Pack a message."""
        blob = pack(message)
        name = type_name(type(message))
        return Packed(Enclosed(type=name, size=len(blob), digest=digest(blob)), blob)


def refusal(request: Header, error: BaseException) -> bytes:
    """Return a site's refusal of a request: the kind of the error, and what may leave of its text.

    The text of a MessageError is about the request alone, so it leaves. Of any other error only the
    key leaves, because its text may show rows.
    """
    about = key_of(error) or "it failed"
    text = str(error) if isinstance(error, MessageError) else f"{about}; {AT_SITE}"
    fields = {"purpose": "refusal", "kind": kind_of(error), "reason": cut(text, LONGEST_REASON)}
    return seal(request.model_copy(update=fields), {})


def seal(header: Header, messages: Mapping[str, Tree | Packed]) -> bytes:
    """Return an envelope with these messages, by name."""
    return b"".join(in_parts(header, messages))


def in_parts(header: Header, messages: Mapping[str, Tree | Packed]) -> tuple[bytes, ...]:
    """Return an envelope in parts: its beginning, and the bytes of each message."""
    packed = {n: m if isinstance(m, Packed) else Packed.of(m) for n, m in messages.items()}
    about = {name: message.about for name, message in packed.items()}
    without = {name for name in ("kind", "steps") if getattr(header, name) is None}
    filled = header.model_copy(update={"messages": about})
    head = filled.model_dump_json(exclude=without).encode()
    blobs = (message.blob for message in packed.values())
    return b"".join([MAGIC, len(head).to_bytes(4, "big"), _checksum(head), head]), *blobs


def unseal(envelope: bytes, limit: int) -> tuple[Header, dict[str, Any]]:
    """Return the header and the messages of an envelope."""
    if len(envelope) > limit:
        raise MessageError(f"an envelope of {len(envelope)} bytes; at most {limit} are accepted")
    header, rest = _header(envelope)
    messages: dict[str, Any] = {}
    for name, enclosed in header.messages.items():
        blob, rest = rest[: enclosed.size], rest[enclosed.size :]
        if len(blob) != enclosed.size or digest(blob) != enclosed.digest:
            raise MessageError(
                f"the message {name!r} is not what its digest says: it was cut or changed"
            )
        messages[name] = unpack(registered(enclosed.type), bytes(blob), limit)
    if rest:
        raise MessageError(f"there are {len(rest)} bytes after the last message")
    return header, messages


def digest(blob: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes, as hexadecimal digits."""
    return hashlib.sha256(blob).hexdigest()


def header_of(envelope: bytes) -> Header:
    """Return the header of an envelope, without its messages."""
    return _header(envelope)[0]


def header_part(envelope: bytes | memoryview) -> memoryview:
    """Return the beginning of an envelope up to its messages, whose digests it holds."""
    _, rest = _header(envelope)
    view = memoryview(envelope)
    return view[: len(view) - len(rest)]


def _checksum(head: bytes) -> bytes:
    return hashlib.sha256(head).digest()


def _header(envelope: bytes | memoryview) -> tuple[Header, memoryview]:
    view = memoryview(envelope)
    start = len(MAGIC) + 4 + CHECKSUM
    if bytes(view[: len(MAGIC)]) != MAGIC or len(view) < start:
        raise MessageError("it is not an envelope of this version of fedgist")
    length = int.from_bytes(view[len(MAGIC) : len(MAGIC) + 4], "big")
    if length > LONGEST_HEADER or start + length > len(view):
        raise MessageError(
            f"its header is to have {length} bytes; {len(view) - start} follow, and at most "
            f"{LONGEST_HEADER} are accepted"
        )
    head = bytes(view[start : start + length])
    if _checksum(head) != bytes(view[start - CHECKSUM : start]):
        raise MessageError("the header is not what its digest says: it was cut or changed")
    try:
        # strict JSON: no text in place of a number, no unknown key
        header = Header.model_validate_json(head)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole header"
        raise MessageError(f"the header cannot be read: {field}: {first['msg']}") from error
    return header, view[start + length :]
