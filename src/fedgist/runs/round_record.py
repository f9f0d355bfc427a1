"""The record of one round: its selected clients, their replies, and the bytes sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite

from fedgist.core.message import payload_bytes
from fedgist.core.method import Method, Order, Replies
from fedgist.core.peer_method import PeerMethod
from fedgist.core.replies import Asked
from fedgist.core.tree import Tree
from fedgist.engines.engine import Answer
from fedgist.runs.files.columns import (
    COMPLETE,
    DIVERGED,
    DOWN_BYTES,
    EXPECTED,
    STEPS,
    TRAIN_LOSS,
    UP_BYTES,
)
from fedgist.runs.files.record import Line


class PausedError(Exception):
    """A round was left between two stages."""


@dataclass
class PartialRound:
    """A round that is not finished: its record so far, its clients, and its finished stages.

    ``edges`` lists the messages from peer to peer.
    """

    record: RoundRecord
    selected: list[Order]
    done: int = 0
    seconds: float = 0.0
    edges: list[Line] = field(default_factory=list)

    def plain(self) -> Line:
        """Return the partial round in JSON's types."""
        return asdict(self)


def under_way(table: Line) -> PartialRound:
    """Return the partial round that :meth:`PartialRound.plain` converted."""
    record = dict(table["record"])
    for name in ("refused", "absent", "losses", "steps"):
        record[name] = [(Asked(*recipient), value) for recipient, value in record[name]]
    record["asked"] = [Asked(*recipient) for recipient in record["asked"]]
    record["pools"] = tuple(record["pools"])
    if record["wire_bytes"] is not None:
        record["wire_bytes"] = tuple(record["wire_bytes"])
    selected = [
        Order(o["client"], o["architecture"], None if o["hears"] is None else tuple(o["hears"]))
        for o in table["selected"]
    ]
    rest = {f.name: table[f.name] for f in fields(PartialRound)[2:]}
    return PartialRound(RoundRecord(**record), selected, **rest)


def _named(entry: Line, names: Sequence[str]) -> Line:
    """Return the entry of a client with its name, if it has one."""
    return {"client": entry["client"], "name": names[entry["client"]]} | entry if names else entry


Counts = dict[str, int]  # by architecture; plain, for a round under way is saved


