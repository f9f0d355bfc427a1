"""The record of one round: who was asked, who answered, and what was sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from fedgist.core.message import payload_bytes
from fedgist.core.method import Method, Order, Replies
from fedgist.core.replies import Asked
from fedgist.core.tree import Tree
from fedgist.engines.engine import Answer
from fedgist.federation.columns import TRAIN_LOSS
from fedgist.federation.record import Line


@dataclass
class RoundRecord:
    """The line of one round, filled stage by stage.

    A client that was asked is *absent* (no answer in time) or *refused* (its message, or what it
    was sent, was not valid), or it has replied; a reply to an earlier round that arrives now is
    *late*. Where there are ``pools``, the line says of each how many were asked, and its loss.
    """

    number: int
    pools: Collection[str] = ()
    asked: list[Asked] = field(default_factory=list)
    refused: list[tuple[Asked, str]] = field(default_factory=list)
    absent: list[tuple[Asked, str]] = field(default_factory=list)
    losses: list[tuple[Asked, float]] = field(default_factory=list)
    late: list[Line] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    num_replied: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    wire_bytes: tuple[int, int] | None = None

    @property
    def failed(self) -> set[Asked]:
        """Who was absent or refused in an earlier stage of this round."""
        return {asked for asked, _ in (*self.refused, *self.absent)}

    def ordered(self, orders: Sequence[Order], downs: Sequence[Tree]) -> None:
        """Count a stage's orders and what is sent with them."""
        self.asked += [order.asked for order in orders]
        sizes = {id(down): payload_bytes(down) for down in {id(d): d for d in downs}.values()}
        self.down_bytes += sum(sizes[id(down)] for down in downs)

    def answered(self, answer: Answer, replies: Replies) -> None:
        """Count what came back, and note which totals were withheld from the server."""
        self.refused += answer.refused
        self.absent += answer.absent
        self.num_replied += len(replies) + sum(count for _, count in replies.withheld)
        self.losses += answer.losses.items()
        self.up_bytes += answer.upload_bytes
        if answer.wire_bytes is not None:
            up, down = self.wire_bytes or (0, 0)
            self.wire_bytes = up + answer.wire_bytes[0], down + answer.wire_bytes[1]
        for name, count in replies.withheld:
            clients = "all clients" if name == "all" else name
            self.events.append(
                f"a total over {count} replies of {clients} was withheld; "
                f"privacy.min_replies is {replies.min_replies}"
            )

    def too_late(self, replies: Iterable[tuple[Asked, int]]) -> None:
        """Note clients whose reply to an earlier round arrived now and is not used."""
        self.late += [self._of(asked) | {"answers": number} for asked, number in replies]

    def line(self) -> Line:
        """Return the round's line."""
        line: Line = {
            "round": self.number,
            "clients/asked": len(self.asked),
            "clients/replied": self.num_replied,
        }
        for pool in self.pools:
            line[f"clients/asked/{pool}"] = sum(a.architecture == pool for a in self.asked)
        entries = {
            "refused": [self._entry(asked, reason) for asked, reason in self.refused],
            "absent": [self._entry(asked, reason) for asked, reason in self.absent],
            "late": self.late,
            "events": self.events,
        }
        line |= {name: found for name, found in entries.items() if found}
        line |= self._mean_losses()
        line["comm/up_bytes"] = self.up_bytes
        line["comm/down_bytes"] = self.down_bytes
        if self.wire_bytes is not None:
            line["comm/wire_up_bytes"], line["comm/wire_down_bytes"] = self.wire_bytes
        return line

    def _entry(self, asked: Asked, reason: str) -> Line:
        return self._of(asked) | {"reason": reason}

    def _of(self, asked: Asked) -> Line:
        pool = {"pool": asked.architecture} if self.pools else {}
        return {"client": asked.client, **pool}

    def _mean_losses(self) -> Line:
        """Return the mean loss over clients, and that of each pool."""
        groups = {TRAIN_LOSS: [loss for _, loss in self.losses]}
        for pool in self.pools:
            of_pool = [loss for asked, loss in self.losses if asked.architecture == pool]
            groups[f"{TRAIN_LOSS}/{pool}"] = of_pool
        return {name: sum(found) / len(found) for name, found in groups.items() if found}


def edges_of(method: Method, server: Tree, orders: Sequence[Order], number: int) -> list[Line]:
    """Return what crosses from peer to peer: of each whom a client hears, what it released last."""
    heard = {peer for order in orders for peer in order.hears or ()}
    kept = {peer: method.kept_of(server, peer) for peer in sorted(heard)}
    sizes = {peer: payload_bytes(message) for peer, message in kept.items() if message is not None}
    return [
        {"round": number, "from": peer, "to": order.client, "bytes": sizes[peer]}
        for order in orders
        for peer in order.hears or ()
        if peer in sizes
    ]
