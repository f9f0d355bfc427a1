"""Sites and servers of a secure sum in one process, honest or not."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedgist.wire.secure.group import Group
from fedgist.wire.secure.member import Member, Unmasked
from fedgist.wire.secure.occasion import Advertised, Occasion
from fedgist.wire.secure.ring import Ring

OCCASION = Occasion("f00d", 3, "train", 1, "mlp", "digest")


@dataclass(frozen=True)
class Codes:
    """Credentials by codes with a key that the test's sites share: the server lacks it."""

    number: int
    key: bytes = b"of the sites alone"

    def sign(self, text: bytes) -> bytes:
        return self._code(self.number, text)

    @property
    def certificate(self) -> bytes:
        return str(self.number).encode()

    def is_signed(self, member: int, certificate: bytes, text: bytes, signature: bytes) -> bool:
        assert certificate == str(member).encode()
        return hmac.compare_digest(self._code(member, text), signature)

    def _code(self, member: int, text: bytes) -> bytes:
        return hmac.new(self.key, f"{member} ".encode() + text, hashlib.sha256).digest()


def members(numbers: Collection[int], least: int = 3, **about: Any) -> dict[int, Member]:
    occasion = about.pop("occasion", OCCASION)
    return {n: Member(n, occasion, Codes(n), least, **about) for n in numbers}


@dataclass
class View:
    """All that a server has received."""

    advertised: list[Advertised] = field(default_factory=list)
    sealed: dict[int, Mapping[int, bytes]] = field(default_factory=dict)
    masked: dict[int, Ring] = field(default_factory=dict)
    confirmed: dict[int, bytes] = field(default_factory=dict)
    unmasked: dict[int, Unmasked] = field(default_factory=dict)


def until_masked(
    sites: Mapping[int, Member],
    values: Mapping[int, Ring],
    lost: Sequence[Collection[int]] = ((), (), ()),
) -> tuple[Group, View]:
    """Do the first three steps; ``lost[i]`` are the sites that are gone from step i on."""
    view, alive = View(), set(sites) - set(lost[0])
    view.advertised = [sites[n].advertise() for n in sorted(alive)]
    length = len(next(iter(values.values())))
    group = Group(next(iter(sites.values())).occasion, length)
    group.advertised = {a.member: a for a in view.advertised}
    alive -= set(lost[1])
    view.sealed = {n: sites[n].share(view.advertised) for n in sorted(alive)}
    group.sealed = dict(view.sealed)
    alive -= set(lost[2])
    for n in sorted(alive):
        view.masked[n] = sites[n].mask(group.shares_for(n), values[n])
        group.add_masked(n, view.masked[n])
    return group, view


def added(
    sites: Mapping[int, Member],
    values: Mapping[int, Ring],
    lost: Sequence[Collection[int]] = ((), (), (), (), ()),
) -> tuple[Ring, View]:
    """Do all steps of an honest server; return the total and what the server saw."""
    lost = [*lost, *[()] * (5 - len(lost))]
    group, view = until_masked(sites, values, lost[:3])
    alive = set(view.masked) - set(lost[3])
    for n in sorted(alive):
        view.confirmed[n] = sites[n].confirm(frozenset(view.masked))
    alive -= set(lost[4])
    for n in sorted(alive):
        view.unmasked[n] = sites[n].unmask(view.confirmed)
    return group.total(view.unmasked), view


def numbers(count: int, length: int, seed: int = 0) -> dict[int, Ring]:
    draws = np.random.default_rng(seed)
    return {n: draws.integers(0, 2**40, length, dtype=np.uint64) for n in range(count)}
