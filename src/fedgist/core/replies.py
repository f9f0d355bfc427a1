"""Orders to clients, and the replies that a stage returns: messages one by one, or totals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from fedgist.core.counts import COUNTS
from fedgist.core.message import message, scope, total
from fedgist.core.tree import Tree, map_leaves
from fedgist.errors import TooFewRepliesError

EVERYBODY = "all"  # the name of a total over all architectures


@dataclass(frozen=True)
class ClientInfo:
    """The server's information on a client before its first reply; row counts are messages."""

    id: int
    architectures: tuple[str, ...]  # its main one first; several if it is in several pools


class Asked(NamedTuple):
    """A client, and the architecture of the model that it has to train."""

    client: int
    architecture: str


@dataclass(frozen=True)
class Order:
    """The order to one client for its part of a stage, with the model of one architecture.

    ``hears`` are the client's neighbors among peers. None means that it hears all clients, through
    the server.
    """

    client: int
    architecture: str
    hears: tuple[int, ...] | None = None

    @property
    def asked(self) -> Asked:
        """The client and the architecture of this order."""
        return Asked(self.client, self.architecture)


@message(reduce="sum")
class Count:
    """The number of rows that a client holds, ()."""

    rows: Tensor = field(metadata=COUNTS)


@dataclass(frozen=True)
class Reply:
    """One client's message, with the round and the stage that it answers."""

    order: Order
    round: int
    stage: str
    message: Tree

    @property
    def asked(self) -> tuple[Asked, ...]:
        """The client and the architecture of this message."""
        return (self.order.asked,)


@dataclass(frozen=True)
class Subtotal:
    """The sum of several clients' messages, all of one architecture and for one stage."""

    architecture: str
    clients: tuple[int, ...]
    round: int
    stage: str
    message: Tree

    @property
    def asked(self) -> tuple[Asked, ...]:
        """The clients and the architecture of the summed messages."""
        return tuple(Asked(client, self.architecture) for client in self.clients)


@dataclass(frozen=True)
class Replies:
    """The replies of a stage, made by :func:`gather`: only totals of messages that are summed.

    ``totals`` holds one total over all clients, or one per architecture, as the message declares.
    ``each`` holds the replies one by one, ordered by client. Groups of fewer than ``min_replies``
    clients are ``withheld``: only their name (an architecture, or ``"all"``) and size are kept.
    ``expected`` is the number of clients behind each total, by the same names, as far as it is
    public: the clients that were selected, or the expected number if clients are sampled
    independently.
    """

    totals: tuple[Subtotal, ...] = ()
    each: tuple[Reply, ...] = ()
    withheld: tuple[tuple[str, int], ...] = ()
    min_replies: int = 1
    expected: Mapping[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.each) or sum(len(group.clients) for group in self.totals)

    def __iter__(self) -> Iterator[Reply]:
        if self.totals:
            raise TypeError("these messages are only ever seen as a total: use total()")
        return iter(self.each)

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients that answered, sorted."""
        of_totals = {client for total in self.totals for client in total.clients}
        return tuple(sorted(of_totals | {reply.order.client for reply in self.each}))

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures with totals or replies, sorted."""
        of_totals = {total.architecture for total in self.totals}
        return tuple(sorted(of_totals | {reply.order.architecture for reply in self.each}))

    def by(self, architecture: str) -> Replies:
        """Return the replies of one architecture (one pool).

        Raises
        ------
        TypeError
            If the messages are summed over all architectures.
        """
        if any(scope(type(t.message)) == "all" for t in self.totals):
            raise TypeError(
                "these messages are summed over all clients: use total(), or declare them with "
                "over='architecture'"
            )
        return Replies(
            tuple(t for t in self.totals if t.architecture == architecture),
            tuple(r for r in self.each if r.order.architecture == architecture),
            tuple(pair for pair in self.withheld if pair[0] == architecture),
            self.min_replies,
            {name: count for name, count in self.expected.items() if name == architecture},
        )

    def total(self) -> Any:
        """Return the sum over clients.

        Raises
        ------
        TooFewRepliesError
            If it would be a sum over fewer than ``min_replies`` clients.
        TypeError
            If the messages are summed per architecture, and there is more than one.
        """
        if len(self.totals) > 1:
            raise TypeError(
                "these messages are summed per architecture: use by(architecture).total()"
            )
        if self.totals:  # one over too few clients is not among them
            return self.totals[0].message
        if len(self) < max(self.min_replies, 1):
            count = len(self) or sum(size for _, size in self.withheld)
            raise TooFewRepliesError(
                f"a total over {count} replies; privacy.min_replies is {self.min_replies}"
            )
        return total([r.message for r in self.each])

    def mean(self) -> Tree:
        """Return the total, divided by its expected number of clients.

        Raises
        ------
        TooFewRepliesError, TypeError
            As :meth:`total` does.
        """
        summed = self.total()
        (name,) = (part.architecture for part in self.totals)
        return map_leaves(lambda leaf: leaf / self.expected[name], summed)


def gather(subtotals: Iterable[Subtotal], each: Sequence[Reply], min_replies: int = 1) -> Replies:
    """Add up the replies in the order given, and withhold totals of too few clients.

    Messages that are not summed are also withheld if there are fewer than ``min_replies``.
    """
    groups: dict[str, list[Subtotal]] = {}
    for part in subtotals:
        name = EVERYBODY if scope(type(part.message)) == "all" else part.architecture
        groups.setdefault(name, []).append(part)
    totals, withheld = [], []
    for name, parts in groups.items():
        clients = tuple(client for part in parts for client in part.clients)
        if len(clients) < min_replies:
            withheld.append((name, len(clients)))
        else:
            newest = max(parts, key=lambda part: part.round)
            message = total([part.message for part in parts])
            totals.append(Subtotal(name, clients, newest.round, newest.stage, message))
    if 0 < len(each) < min_replies:
        withheld.append((EVERYBODY, len(each)))
        each = ()
    ordered = sorted(each, key=lambda r: (r.order.client, r.order.architecture, r.round))
    return Replies(tuple(totals), tuple(ordered), tuple(withheld), min_replies)
