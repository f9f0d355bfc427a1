"""Loop-back wires that change, lose or repeat what sites answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedgist.core.tree import map_leaves
from fedgist.runs.round import ServerRun, start_server
from fedgist.testing.small_worlds import ALONE, loopback
from fedgist.wire.envelope import seal, unseal
from fedgist.wire.wire import LoopbackWire, Parts

ANY_SIZE = 1 << 30
Change = Callable[[int, bytes], list[bytes]]


class Meddler(LoopbackWire):
    """A wire whose replies pass through a function first: client, bytes -> what arrives."""

    def __init__(self, change: Change) -> None:
        super().__init__({})
        self.change = change

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        replies = super().exchange(envelopes, deadline_s, largest)
        return ((client, blob) for client, reply in replies for blob in self.change(client, reply))


def with_wire(small_world: Any, change: Change) -> ServerRun:
    wire = Meddler(change)
    engine = loopback(small_world, ALONE, wire)
    wire.clients = {client: site.handle for client, site in engine.sites.items()}
    return ServerRun(small_world.server, engine, start_server(small_world.server))


def resealed(blob: bytes, change: Callable[[Any], Any] | None = None, **fields: Any) -> bytes:
    header, messages = unseal(blob, ANY_SIZE)
    if change and "upload" in messages:
        messages["upload"] = map_leaves(change, messages["upload"])
    return seal(header.model_copy(update=fields), messages)


def only(client: int, change: Callable[[bytes], list[bytes]]) -> Change:
    return lambda sender, blob: change(blob) if sender == client else [blob]
