"""A site's keys and its book for secure sums: whom it trusts, and which totals it has opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from fedgist.errors import KitError, SiteError, first_line
from fedgist.federation.keys.certificates import SITE, check_client, fingerprint, is_signed, sign
from fedgist.federation.keys.kits import Kit
from fedgist.runs.files import atomic_files as files


@dataclass(frozen=True)
class KitCredentials:
    """The keys of a kit. ``names`` are those of all sites, ``pinned`` fingerprints by name."""

    kit: Kit
    names: tuple[str, ...]
    pinned: Mapping[str, str]

    @property
    def certificate(self) -> bytes:
        """The site's certificate."""
        return self.kit.certificate

    def sign(self, text: bytes) -> bytes:
        """Return the site's signature."""
        return sign(self.kit.key, text)

    def is_signed(self, member: int, certificate: bytes, text: bytes, signature: bytes) -> bool:
        """Return whether a signature is that of the site of this number."""
        try:
            identity = check_client(certificate, self.kit.root)
        except KitError:
            return False
        if identity.role != SITE or self.names[member : member + 1] != (identity.name,):
            return False
        other = identity.name != self.kit.name
        if other and self.pinned and self.pinned.get(identity.name) != fingerprint(certificate):
            return False
        return is_signed(certificate, text, signature)


@dataclass
class TotalsBook:
    """The stages and messages for which a site gave shares in any run, in a file."""

    path: Path
    names: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = set()
        if self.path.exists():
            try:
                self.names = set(TypeAdapter(list[str]).validate_json(self.path.read_bytes()))
            except (OSError, ValueError) as error:
                text = f"{self.path} cannot be read ({first_line(error)}): put it back from a copy"
                raise SiteError(text) from error

    def holds(self, name: str) -> bool:
        """Return whether shares were given for a stage, or for a message by its digest."""
        return name in self.names

    def add(self, *names: str) -> None:
        """Write them down; return when they would survive a restart."""
        self.names |= {*names}
        files.write(self.path, json.dumps(sorted(self.names), indent=0) + "\n", private=True)
