"""Files that a server and its sites exchange in place of a network: signed, whole or refused.

A file holds a header with the sender's certificate, the sender's signature, and the content. The
signature covers the header and, by its digest, the content. A site's file holds its reply to the
only exchange of a run; the server's file holds every site's last download.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from fedgist.errors import FederationError, KitError, MessageError, first_line
from fedgist.federation.keys.certificates import (
    SITE,
    Identity,
    check_client,
    check_server,
    is_signed,
    sign,
)
from fedgist.federation.keys.kits import Kit, split_address
from fedgist.federation.network.invitation import Hex, Versions, check_versions
from fedgist.options import CLOSED
from fedgist.runs.files import atomic_files
from fedgist.wire.envelope import digest

MAGIC = b"fedgist file 1\n"
SUFFIX = ".fedgist"
SIZE_BYTES, SIGNATURE_BYTES = 4, 2
LONGEST_HEADER = 1 << 16
_NAMES = {
    "reply": "a site's reply (site --to-file)",
    "models": "the sites' models (models.fedgist in the server's run directory)",
}
LENGTH_BYTES = 8  # before each of several envelopes


class FileHeader(BaseModel):
    """What a file is: its kind, of which run and recipe, whose, and the digest of its content."""

    model_config = CLOSED

    kind: Literal["reply", "models"]
    federation: str
    run: Hex
    recipe: Hex
    versions: Versions
    certificate: str
    size: int
    content: Hex


@dataclass(frozen=True)
class SignedFile:
    """A checked file: its header, who made it, and its content."""

    path: Path
    header: FileHeader
    content: bytes
    identity: Identity | None  # a site; None: the server


def write_signed(path: Path, kit: Kit, kind: str, run: str, recipe: str, content: bytes) -> None:
    """Write a file with the key of a kit."""
    header = FileHeader.model_validate(
        {
            "kind": kind,
            "federation": kit.federation,
            "run": run,
            "recipe": recipe,
            "versions": Versions.own(),
            "certificate": kit.certificate.decode(),
            "size": len(content),
            "content": digest(content),
        }
    )
    head = header.model_dump_json().encode()
    signature = sign(kit.key, MAGIC + head)
    sizes = len(head).to_bytes(SIZE_BYTES, "big"), len(signature).to_bytes(SIGNATURE_BYTES, "big")
    atomic_files.write(path, b"".join([MAGIC, *sizes, head, signature, content]), private=True)


def read_signed(path: Path, kit: Kit, kind: str, most: int | None = None) -> SignedFile:
    """Read a file of another member of a kit's federation.

    Raises
    ------
    MessageError
        If it is cut, changed, larger than ``most`` bytes, of another kind or federation, or not
        signed by whom its certificate names. The message begins with the path.
    """
    try:
        return _checked(path, kit, kind, most)
    except FileNotFoundError as error:
        where = "the server's run directory has it" if kind == "models" else "a site writes it"
        raise MessageError(f"there is no {path}: {where}") from error
    except (OSError, KitError, MessageError, FederationError) as error:
        raise MessageError(f"{path}: {first_line(error)}") from error


def _checked(path: Path, kit: Kit, kind: str, most: int | None) -> SignedFile:
    size = path.stat().st_size
    if most is not None and size > most + LONGEST_HEADER:
        raise MessageError(f"it has {size} bytes; at most {most} are expected")
    head, signature, content = _parts(path.read_bytes())
    try:
        header = FileHeader.model_validate_json(head)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise MessageError(f"its header cannot be read: {key}: {first['msg']}") from error
    if len(content) != header.size or digest(content) != header.content:
        raise MessageError(
            "its content is not what its header says: it was cut or changed: send it again"
        )
    check_versions(header.versions, Versions.own())
    if (header.kind, header.federation) != (kind, kit.federation):
        raise MessageError(
            f"it holds {_NAMES[header.kind]} of the federation {header.federation}, and needed are "
            f"{_NAMES[kind]} of {kit.federation}"
        )
    identity = _signer(header, kit)
    if not is_signed(header.certificate.encode(), MAGIC + head, signature):
        raise MessageError("its signature is not by the key of its certificate")
    return SignedFile(path, header, content, identity)


def certificate_in(path: Path) -> bytes:
    """Return the certificate of whoever signed a file of this member's own, which is not checked.

    Raises
    ------
    MessageError
        If the file is damaged.
    """
    try:
        head, _, _ = _parts(path.read_bytes())
        return FileHeader.model_validate_json(head).certificate.encode()
    except (MessageError, ValidationError) as error:
        raise MessageError(f"{path}: {first_line(error)}") from error


def _parts(blob: bytes) -> tuple[bytes, bytes, bytes]:
    """Return header, signature and content."""
    start = len(MAGIC) + SIZE_BYTES + SIGNATURE_BYTES
    if not blob.startswith(MAGIC) or len(blob) < start:
        raise MessageError("it is no file of this version of fedgist")
    sizes = blob[len(MAGIC) : start]
    length = int.from_bytes(sizes[:SIZE_BYTES], "big")
    signed = int.from_bytes(sizes[SIZE_BYTES:], "big")
    if length > LONGEST_HEADER or len(blob) < start + length + signed:
        raise MessageError("it was cut: send it again")
    rest = blob[start + length :]
    return blob[start : start + length], rest[:signed], rest[signed:]


def _signer(header: FileHeader, kit: Kit) -> Identity | None:
    """Return the site that a certificate names, or None for the server, after its check."""
    certificate = header.certificate.encode()
    if header.kind == "models":
        check_server(certificate, kit.root, split_address(kit.address)[0])
        return None
    identity = check_client(certificate, kit.root)
    if identity.role != SITE:
        raise MessageError(f"it is signed by {identity.role} {identity.name}, not by a site")
    return identity


def joined(envelopes: Sequence[bytes]) -> bytes:
    """Return envelopes one behind the other, as the content of a file."""
    return b"".join(part for e in envelopes for part in (len(e).to_bytes(LENGTH_BYTES, "big"), e))


def envelopes_in(content: bytes) -> list[bytes]:
    """Return the envelopes in the content of a file."""
    found, at = [], 0
    while at < len(content):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(content[at:start], "big")
        found.append(content[start:at])
    return found
