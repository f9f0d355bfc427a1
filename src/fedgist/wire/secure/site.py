"""A site that sends no message by itself: what it answers goes into a total that nobody can open.

It wraps a :class:`~fedgist.wire.site.Site`, which trains and keeps its reply as ever. In place of
the reply the server gets public keys; the reply's numbers follow masked. A site that gave shares
for a stage takes part in no other total of that stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from fedgist.core.replies import ClientInfo
from fedgist.core.tree import Tree
from fedgist.errors import MessageError
from fedgist.wire.envelope import Header, digest, header_of, refusal, seal, unseal
from fedgist.wire.secure.member import Credentials, Member
from fedgist.wire.secure.notes import Confirmations, Keys, Masked, Opened, Sealed, Survivors
from fedgist.wire.secure.occasion import Occasion
from fedgist.wire.secure.ring import encoded
from fedgist.wire.secure.shares import LEAST
from fedgist.wire.site import CANNOT, SLACK

Stage = tuple[int, str, str]  # round, stage, architecture
STEPS = ("share", "mask", "confirm", "unmask")
LIMIT = SLACK + 10_000 * 1024  # bytes of the largest request: a list over all members
LOG = logging.getLogger(__name__)


class Replies(Protocol):
    """A site that answers envelopes, such as :class:`~fedgist.wire.site.Site`."""

    @property
    def client(self) -> ClientInfo:
        """The site as a client of the server."""

    def handle(self, envelope: bytes) -> bytes:
        """Answer an envelope with a reply, or with a refusal and its reason."""


class Book(Protocol):
    """The totals that a site gave shares for, in all its runs."""

    def holds(self, stage: str) -> bool:
        """Return whether shares were given for a stage."""

    def repeats(self, message: str) -> bool:
        """Return whether a message, by its digest, may be in no further total."""

    def check(self, members: Collection[int]) -> None:
        """Raise MessageError if a total over these sites would tell of few of them."""

    def add(self, stage: str, message: str, members: Collection[int]) -> None:
        """Write a total down; return when it would survive a restart."""


class MemoryBook:
    """A book that lasts as long as its process."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def holds(self, stage: str) -> bool:
        """Return whether shares were given for a stage."""
        return stage in self.names

    def repeats(self, message: str) -> bool:
        """Return whether a message is in a total."""
        return message in self.names

    def check(self, members: Collection[int]) -> None:
        """Accept each group: a message is in one total."""

    def add(self, stage: str, message: str, members: Collection[int]) -> None:
        """Write a total down."""
        del members
        self.names |= {stage, message}


@dataclass
class Attempt:
    """An attempt at a total: the site's part, its stored reply, and its answer to the last step."""

    member: Member
    reply: bytes
    answered: tuple[str, bytes] = ("", b"")  # digest of a request, and the answer


