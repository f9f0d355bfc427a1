"""The server's part in a secure sum: it passes on what sites send, and adds up masked numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedgist.errors import MessageError
from fedgist.wire.secure import masks, shares
from fedgist.wire.secure.member import Unmasked, pair_mask
from fedgist.wire.secure.occasion import Advertised, Occasion
from fedgist.wire.secure.ring import Ring


@dataclass
class Group:
    """The sites of one attempt at a total, and what they have sent so far.

    ``length`` is the number of numbers in a message.
    """

    occasion: Occasion
    length: int
    advertised: dict[int, Advertised] = field(default_factory=dict)
    sealed: dict[int, Mapping[int, bytes]] = field(default_factory=dict)
    masked: dict[int, Ring] = field(default_factory=dict)

    @property
    def least(self) -> int:
        """The number of sites that each step needs."""
        return shares.threshold(len(self.advertised))

    def add_keys(self, member: int, keys: Sequence[Advertised]) -> None:
        """Add the keys that a site sent of itself.

        Raises
        ------
        MessageError
            If they are another site's.
        """
        if [key.member for key in keys] != [member]:
            raise MessageError("it sent other keys than its own")
        self.advertised[member] = keys[0]

    def shares_for(self, member: int) -> dict[int, bytes]:
        """Return the sealed shares for a member, by the site that made them."""
        return {n: mine[member] for n, mine in self.sealed.items() if n != member}

    def add_sealed(self, member: int, sealed: Mapping[int, bytes]) -> None:
        """Add a site's sealed shares.

        Raises
        ------
        MessageError
            If they are not for all other sites.
        """
        if sealed.keys() != self.advertised.keys() - {member}:
            raise MessageError("it sent shares for other sites than those of the group")
        self.sealed[member] = sealed

    def add_masked(self, member: int, values: Ring) -> None:
        """Add a site's masked numbers.

        Raises
        ------
        MessageError
            If they are not as many as a message has.
        """
        if values.shape != (self.length,):
            raise MessageError(f"{len(values)} masked numbers came, not {self.length}")
        self.masked[member] = values

    def total(self, answers: Mapping[int, Unmasked]) -> Ring:
        """Return the total of the messages of all sites that sent masked numbers.

        Raises
        ------
        MessageError
            If too few sites gave shares, or shares do not belong together.
        """
        if len(answers) < self.least:
            raise MessageError(f"{len(answers)} sites gave shares, and {self.least} are needed")
        occasion = self.occasion.of_group(self.advertised.values())
        total = np.zeros(self.length, np.uint64)
        for values in self.masked.values():
            total += values
        for member in self.masked:
            seeds = {n: answer.seeds for n, answer in answers.items()}
            total -= masks.mask(self._joined(seeds, member), self.length)
        for gone in self.sealed.keys() - self.masked.keys():
            private = self._joined({n: answer.keys for n, answer in answers.items()}, gone)
            if masks.public_of(private) != self.advertised[gone].masking:
                raise MessageError(f"a wrong share of site {gone} was given")
            for member in self.masked:
                public = self.advertised[member].masking
                pair = pair_mask(occasion, private, public, gone, member)
                stretched = masks.mask(pair, self.length)
                total = total - stretched if member < gone else total + stretched
        return total

    def _joined(self, given: Mapping[int, Mapping[int, bytes]], member: int) -> bytes:
        """Return a secret of a site from the shares that others gave of it."""
        found = {n + 1: mine[member] for n, mine in sorted(given.items()) if member in mine}
        if len(found) < self.least:
            raise MessageError(f"{len(found)} sites gave shares of site {member}")
        return shares.joined(dict([*found.items()][: self.least]))