@dataclass
class RoundRecord:
    """The line of one round, filled stage by stage.

    A client with an order has replied, is *absent* (no answer in time), or is *refused* (its
    message or its download was not valid). A reply to an earlier round that arrives now is
    *late*. Replies and bytes are counted by architecture. Each of the ``pools`` is an architecture:
    the line also has each pool's orders, replies, bytes and mean loss. ``offline`` clients would
    have been asked, if they had been there.
    """

    number: int
    pools: Collection[str] = ()
    asked: list[Asked] = field(default_factory=list)
    refused: list[tuple[Asked, str]] = field(default_factory=list)
    absent: list[tuple[Asked, str]] = field(default_factory=list)
    losses: list[tuple[Asked, float]] = field(default_factory=list)
    steps: list[tuple[Asked, Line]] = field(default_factory=list)
    late: list[Line] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    replied: Counts = field(default_factory=dict)
    up_bytes: Counts = field(default_factory=dict)
    down_bytes: Counts = field(default_factory=dict)
    wire_bytes: tuple[int, int] | None = None
    offline: int = 0

    @property
    def failed(self) -> set[Asked]:
        """The clients that were absent or refused in an earlier stage of this round."""
        return {recipient for recipient, _ in (*self.refused, *self.absent)}

    def ordered(self, orders: Sequence[Order], downs: Sequence[Tree]) -> None:
        """Count a stage's orders and the bytes of their downloads."""
        self.asked += [order.asked for order in orders]
        sizes = {id(down): payload_bytes(down) for down in {id(d): d for d in downs}.values()}
        sent: Counter[str] = Counter()
        for order, down in zip(orders, downs, strict=True):
            sent[order.architecture] += sizes[id(down)]
        self.down_bytes = _sum(self.down_bytes, sent)

    def answered(
        self, answer: Answer, used: Iterable[Asked], replies: Replies, stage: str = ""
    ) -> None:
        """Count the replies and those that are ``used``, and note withheld totals."""
        self.refused += answer.refused
        self.events += answer.events
        self.absent += answer.absent
        self.replied = _sum(self.replied, Counter(recipient.architecture for recipient in used))
        self.losses += answer.losses.items()
        taken = {who: list(steps) for who, steps in answer.steps.items() if steps}
        self.steps += [(who, {"stage": stage, "steps": steps}) for who, steps in taken.items()]
        self.up_bytes = _sum(self.up_bytes, answer.upload_bytes)
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
        self.late += [self._of(recipient) | {"answers": number} for recipient, number in replies]

    def line(self, names: Sequence[str] = ()) -> Line:
        """Return the round's line; ``names`` are the clients' names, if they have any."""
        num_asked = dict(Counter(recipient.architecture for recipient in self.asked))
        line: Line = {"round": self.number}
        line |= self._totals("clients/asked", num_asked)
        line |= self._totals("clients/replied", self.replied)
        needed = {recipient.client for recipient in self.asked}
        silent = {recipient.client for recipient in self.failed}
        if silent or self.offline:
            line[COMPLETE] = len(needed - silent)
            line[EXPECTED] = len(needed) + self.offline
        entries = {
            "refused": [self._entry(recipient, reason) for recipient, reason in self.refused],
            "absent": [self._entry(recipient, reason) for recipient, reason in self.absent],
            "late": self.late,
            STEPS: [self._of(recipient) | steps for recipient, steps in self.steps],
            DIVERGED: [self._entry(who, reason) for who, reason in self._lost.items()],
        }
        line |= {kind: [_named(e, names) for e in some] for kind, some in entries.items() if some}
        line |= {"events": self.events} if self.events else {}
        line |= self._mean_losses()
        line |= self._totals(UP_BYTES, self.up_bytes)
        line |= self._totals(DOWN_BYTES, self.down_bytes)
        if self.wire_bytes is not None:
            line["comm/wire_up_bytes"], line["comm/wire_down_bytes"] = self.wire_bytes
        return line

    def _totals(self, name: str, counts: Counts) -> Line:
        """Return the sum of the counts over all architectures, and the count of each pool."""
        of_pools = {f"{name}/{pool}": counts.get(pool, 0) for pool in self.pools}
        return {name: sum(counts.values()), **of_pools}

    def _entry(self, recipient: Asked, reason: str) -> Line:
        return self._of(recipient) | {"reason": reason}

    def _of(self, recipient: Asked) -> Line:
        pool = {"pool": recipient.architecture} if self.pools else {}
        return {"client": recipient.client, **pool}

    @property
    def _lost(self) -> dict[Asked, str]:
        """The clients that reported a loss that is not finite, each with the reason."""
        return {who: f"training loss {loss}" for who, loss in self.losses if not isfinite(loss)}

    def _mean_losses(self) -> Line:
        """Return the mean finite loss over all clients, and over the clients of each pool."""
        finite = [(recipient, loss) for recipient, loss in self.losses if isfinite(loss)]
        groups = {TRAIN_LOSS: [loss for _, loss in finite]}
        for pool in self.pools:
            of_pool = [loss for recipient, loss in finite if recipient.architecture == pool]
            groups[f"{TRAIN_LOSS}/{pool}"] = of_pool
        return {name: sum(losses) / len(losses) for name, losses in groups.items() if losses}


def _sum(counts: Counts, more: Mapping[str, int]) -> Counts:
    return dict(Counter(counts) + Counter(more))


def edges_of(method: Method, server: Tree, orders: Sequence[Order], number: int) -> list[Line]:
    """Return the messages between peers: each client receives the last release of its neighbors."""
    if not isinstance(method, PeerMethod):
        return []
    heard = {peer for order in orders for peer in order.hears or ()}
    kept = {peer: method.kept_of(server, peer) for peer in sorted(heard)}
    sizes = {peer: payload_bytes(message) for peer, message in kept.items() if message is not None}
    return [
        {"round": number, "from": peer, "to": order.client, "bytes": sizes[peer]}
        for order in orders
        for peer in order.hears or ()
        if peer in sizes
    ]
