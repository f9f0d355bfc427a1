"""The roster: the sites of a federation, their numbers, their certificates, and what is revoked.

The server reads it from ``roster.json`` in its kit, and again whenever the file changes. A site's
number is its position in the federation. Numbers are only added: a number is never given to another
site, also after its site was revoked.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from fedgist.core.bounds import NonNegativeInt
from fedgist.errors import InputError, KitError, listed
from fedgist.federation.keys.certificates import ADMINISTRATOR, SITE, Identity, serial_text
from fedgist.federation.keys.kits import FORMAT, FederationName, MemberName, read_file
from fedgist.options import CLOSED, checked
from fedgist.runs.files import atomic_files

ROSTER = "roster.json"

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}\z")]


@dataclass(frozen=True)
class Roster:
    """Who belongs to a federation.

    ``numbers`` holds the number of every site that was ever added, in their order. ``serials``
    holds the serials of all certificates by name, oldest first, for sites, administrators and the
    server. ``keys`` holds the fingerprint of each certificate's public key by serial.
    """

    federation: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    administrators: tuple[str, ...] = ()
    serials: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    keys: Mapping[int, str] = field(default_factory=dict)
    revoked: frozenset[int] = frozenset()

    def why_refused(self, identity: Identity) -> str | None:
        """Return why the server refuses a client with a valid certificate; None if it does not.

        A certificate whose serial is not in the roster is accepted: after a renewal, the server may
        still have the roster from before. The authority's roster lists each certificate before it
        exists, so a revocation of a name always includes all of its certificates.
        """
        members = {SITE: self.numbers, ADMINISTRATOR: self.administrators}.get(identity.role, ())
        if identity.name not in members:
            kind = ADMINISTRATOR if identity.role == ADMINISTRATOR else SITE
            return f"{identity.name!r} is not one of this federation's {kind}s"
        if identity.serial in self.revoked:
            return f"its certificate (serial {serial_text(identity.serial)}) was revoked"
        return None

    def with_site(self, name: str) -> Roster:
        """Return the roster with another site, which gets the next number."""
        if name in self.numbers:
            raise KitError(f"{name} is a site already, with the number {self.numbers[name]}")
        if name in self.administrators:
            raise KitError(f"{name} is an administrator's name: give the site another one")
        number = 1 + max(self.numbers.values(), default=-1)
        return replace(self, numbers=MappingProxyType({**self.numbers, name: number}))

    def with_certificate(self, name: str, serial: int, key: str) -> Roster:
        """Return the roster with another certificate; ``key`` is its public key's fingerprint."""
        serials = (*self.serials.get(name, ()), serial)
        return replace(
            self,
            serials=MappingProxyType({**self.serials, name: serials}),
            keys=MappingProxyType({**self.keys, serial: key}),
        )

    def with_revoked(self, serials: Collection[int]) -> Roster:
        """Return the roster with revoked certificates."""
        return replace(self, revoked=self.revoked | frozenset(serials))

    def is_revoked(self, name: str) -> bool:
        """Return whether a name has had certificates, and all of them are revoked."""
        serials = self.serials.get(name, ())
        return bool(serials) and self.revoked.issuperset(serials)

    def is_key_revoked(self, name: str, key: str) -> bool:
        """Return whether a key of this name has had certificates, and all of them are revoked."""
        serials = [s for s in self.serials.get(name, ()) if self.keys[s] == key]
        return bool(serials) and self.revoked.issuperset(serials)


class _Certificate(BaseModel):
    model_config = CLOSED

    serial: Hex
    key: Hex


class _RosterTable(BaseModel):
    """The content of ``roster.json``."""

    model_config = CLOSED

    format: Literal[1]
    federation: FederationName
    sites: dict[MemberName, NonNegativeInt]
    administrators: tuple[MemberName, ...]
    certificates: dict[MemberName, tuple[_Certificate, ...]]
    revoked: tuple[Hex, ...]


def read_roster(path: Path) -> Roster:
    """Read a roster.

    Raises
    ------
    KitError
        If the file is missing or damaged.
    """
    blob = read_file(path, "copy it from the folder server of the authority's KITS")
    try:
        file: _RosterTable = checked(_RosterTable, json.loads(blob))
    except InputError as error:
        raise KitError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise KitError(f"{path} is damaged: it is no JSON; copy it from the authority") from error
    _check(path, file)
    issued = {name: file.certificates[name] for name in file.certificates}
    return Roster(
        federation=file.federation,
        numbers=MappingProxyType(dict(file.sites)),
        administrators=file.administrators,
        serials=MappingProxyType({n: tuple(int(c.serial, 16) for c in issued[n]) for n in issued}),
        keys=MappingProxyType({int(c.serial, 16): c.key for n in issued for c in issued[n]}),
        revoked=frozenset(int(serial, 16) for serial in file.revoked),
    )


def _check(path: Path, file: _RosterTable) -> None:
    """Check what holds between the parts of a roster."""
    numbers = list(file.sites.values())
    if twice := sorted({n for n in numbers if numbers.count(n) > 1}):
        raise KitError(f"{path}: sites: several sites have the number {listed(twice)}")
    if both := sorted(set(file.sites) & set(file.administrators)):
        raise KitError(f"{path}: administrators: {listed(both)} is also a site's name")
    serials = [int(c.serial, 16) for issued in file.certificates.values() for c in issued]
    if len(set(serials)) < len(serials):
        raise KitError(f"{path}: certificates: several certificates have the same serial")


def write_roster(path: Path, roster: Roster) -> None:
    """Replace the roster's file; readers see the old or the new one, never a part."""
    issued = {
        name: [{"serial": serial_text(serial), "key": roster.keys[serial]} for serial in serials]
        for name, serials in roster.serials.items()
    }
    content = {
        "format": FORMAT,
        "federation": roster.federation,
        "sites": dict(roster.numbers),
        "administrators": list(roster.administrators),
        "certificates": issued,
        "revoked": [serial_text(serial) for serial in sorted(roster.revoked)],
    }
    atomic_files.write(path, json.dumps(content, indent=2) + "\n")


@dataclass
class RosterFile:
    """The roster in the server's kit, which is read again whenever it changes."""

    path: Path
    roster: Roster = field(init=False)
    seen: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.roster = read_roster(self.path)

    def now(self) -> Roster:
        """Return the roster; the last good one if the file cannot be read."""
        try:
            about = self.path.stat()
            if (mark := (about.st_mtime_ns, about.st_size)) != self.seen:
                self.roster, self.seen = read_roster(self.path), mark
        except (OSError, KitError):
            pass
        return self.roster
