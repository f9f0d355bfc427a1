"""The server's side of secure sums: it leads sites through the steps, and gets totals alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from fedgist.core.message import payload_bytes
from fedgist.core.method import Context, Order
from fedgist.core.replies import Asked, Subtotal
from fedgist.core.tree import Tree
from fedgist.engines.engine import Answer, Scores, Split
from fedgist.errors import FederationError, MessageError, RecipeError
from fedgist.wire.envelope import Header, Packed, in_parts, seal, unseal
from fedgist.wire.remote_engine import NO_REPLY, NOT_CONNECTED, RemoteEngine
from fedgist.wire.secure.group import Group
from fedgist.wire.secure.member import Unmasked
from fedgist.wire.secure.notes import Confirmations, Keys, Masked, Opened, Sealed, Survivors
from fedgist.wire.secure.ring import decoded
from fedgist.wire.secure.shares import LEAST
from fedgist.wire.secure.site import LIMIT, about_of, occasion_of
from fedgist.wire.site import SLACK

N = TypeVar("N")


class Totals(Protocol):
    """Where a server keeps the last total of each architecture."""

    def load(self, name: str) -> bytes | None:
        """Return what was saved of an architecture, if anything was."""

    def save(self, name: str, blob: bytes) -> None:
        """Replace what was saved; return when it would survive a restart."""


@dataclass
class Tried:
    """What an attempt at a total has cost, and who has no part in it, each with the reason."""

    refused: dict[int, str] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    final: set[int] = field(default_factory=set)
    payload: int = 0
    sent: int = 0
    received: int = 0


@dataclass
class SecureEngine:
    """Clients at sites that answer in secure sums; ``recipe`` is the recipe's digest.

    ``totals`` holds the last total of each architecture durably: its sites do not open it again if
    the server is killed before its checkpoint.
    """

    remote: RemoteEngine
    recipe: str = ""
    totals: Totals | None = None

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Return the total of each architecture's clients.

        Raises
        ------
        FederationError
            If too few clients took part in every attempt.
        """
        answer, sizes, moved = Answer(), Counter[str](), [0, 0]
        for name in dict.fromkeys(order.architecture for order in orders):
            group = {
                order.client: (order, down)
                for order, down in zip(orders, downs, strict=True)
                if order.architecture == name
            }
            part, tried, events = self._total(ctx, name, group)
            lists = {
                kind: tuple((Asked(n, name), why) for n, why in sorted(found.items()))
                for kind, found in (("refused", tried.refused), ("absent", tried.absent))
            }
            answer = replace(
                answer,
                subtotals=(*answer.subtotals, *([] if part is None else [part])),
                refused=(*answer.refused, *lists["refused"]),
                absent=(*answer.absent, *lists["absent"]),
                events=(*answer.events, *events),
            )
            sizes[name] += tried.payload
            moved = [moved[0] + tried.received, moved[1] + tried.sent]
        return replace(answer, upload_bytes=sizes, wire_bytes=(moved[0], moved[1]))

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Let each client score its model, if it shares its scores."""
        return self.remote.score(ctx, orders, downs, split)

    def close(self) -> None:
        """Close the wire."""
        self.remote.close()

    def _total(
        self, ctx: Context, name: str, group: Mapping[int, tuple[Order, Tree]]
    ) -> tuple[Subtotal | None, Tried, list[str]]:
        """Return a group's total after as many attempts as it needs, and what they have cost."""
        tried, events, patience = Tried(), list[str](), self.remote.patience
        if len(group) < LEAST:
            why = f"a total that nobody can open needs {LEAST} sites with {name}"
            tried.absent = dict.fromkeys(group, why)
            return None, tried, events
        where = f"round {ctx.round}, stage {ctx.stage}, {name}"
        down, problem = self._download(group), ""
        if (kept := self._kept(ctx, name, group, down)) is not None:
            events.append(f"{where}: the total that was opened before the restart is used")
            return kept, tried, events
        for attempt in range(1, patience.most_attempts + 1):
            tried.refused, tried.absent = {}, {}
            try:
                total = self._attempt(ctx, name, group, down, attempt, tried)
            except MessageError as error:
                problem = f"no total was opened: {error}" + _who(tried)
            else:
                self._keep(total, about_of(self.recipe, down.about.digest))
                return total, tried, events
            if len(group) - len(tried.final) < LEAST:
                raise FederationError(f"{where}: {problem}; asking again cannot change that")
            if attempt < patience.most_attempts:
                events.append(f"{where} was asked again (attempt {attempt + 1}): {problem}")
                self.remote.before_repeating(events[-1])
        raise FederationError(f"{where} was asked {patience.most_attempts} times; {problem}")

    def _attempt(
        self,
        ctx: Context,
        name: str,
        group: Mapping[int, tuple[Order, Tree]],
        down: Packed,
        attempt: int,
        tried: Tried,
    ) -> Subtotal:
        """Return the total of those whose masked numbers arrived; MessageError if it fails."""
        order, message = next(iter(group.values()))
        form = self.remote.form_of(ctx, order, message)
        header = Header(
            purpose="train",
            run=self.remote.run,
            round=ctx.round,
            stage=ctx.stage,
            client=0,
            architecture=name,
            attempt=attempt,
        )
        occasion = occasion_of(header, about_of(self.recipe, down.about.digest))
        length = sum(math.prod(shape) for _, shape in form.arrays.values())
        sums, step = Group(occasion, length), _Steps(self.remote, ctx, header, tried, length)
        asked = {n: {"download": down} for n in group if n not in tried.final}
        step("train", asked, Keys, lambda n, note: sums.add_keys(n, note.all()))
        _check(sums.advertised, LEAST, "keys")
        everyone = _to_each(sums.advertised, Keys.of(sums.advertised.values()))
        step("share", everyone, Sealed, lambda n, note: sums.add_sealed(n, note.all()))
        _check(sums.sealed, sums.least, "shares")
        of_each = {n: {"step": Sealed.of(sums.shares_for(n))} for n in sums.sealed}
        step("mask", of_each, Masked, lambda n, note: sums.add_masked(n, note.ring()))
        _check(sums.masked, max(sums.least, self.remote.patience.least_replies), "numbers")
        survivors, confirmed = _to_each(sums.masked, Survivors.of(sums.masked)), dict[int, bytes]()

        def confirm(n: int, note: Confirmations) -> None:
            confirmed[n] = note.all()[n]

        step("confirm", survivors, Confirmations, confirm)
        _check(confirmed, sums.least, "confirmations")
        opened: dict[int, Unmasked] = {}

        def unmask(n: int, note: Opened) -> None:
            opened[n] = note.all()

        step("unmask", _to_each(confirmed, Confirmations.of(confirmed)), Opened, unmask)
        total = decoded(sums.total(opened), form)
        return Subtotal(name, tuple(sorted(sums.masked)), ctx.round, ctx.stage, total)

    def _download(self, group: Mapping[int, tuple[Order, Tree]]) -> Packed:
        """Return the download of a group, which is one for all; RecipeError if it is not."""
        packed = {id(down): Packed.of(down) for _, down in group.values()}
        if len({one.about.digest for one in packed.values()}) > 1:
            raise RecipeError(
                f"method {type(self.remote.method).__name__} sends each client another download, "
                "which reads an answer through any mask: federation.sums = 'plain'"
            )
        return next(iter(packed.values()))

    def _keep(self, total: Subtotal, about: str) -> None:
        """Write down a total."""
        if self.totals is None:
            return
        header = Header(
            purpose="reply",
            run=self.remote.run,
            round=total.round,
            stage=total.stage,
            client=0,
            architecture=total.architecture,
            reason=about,
        )
        survivors = Survivors.of(total.clients)
        messages = {"total": total.message, "survivors": survivors}
        self.totals.save(total.architecture, seal(header, messages))

    def _kept(
        self, ctx: Context, name: str, group: Mapping[int, tuple[Order, Tree]], down: Packed
    ) -> Subtotal | None:
        """Return the total of this very stage, if it was opened before."""
        blob = None if self.totals is None else self.totals.load(name)
        if blob is None:
            return None
        header, messages = unseal(blob, len(blob))
        about = about_of(self.recipe, down.about.digest)
        expected = (self.remote.run, ctx.round, ctx.stage, about)
        clients = tuple(sorted(messages["survivors"].all()))
        if (header.run, header.round, header.stage, header.reason) != expected:
            return None
        if not set(clients) <= group.keys():
            return None
        return Subtotal(name, clients, ctx.round, ctx.stage, messages["total"])


