"""A site's part in a secure sum: five steps, each of them once, and none for another group.

The letters of figure 4 are in the functions' docstrings. Whatever is wrong ends the site's part: it
answers no further step of that attempt.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fedgist.errors import MessageError
from fedgist.wire.secure import masks, shares
from fedgist.wire.secure.occasion import Advertised, Occasion, survivors_text
from fedgist.wire.secure.ring import Ring

STEPS = ("advertise", "share", "mask", "confirm", "unmask")


class Credentials(Protocol):
    """The keys that members know each other by."""

    @property
    def certificate(self) -> bytes:
        """The site's certificate."""

    def sign(self, text: bytes) -> bytes:
        """Return this site's signature."""

    def is_signed(self, member: int, certificate: bytes, text: bytes, signature: bytes) -> bool:
        """Return whether a signature is by the key of a certificate, which is the member's."""


@dataclass(frozen=True)
class Unmasked:
    """What a member tells of the others, never both of one.

    ``keys`` are shares of the mask keys of those who left after they had shared, and ``seeds`` of
    the own masks of those whose messages are in the total.
    """

    keys: Mapping[int, bytes]
    seeds: Mapping[int, bytes]


@dataclass
class Member:
    """One site in one attempt at a total.

    ``number`` is the site's, and ``least`` the number of sites of the smallest group that it joins.
    """

    number: int
    occasion: Occasion
    credentials: Credentials
    least: int
    sealing: bytes = field(default_factory=lambda: secrets.token_bytes(masks.KEY), repr=False)
    masking: bytes = field(default_factory=lambda: secrets.token_bytes(masks.KEY), repr=False)
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(masks.KEY), repr=False)
    steps: list[str] = field(default_factory=list)
    others: dict[int, Advertised] = field(default_factory=dict, repr=False)
    received: dict[int, bytes] = field(default_factory=dict, repr=False)
    survivors: frozenset[int] = frozenset()

    def advertise(self) -> Advertised:
        """Return this site's public keys (round 0)."""
        self._step("advertise")
        keys = masks.public_of(self.sealing), masks.public_of(self.masking)
        unsigned = Advertised(self.number, *keys, self.credentials.certificate)
        signature = self.credentials.sign(unsigned.signed_text(self.occasion))
        return replace(unsigned, signature=signature)

    def share(self, advertised: Sequence[Advertised]) -> dict[int, bytes]:
        """Return a sealed share of this site's secrets for each other member (round 1)."""
        self._step("share")
        self.others = {other.member: other for other in advertised}
        self._check_group(advertised)
        self.occasion = self.occasion.of_group(advertised)
        least, places = shares.threshold(len(self.others)), [n + 1 for n in self.others]
        of_key = shares.split(self.masking, places, least)
        of_seed = shares.split(self.seed, places, least)
        self.received[self.number] = of_key[self.number + 1] + of_seed[self.number + 1]
        out = {}
        for other in self._others():
            about = self.occasion.text("shares", self.number, other)
            key = masks.agreed(self.sealing, self.others[other].sealing, about)
            out[other] = masks.sealed(key, of_key[other + 1] + of_seed[other + 1], about)
        return out

    def mask(self, sealed: Mapping[int, bytes], values: Ring) -> Ring:
        """Return the masked numbers (round 2); ``sealed`` are the shares of those who shared."""
        self._step("mask")
        self._check_members({*sealed, self.number})
        for other, content in sealed.items():
            about = self.occasion.text("shares", other, self.number)
            key = masks.agreed(self.sealing, self.others[other].sealing, about)
            self.received[other] = masks.opened(key, content, about)
        total = values + masks.mask(self.seed, len(values))
        for other in sealed:
            pair = pair_mask(
                self.occasion, self.masking, self.others[other].masking, self.number, other
            )
            stretched = masks.mask(pair, len(values))
            total = total + stretched if self.number < other else total - stretched
        return total

    def confirm(self, survivors: Collection[int]) -> bytes:
        """Sign whose numbers the server has (round 3)."""
        self._step("confirm")
        self._check_members(survivors)
        if self.number not in survivors or not set(survivors) <= self.received.keys():
            raise MessageError("the total is to hold a site that did not share with this one")
        self.survivors = frozenset(survivors)
        return self.credentials.sign(survivors_text(self.occasion, self.survivors))

    def unmask(self, confirmed: Mapping[int, bytes]) -> Unmasked:
        """Return the shares that open the total (round 4), if enough others confirmed the same."""
        self._step("unmask")
        self._check_members(confirmed)
        text = survivors_text(self.occasion, self.survivors)
        for other, signature in confirmed.items():
            if other not in self.survivors:
                raise MessageError(f"site {other} confirmed a total that it has no part in")
            if not self._is_signed(self.others[other], text, signature):
                raise MessageError(
                    f"site {other} confirmed another group, another recipe or another download: "
                    "the server may be trying to open a single message"
                )
        length = shares.LENGTH
        keys = {n: s[:length] for n, s in self.received.items() if n not in self.survivors}
        seeds = {n: self.received[n][length:] for n in self.survivors}
        return Unmasked(keys, seeds)

    def _is_signed(self, other: Advertised, text: bytes, signature: bytes) -> bool:
        return self.credentials.is_signed(other.member, other.certificate, text, signature)

    def _step(self, name: str) -> None:
        """Note a step; each follows the one before it, and none comes twice."""
        if self.steps != list(STEPS[: STEPS.index(name)]):
            raise MessageError(f"the step {name!r} was done, or is not the next one")
        self.steps.append(name)

    def _others(self) -> list[int]:
        return [number for number in self.others if number != self.number]

    def _check_group(self, advertised: Sequence[Advertised]) -> None:
        if len(self.others) < len(advertised) or self.number not in self.others:
            raise MessageError("a group must hold this site, and each site once")
        if len(self.others) < self.least:
            raise MessageError(
                f"a total over {len(self.others)} sites is asked for, and this site takes part in "
                f"groups of {self.least} or more",
                "policy",
                "least_sites",
            )
        own = self.others[self.number]
        mine = masks.public_of(self.sealing), masks.public_of(self.masking)
        if (own.sealing, own.masking) != mine:
            raise MessageError("this site's own keys were replaced")
        public = [key for other in advertised for key in (other.sealing, other.masking)]
        papers = [other.certificate for other in advertised if other.certificate]
        if len(set(public)) < len(public) or len(set(papers)) < len(papers):
            raise MessageError("two keys of a group are the same, or two certificates")
        for other in advertised:
            text = other.signed_text(self.occasion)
            if not self._is_signed(other, text, other.signature):
                raise MessageError(f"the keys of site {other.member} are not signed by it")

    def _check_members(self, members: Collection[int]) -> None:
        """Raise MessageError unless these are members, and as many as the threshold."""
        least = max(shares.threshold(len(self.others)), self.least)
        if not set(members) <= self.others.keys():
            raise MessageError("a site that advertised no keys is named")
        if len(set(members)) < least:
            raise MessageError(
                f"{len(set(members))} of {len(self.others)} sites are left, and {least} are needed"
            )


def pair_mask(occasion: Occasion, private: bytes, public: bytes, one: int, other: int) -> bytes:
    """Return the key of the mask that two sites share; the lower number adds it."""
    return masks.agreed(private, public, occasion.text("mask", *sorted((one, other))))
