"""The occasion of a secure sum: what all its members must agree on, signed and derived from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Occasion:
    """One attempt to add up the messages of a group of sites in a stage of a round.

    ``group`` names the architecture, or all. ``about`` is the digest of the recipe and of the
    download, which must be the same for all: a server that sent each site another model could read
    its answer through any mask. ``keys`` is the digest of all that the members advertised for
    this attempt: those who were shown other lists, or keys of before, have nothing in common.
    """

    run: str
    round: int
    stage: str
    attempt: int
    group: str
    about: str
    keys: str = ""

    def of_group(self, advertised: Iterable[Advertised]) -> Occasion:
        """Return the occasion of the members with these keys, once they are known."""
        listed = sorted(advertised, key=lambda one: one.member)
        whole = [(o.member, o.sealing.hex(), o.masking.hex(), o.certificate.hex()) for o in listed]
        return replace(self, keys=hashlib.sha256(json.dumps(whole).encode()).hexdigest())

    def text(self, purpose: str, *numbers: int) -> bytes:
        """Return bytes that no other occasion, purpose or sites have."""
        return json.dumps(["fedgist secure sum 1", asdict(self), purpose, *numbers]).encode()


@dataclass(frozen=True)
class Advertised:
    """A member's two public keys for an occasion, signed by the key of its certificate.

    ``sealing`` is for the shares that it gets, ``masking`` for its masks.
    """

    member: int
    sealing: bytes
    masking: bytes
    certificate: bytes
    signature: bytes = b""

    def signed_text(self, occasion: Occasion) -> bytes:
        """Return what is signed."""
        return occasion.text("keys", self.member) + self.sealing + self.masking


def survivors_text(occasion: Occasion, survivors: Iterable[int]) -> bytes:
    """Return what each member signs before it gives shares: whose messages are in the total."""
    members = sorted(survivors)
    digest = hashlib.sha256(json.dumps(members).encode()).digest()
    return occasion.text("survivors", *members) + digest
