"""The replies that a remote engine has received, and has not passed on yet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fedgist.core.message import payload_bytes, scope, total
from fedgist.core.method import Reply
from fedgist.core.replies import Asked, Subtotal

OrderKey = tuple[int, str, int, str]  # round, stage, client, architecture


@dataclass
class Inbox:
    """Received replies that have not been passed on yet.

    ``sums`` holds one subtotal per architecture, round and stage, if the method adds per
    architecture. ``sizes`` holds the payload bytes of the parts of a round and stage. ``final``
    are the orders that were refused for a reason that asking again cannot change.
    """

    parts: list[Subtotal | Reply] = field(default_factory=list)
    sums: dict[tuple[int, str, str], int] = field(default_factory=dict)  # places in parts
    sizes: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    refused: list[tuple[Asked, str]] = field(default_factory=list)
    losses: dict[OrderKey, float] = field(default_factory=dict)
    answered: set[OrderKey] = field(default_factory=set)
    final: set[OrderKey] = field(default_factory=set)
    received_bytes: int = 0

    def add(self, part: Subtotal | Reply) -> None:
        """Add a part; a message that is summed per architecture is added to those before it."""
        (recipient,) = part.asked
        key = (part.round, part.stage, recipient.architecture)
        self.sizes[key] += payload_bytes(part.message)
        place = self.sums.get(key)
        if isinstance(part, Reply) or scope(type(part.message)) == "all" or place is None:
            if isinstance(part, Subtotal):
                self.sums[key] = len(self.parts)
            self.parts.append(part)
            return
        before = self.parts[place]
        assert isinstance(before, Subtotal)  # a place is a subtotal's
        message = total([before.message, part.message])
        clients = (*before.clients, *part.clients)
        self.parts[place] = Subtotal(before.architecture, clients, part.round, part.stage, message)

    def taken(self, stage: str, oldest: int) -> tuple[list[Subtotal | Reply], Counter[str], Inbox]:
        """Return the parts of a stage, their bytes by architecture, and an inbox of the others.

        Parts of rounds up to ``oldest`` are dropped.
        """
        parts = [part for part in self.parts if part.stage == stage]
        sizes: Counter[str] = Counter()
        left = Inbox()
        for (number, of_stage, architecture), size in self.sizes.items():
            if of_stage == stage:
                sizes[architecture] += size
            elif number > oldest:
                left.sizes[number, of_stage, architecture] = size
        for part in self.parts:
            if part.stage != stage and part.round > oldest:
                if isinstance(part, Subtotal):
                    left.sums[part.round, part.stage, part.architecture] = len(left.parts)
                left.parts.append(part)
        return parts, sizes, left
