"""Frames: the content of one message between server and site.

A frame is one byte for its kind, and its content. A *note* is a small JSON object. An envelope
crosses as one *begin* frame (the id of the request, the size, and the sender's signature) and
*pieces* of at most 1 MiB. The size is compared with a limit before any piece is held.

The signature covers the direction, the id and the envelope's header, which holds the digest of
every message. So a signed envelope cannot be sent again as another request or reply.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from fedgist.errors import MessageError
from fedgist.wire.envelope import LONGEST_HEADER, header_part

NOTE, BEGIN, PIECE = b"N", b"B", b"P"
PIECE_BYTES = 1 << 20
LARGEST_NOTE = 4 << 20  # bytes; a recipe is a note
LARGEST_FRAME = LARGEST_NOTE + 1  # bytes of any frame
ID_BYTES, SIZE_BYTES, LARGEST_SIGNATURE = 16, 8, 512
LONGEST_BEGINNING = 2 * LONGEST_HEADER
IN_MEMORY = 1 << 20  # bytes of an unfinished envelope; with a folder, more go to a file
TO_SITE, TO_SERVER = b"fedgist request ", b"fedgist reply "

Note = Mapping[str, object]


def note(content: Note) -> bytes:
    """Return a small JSON object as a frame."""
    try:
        frame = NOTE + json.dumps(content, allow_nan=False).encode()
    except ValueError as error:
        raise MessageError("a note holds a number that is not finite") from error
    if len(frame) > LARGEST_NOTE:
        raise MessageError(f"a note of {len(frame)} bytes; at most {LARGEST_NOTE} are accepted")
    return frame


def read_note(frame: bytes) -> dict[str, object]:
    """Return the JSON object of a frame."""
    if frame[:1] != NOTE or len(frame) > LARGEST_NOTE:
        raise MessageError("it is not a note of this version of fedgist")
    try:
        content = json.loads(frame[1:])
    except (ValueError, RecursionError) as error:
        raise MessageError("the note cannot be read") from error
    if not isinstance(content, dict):
        raise MessageError("the note is not an object")
    return content


def signed_bytes(direction: bytes, ident: bytes, envelope: bytes | memoryview) -> bytes:
    """Return the bytes that a signature of an envelope covers."""
    return direction + ident + bytes(header_part(envelope))


@dataclass(frozen=True)
class Begin:
    """The beginning of an envelope: the request's id, the envelope's size, and a signature."""

    ident: bytes
    size: int
    signature: bytes

    def frame(self) -> bytes:
        """Return the beginning as a frame."""
        return BEGIN + self.ident + self.size.to_bytes(SIZE_BYTES, "big") + self.signature


def read_begin(frame: bytes) -> Begin:
    """Return the beginning of an envelope that a frame holds."""
    start = 1 + ID_BYTES + SIZE_BYTES
    if frame[:1] != BEGIN or not start <= len(frame) <= start + LARGEST_SIGNATURE:
        raise MessageError("it is not the beginning of an envelope")
    size = int.from_bytes(frame[1 + ID_BYTES : start], "big")
    return Begin(frame[1 : 1 + ID_BYTES], size, frame[start:])


def pieces(parts: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the parts of an envelope as frames."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            yield b"".join((PIECE, view[start : start + PIECE_BYTES]))


@dataclass
class Assembly:
    """An envelope that is being received.

    It is kept in memory. With a ``folder``, a large envelope is kept in a file there, because many
    of them may arrive at once. The file has no name and vanishes with the process. As a context, an
    assembly is dropped if an exception leaves it.
    """

    begin: Begin
    folder: Path | None = None
    received: int = 0
    file: IO[bytes] = field(init=False, repr=False)
    open: ExitStack = field(init=False, repr=False)

    def __post_init__(self) -> None:
        most, folder = (0, None) if self.folder is None else (IN_MEMORY, str(self.folder))
        with ExitStack() as stack:
            self.file = stack.enter_context(tempfile.SpooledTemporaryFile(most, dir=folder))
            self.open = stack.pop_all()  # until the envelope is taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()

    def add(self, frame: bytes) -> bool:
        """Add a piece; return whether the envelope is complete."""
        if frame[:1] != PIECE:
            raise MessageError("it is not a piece of an envelope")
        self.received += len(frame) - 1
        if self.received > self.begin.size or len(frame) - 1 > PIECE_BYTES:
            raise MessageError("the pieces are larger than was announced")
        self.file.write(memoryview(frame)[1:])
        return self.received == self.begin.size

    def beginning(self) -> bytes:
        """Return the first bytes of the envelope, with all of its header."""
        self.file.seek(0)
        try:
            return self.file.read(LONGEST_BEGINNING)
        finally:
            self.file.seek(0, 2)

    def close(self) -> None:
        """Drop what was received."""
        self.open.close()

    def take(self) -> bytes:
        """Return the envelope, and close its file."""
        self.file.seek(0)
        with self.open:
            return self.file.read()
