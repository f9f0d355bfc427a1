"""Shares of a secret, of which a threshold tells it and fewer tell nothing (Shamir 1979).

A secret is the value at 0 of a random polynomial over the integers modulo 2^521 - 1, a prime. These
are Python's integers: the time that they take is not constant.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping

from fedgist.errors import MessageError

PRIME = 2**521 - 1
LENGTH = 66  # bytes of a share
SECRET = 32  # bytes
LEAST = 3  # sites of a total, if a site does not say otherwise


def threshold(members: int) -> int:
    """Return how many of some members are needed: more than two thirds of them.

    >>> [threshold(n) for n in (3, 4, 9, 50)]
    [3, 3, 7, 34]
    """
    return 2 * members // 3 + 1


def split(
    secret: bytes,
    places: Collection[int],
    least: int,
    draw: Callable[[int], int] = secrets.randbelow,
) -> dict[int, bytes]:
    """Return a share for each place, of which ``least`` tell the secret. Places are from 1 on."""
    if len(set(places)) < least or min(places) < 1:
        raise ValueError(f"{least} shares of {len(set(places))} places from 1 on")
    numbers = [int.from_bytes(secret, "big"), *(draw(PRIME) for _ in range(least - 1))]

    def value(place: int) -> int:
        total = 0
        for number in reversed(numbers):
            total = (total * place + number) % PRIME
        return total

    return {place: value(place).to_bytes(LENGTH, "big") for place in places}


def joined(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of as many shares as it needs, by place.

    Raises
    ------
    MessageError
        If these are no shares of one secret.
    """
    total = 0
    for place, share in shares.items():
        above = below = 1
        for other in shares:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    total %= PRIME
    if total >= 1 << (8 * SECRET):
        raise MessageError("shares that do not belong together were given")
    return total.to_bytes(SECRET, "big")
