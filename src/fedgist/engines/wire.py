"""The wire: how bytes go from a server to its clients and back.

A wire knows neither methods nor messages: it carries bytes to a client and brings bytes back. For a
network, the loop-back wire is replaced by another, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Wire(Protocol):
    """What carries bytes to clients and brings bytes back."""

    def present(self) -> frozenset[int]:
        """Return the clients that can be reached now."""

    def exchange(
        self, envelopes: Sequence[tuple[int, bytes]], deadline_s: float | None
    ) -> list[tuple[int, bytes]]:
        """Send an envelope to each client; return what arrived until all answered or time is up.

        Each arrival is (the client it came from, its bytes), in any order. A client that cannot be
        reached is left out. What arrives after the deadline is returned by a later exchange.
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
        """Let the clients answer, one after the other; nobody is ever late."""
        del deadline_s
        return [
            (client, self.clients[client](envelope))
            for client, envelope in envelopes
            if client in self.clients
        ]

    def close(self) -> None:
        """Forget the clients."""
        self.clients = {}
