"""The wire: transport of bytes from a server to its clients and back.

A wire depends neither on methods nor on messages: it carries bytes to a client and back. For a
network, only the loop-back wire is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Wire(Protocol):
    """The transport of bytes to clients and back."""

    def present(self) -> frozenset[int]:
        """Return the clients that can be reached now."""

    def exchange(
        self, envelopes: Sequence[tuple[int, bytes]], deadline_s: float | None
    ) -> list[tuple[int, bytes]]:
        """Send an envelope to each client; return the replies at the deadline or when all answered.

        Each reply is (its client, its bytes), in any order. A client that cannot be reached is left
        out. A reply after the deadline is returned by a later exchange.
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
        self, envelopes: Sequence[tuple[int, bytes]], deadline_s: float | None
    ) -> list[tuple[int, bytes]]:
        """Let the clients answer one after the other, without delays."""
        del deadline_s
        return [
            (client, self.clients[client](envelope))
            for client, envelope in envelopes
            if client in self.clients
        ]

    def close(self) -> None:
        """Remove the clients."""
        self.clients = {}