class SecureSite:
    """A site whose messages are added up in a secure sum."""

    def __init__(
        self,
        site: Replies,
        credentials: Credentials,
        *,
        recipe: str = "",
        least: int = LEAST,
        book: Book | None = None,
    ) -> None:
        """Wrap a site.

        ``recipe`` is the recipe's digest, ``least`` the smallest group that the site joins, and
        ``book`` remembers durably for which stages it gave shares.
        """
        self.site, self.credentials, self.recipe, self.least = site, credentials, recipe, least
        self.attempts: dict[Stage, Attempt] = {}
        self.given: dict[Stage, Attempt] = {}  # attempts whose answers may be asked for again
        self.book = book or MemoryBook()

    def handle(self, envelope: bytes) -> bytes:
        """Answer an envelope with a reply, or with a refusal and its reason."""
        try:
            request = header_of(envelope)
        except MessageError:
            return self.site.handle(envelope)  # it refuses in words
        if request.purpose in STEPS:
            if (attempt := self._attempt_of(request)) is None:
                text = f"this site is not in attempt {request.attempt} at a total"
                return refusal(request, MessageError(text))
            return self._refusing(request, lambda: self._step(request, attempt, envelope))
        reply = self.site.handle(envelope)
        if request.purpose != "train" or header_of(reply).purpose != "reply":
            return reply
        return self._refusing(request, lambda: self._begin(request, reply))

    def _refusing(self, request: Header, work: Callable[[], bytes]) -> bytes:
        """Return an answer; after an error the site has no further part in the attempt."""
        try:
            return work()
        except MessageError as error:
            problem = error
        except Exception:  # of numbers that a server made up
            LOG.exception("round %d, stage %s failed", request.round, request.stage)
            problem = MessageError(CANNOT, "work")
        self.attempts.pop(_stage(request), None)
        return refusal(request, problem)

    def _begin(self, request: Header, reply: bytes) -> bytes:
        """Return this site's keys for a new attempt at a total."""
        stage = _stage(request)
        self._check_first(request, reply)
        about = about_of(self.recipe, request.messages["download"].digest)
        occasion = occasion_of(request, about)
        member = Member(self.site.client.id, occasion, self.credentials, self.least)
        self.attempts = {s: a for s, a in self.attempts.items() if s[0] >= request.round}
        self.attempts[stage] = Attempt(member, reply)
        return _reply(request, Keys.of([member.advertise()]))

    def _check_first(self, request: Header, reply: bytes) -> None:
        """Raise MessageError if a total of this stage, or with this message, was opened."""
        if self.book.holds(name_of(request)):
            raise MessageError(
                f"this site gave shares for a total of round {request.round}, stage "
                f"{request.stage}: it takes part in no other total of it",
                "state",
            )
        if self.book.repeats(_upload(reply)):
            raise MessageError(
                "this very message is in a total already, of this run or of another one: the "
                "difference of two totals would be a site's message",
                "state",
            )

    def _attempt_of(self, request: Header) -> Attempt | None:
        """Return the attempt that a request belongs to, if this site is in it."""
        attempt = self.attempts.get(_stage(request)) or self.given.get(_stage(request))
        same = attempt is not None and request.attempt == attempt.member.occasion.attempt
        return attempt if same else None

    def _step(self, request: Header, attempt: Attempt, envelope: bytes) -> bytes:
        """Return the answer to a step; the same request again has the same answer."""
        mark = digest(envelope)
        if attempt.answered[0] != mark:
            _, messages = unseal(envelope, LIMIT)
            (note,) = messages.values()
            answer = _reply(request, self._answer(request, attempt, note))
            attempt.answered = (mark, answer)
        return attempt.answered[1]

    def _answer(self, request: Header, attempt: Attempt, note: Tree) -> Tree:
        member = attempt.member
        if request.purpose == "share" and isinstance(note, Keys):
            return Sealed.of(member.share(note.all()))
        if request.purpose == "mask" and isinstance(note, Sealed):
            _, messages = unseal(attempt.reply, len(attempt.reply))
            values = encoded(messages["upload"], len(member.others))
            masked = member.mask(note.all(), values)
            return Masked(torch.from_numpy(masked.view("int64")))
        if request.purpose == "confirm" and isinstance(note, Survivors):
            own, survivors = member.number, note.all()
            self.book.check(survivors)
            return Confirmations.of({own: member.confirm(survivors)})
        if request.purpose == "unmask" and isinstance(note, Confirmations):
            answer = Opened.of(member.unmask(note.all()))
            self._check_first(request, attempt.reply)  # again: several totals may be under way
            self.book.check(member.survivors)
            upload = _upload(attempt.reply)
            self.book.add(name_of(request), upload, member.survivors)  # before the answer leaves
            self.given = {_stage(request): attempt}
            return answer
        raise MessageError(f"a {type(note).__name__} is no request to {request.purpose}")


def about_of(recipe: str, download: str) -> str:
    """Return the digest of what all members of a group must have in common."""
    return digest(f"{recipe} {download}".encode())


def occasion_of(header: Header, about: str) -> Occasion:
    """Return the occasion of a request."""
    return Occasion(
        header.run, header.round, header.stage, header.attempt, header.architecture, about
    )


def name_of(request: Header) -> str:
    """Return the name of a stage of a run."""
    return f"{request.run} {request.round} {request.stage} {request.architecture}"


def _upload(reply: bytes) -> str:
    """Return the digest of the message in a reply."""
    return header_of(reply).messages["upload"].digest


def _stage(request: Header) -> Stage:
    return request.round, request.stage, request.architecture


def _reply(request: Header, note: Tree) -> bytes:
    return seal(request.model_copy(update={"purpose": "reply"}), {request.purpose: note})
