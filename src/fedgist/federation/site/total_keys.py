"""A site's keys and its book for secure sums: whom it trusts, and which totals it has opened."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from fedgist.errors import KitError, MessageError, SiteError, first_line
from fedgist.federation.keys.certificates import SITE, check_client, fingerprint, is_signed, sign
from fedgist.federation.keys.kits import Kit
from fedgist.runs.files import atomic_files as files

T = TypeVar("T")


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
        self.names = {*(_read(self.path, TypeAdapter(list[str])) or [])}

    def holds(self, stage: str) -> bool:
        """Return whether shares were given for a stage."""
        return stage in self.names

    def repeats(self, message: str) -> bool:
        """Return whether a message, by its digest, is in a total."""
        return message in self.names

    def check(self, members: Collection[int]) -> None:
        """Accept each group: a message is in one total."""

    def add(self, stage: str, message: str, members: Collection[int] = ()) -> None:
        """Write a total down; return when it would survive a restart."""
        del members
        self.names |= {stage, message} - {""}
        files.write(self.path, json.dumps(sorted(self.names), indent=0) + "\n", private=True)


@dataclass
class FactsBook:
    """The sites whose totals of facts this site is in, in a file beside ``totals``.

    Facts do not change, so totals over several groups can be subtracted. A site knows only the
    groups that it is in itself, and no rule on those alone allows two groups and keeps each
    combination large. So all totals of facts are over the same sites, until the owner says that
    the data are new.
    """

    totals: TotalsBook
    path: Path
    names: tuple[str, ...]
    data: str

    def holds(self, stage: str) -> bool:
        """Return whether shares were given for a stage."""
        return self.totals.holds(stage)

    def repeats(self, message: str) -> bool:
        """Accept a message again: what matters is over which sites."""
        del message
        return False

    def check(self, members: Collection[int]) -> None:
        """Raise MessageError if a total of these data was opened over other sites."""
        before = groups_of(self.path).get(self.data)
        if before is not None and before != self._named(members):
            raise MessageError(
                "facts of these rows are in a total over other sites, and the difference would be "
                "of few sites: ask the same sites as before",
                "policy",
                "sums",
            )

    def add(self, stage: str, message: str, members: Collection[int]) -> None:
        """Write a total down; return when it would survive a restart."""
        del message
        groups = groups_of(self.path) | {self.data: self._named(members)}
        files.write(self.path, json.dumps(groups, indent=0) + "\n", private=True)
        self.totals.add(stage, "")

    def _named(self, members: Collection[int]) -> list[str]:
        return sorted(self.names[member] for member in members)


def groups_of(path: Path) -> dict[str, list[str]]:
    """Return the sites of the totals of facts, by the name of the data."""
    return _read(path, TypeAdapter(dict[str, list[str]])) or {}


def forget_group(path: Path, data: str) -> None:
    """Forget over which sites totals of some data were opened: the data are new."""
    groups = groups_of(path)
    if groups.pop(data, None) is not None:
        files.write(path, json.dumps(groups, indent=0) + "\n", private=True)


def _read(path: Path, kind: TypeAdapter[T]) -> T | None:
    """Return what a file holds; None if there is none."""
    if not path.exists():
        return None
    try:
        return kind.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        text = f"{path} cannot be read ({first_line(error)}): put it back from a copy"
        raise SiteError(text) from error
