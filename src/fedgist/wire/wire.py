"""The wire: transport of bytes from a server to its clients and back.

A wire depends neither on methods nor on messages: it carries bytes to a client and back. For a
network, only the loop-back wire is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

# an envelope in parts, to be sent one after the other: clients share the parts of a broadcast
Parts = Sequence[bytes]


class Wire(Protocol):
    """The transport of bytes to clients and back."""

    def present(self) -> frozenset[int]:
        """Return the clients that can be reached now."""

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        """Send an envelope to each client; yield the replies as (client, bytes).

        Replies are ordered by client, so that the order of arrival does not matter. A reply is
        yielded as soon as all clients before it have answered, or at the deadline. A client that
        cannot be reached is left out. A client whose connection is lost is sent its envelope again
        if it comes back before the deadline. A reply after the deadline is yielded by a later
        exchange. ``largest`` is the size in bytes of the largest acceptable reply: a wire refuses a
        larger one before it holds it, as a reply of no bytes.
        """

    def unasked(self) -> Mapping[int, int]:
        """Return the number of replies per client that no request asked for, since the last call.

        The wire has dropped them.
        """

    def close(self) -> None:
        """Close every connection."""


class LoopbackWire:
    """A wire within one process: each client is a function from bytes to bytes."""

    def __init__(self, clients: Mapping[int, Callable[[bytes], bytes]]) -> None:
        self.clients = dict(clients)

    def present(self) -> frozenset[int]:
        """Return all clients."""
        return frozenset(self.clients)

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        """Let the clients answer one after the other, without delays."""
        del deadline_s, largest
        for client, parts in sorted(envelopes, key=lambda pair: pair[0]):
            if client in self.clients:
                yield client, self.clients[client](b"".join(parts))

    def unasked(self) -> Mapping[int, int]:
        """Return nothing: a function answers only when it is called."""
        return {}

    def close(self) -> None:
        """Remove the clients."""
        self.clients = {}