@dataclass
class _Steps:
    """One step after the other: requests to sites, and their answers after all checks."""

    remote: RemoteEngine
    ctx: Context
    header: Header
    tried: Tried
    length: int

    def __call__(
        self,
        purpose: str,
        notes: Mapping[int, Mapping[str, Tree | Packed]],
        kind: type[N],
        take: Callable[[int, N], None],
    ) -> None:
        """Send each site its note, and take each answer; other sites are refused or absent."""
        envelopes = []
        for n, messages in notes.items():
            header = self.header.model_copy(update={"purpose": purpose, "client": n})
            envelopes.append((n, in_parts(header, messages)))
        self.tried.sent += sum(len(part) for _, parts in envelopes for part in parts)
        largest = 8 * self.length + SLACK + LIMIT
        deadline, answered = self.remote.patience.deadline(self.ctx.round), set[int]()
        for n, blob in self.remote.wire.exchange(envelopes, deadline, largest):
            self.tried.received += len(blob)
            answered.add(n)
            try:
                take(n, self._answer(n, purpose, blob, largest, kind))
            except MessageError as error:
                self.tried.refused[n] = str(error)
            except (ValueError, KeyError, TypeError, RuntimeError):
                self.tried.refused[n] = f"its {kind.__name__} cannot be used"
        present = self.remote.wire.present()
        for n in notes.keys() - answered:
            self.tried.absent[n] = NO_REPLY if n in present else NOT_CONNECTED

    def _answer(self, n: int, purpose: str, blob: bytes, largest: int, kind: type[N]) -> N:
        header, messages = unseal(blob, largest)
        mine = self.header
        expected = (mine.run, mine.round, mine.stage, mine.architecture, mine.attempt, n)
        found = (header.run, header.round, header.stage, header.architecture, header.attempt)
        if header.purpose == "refusal":
            self.tried.final |= {n} if header.is_final else set()
            raise MessageError(header.words)
        if (*found, header.client) != expected or header.purpose != "reply":
            raise MessageError("its answer is to another request")
        note = messages.get(purpose)
        if not isinstance(note, kind):
            raise MessageError(f"its answer holds no {kind.__name__}")
        self.tried.payload += payload_bytes(note)
        return note


def _to_each(sites: Mapping[int, object], note: Tree) -> dict[int, Mapping[str, Tree | Packed]]:
    packed = Packed.of(note)
    return {n: {"step": packed} for n in sites}


def _check(found: Mapping[int, object], least: int, what: str) -> None:
    if len(found) < least:
        raise MessageError(f"{len(found)} sites sent {what}, and {least} are needed")


def _who(tried: Tried) -> str:
    reasons = {**tried.absent, **tried.refused}
    return "".join(f"; client {n}: {why}" for n, why in sorted(reasons.items()))
