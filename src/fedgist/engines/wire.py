"""The wire: how bytes go from a server to its clients and back.

A wire knows neither methods nor messages. Whatever carries bytes to a named peer and brings some
back is one; a network's replaces the loop-back, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Wire(Protocol):
    """Bytes to clients, and bytes from them."""

    def present(self) -> frozenset[int]:
        """Return the clients that are there now."""

    def exchange(
        self, envelopes: Sequence[tuple[int, bytes]], deadline_s: float | None
    ) -> list[tuple[int, bytes]]:
        """Send an envelope to each client; return what arrived until all answered or time is up.

        Each arrival is (the client it came from, its bytes), in any order. A client that is gone
        is passed over. What arrives after the deadline is kept, and returned by a later exchange.
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
