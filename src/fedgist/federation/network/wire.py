"""The wire to real sites: open requests, their replies, and the sites that are connected.

It knows no network. A network reports which sites came and went, and delivers requests and replies
from a thread of its own.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedgist.errors import MessageError
from fedgist.federation.network.frames import ID_BYTES, Assembly, Begin
from fedgist.wire.wire import Parts

MOST_LATE = 256  # requests after their deadline whose replies are still accepted
LOOK_S = 0.2  # between looks at whether the run is to stop


@dataclass(eq=False)
class Request:
    """One envelope to a site, and its reply when it has arrived.

    ``parts`` is None after the deadline: the request is then not sent again, and its reply is late.
    """

    client: int
    parts: Parts | None = field(repr=False)
    largest: int
    ident: bytes = field(default_factory=lambda: secrets.token_bytes(ID_BYTES))
    reply: Assembly | None = field(default=None, repr=False)
    answered: bool = False

    def take(self) -> bytes:
        """Return the reply; no bytes if it was too large."""
        reply, self.reply = self.reply, None
        return b"" if reply is None else reply.take()


Send = Callable[[Request], None]


class SiteWire:
    """A wire over connections that come and go. All functions may be called from any thread."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """Begin without sites; ``check`` raises an exception if the run is to stop."""
        self.check = check
        self.changed = threading.Condition()
        self._links: dict[int, Send] = {}
        self._open: dict[bytes, Request] = {}
        self._late: deque[Request] = deque()
        self._unasked: Counter[int] = Counter()
        self._largest = 0  # bytes of the largest reply that was acceptable so far

    def present(self) -> frozenset[int]:
        """Return the sites that are ready now."""
        with self.changed:
            return frozenset(self._links)

    def pending(self) -> list[int]:
        """Return the sites whose replies are waited for, in order."""
        with self.changed:
            waiting = (r for r in self._open.values() if r.parts is not None and not r.answered)
            return sorted({request.client for request in waiting})

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        """Send the envelopes; yield late replies of earlier requests, then those of these."""
        end = None if deadline_s is None else time.monotonic() + deadline_s
        requests = self._send(envelopes, largest)
        try:
            for request in self._take_late():
                yield request.client, request.take()
            for request in requests:
                self._wait(request, end)
                if request.answered:
                    with self.changed:
                        del self._open[request.ident]
                    yield request.client, request.take()
        finally:
            self._expire(requests)

    def unasked(self) -> Mapping[int, int]:
        """Return the number of dropped replies per site since the last call."""
        with self.changed:
            counts, self._unasked = self._unasked, Counter()
            return counts

    def close(self) -> None:
        """Forget all requests, and drop the replies that nobody took."""
        with self.changed:
            for request in (*self._open.values(), *self._late):
                if request.reply is not None:
                    request.reply.close()
            self._links.clear()
            self._open.clear()
            self._late.clear()
            self.changed.notify_all()

    def join(self, client: int, send: Send) -> None:
        """Connect a site that is ready; what is outstanding is sent to it again."""
        with self.changed:
            self._links[client] = send
            for request in self._open.values():
                if request.client == client and not request.answered and request.parts is not None:
                    send(request)
            self.changed.notify_all()

    def leave(self, client: int, send: Send, *, for_good: bool = False) -> None:
        """Disconnect a site, unless it has connected anew with another ``send``.

        If it left for good, nobody waits for its replies any longer.
        """
        with self.changed:
            if self._links.get(client) is send:
                del self._links[client]
                for request in self._open.values():
                    if for_good and request.client == client:
                        request.parts = None
            self.changed.notify_all()

    def accepted(self, client: int, begin: Begin) -> Request | None:
        """Return the request that a reply answers; None if nobody asked for this reply.

        Raises
        ------
        MessageError
            If the reply is larger than a valid one. The request then counts as answered.
        """
        with self.changed:
            request = self._open.get(begin.ident)
            if request is None or request.client != client or request.answered:
                self._unasked[client] += 1
                request = None
            most = self._largest if request is None else request.largest
        if begin.size <= most:
            return request
        if request is not None:
            self.complete(request, None)
        raise MessageError(
            f"a reply of {begin.size} bytes was announced; at most {most} are accepted"
        )

    def complete(self, request: Request, reply: Assembly | None) -> None:
        """Take the reply to a request; None if it was too large."""
        with self.changed:
            if request.answered:  # by a connection that was replaced in the meantime
                self._unasked[request.client] += 1
                if reply is not None:
                    reply.close()
                return
            request.answered, request.reply = True, reply
            if request.parts is None:
                self._open.pop(request.ident, None)
                self._late.append(request)
            self.changed.notify_all()

    def _send(self, envelopes: Sequence[tuple[int, Parts]], largest: int) -> list[Request]:
        """Send the envelopes to the sites that are connected; return the requests by client."""
        requests = []
        with self.changed:
            self._largest = max(self._largest, largest)
            for client, parts in sorted(envelopes, key=lambda pair: pair[0]):
                if (send := self._links.get(client)) is not None:
                    request = Request(client, parts, largest)
                    self._open[request.ident] = request
                    requests.append(request)
                    send(request)
        return requests

    def _take_late(self) -> list[Request]:
        with self.changed:
            late = sorted(self._late, key=lambda request: request.client)
            self._late.clear()
            return late

    def _wait(self, request: Request, end: float | None) -> None:
        """Wait until a request is answered or given up, or until the deadline."""
        while True:
            self.check()
            with self.changed:
                left = None if end is None else end - time.monotonic()
                over = request.parts is None or (left is not None and left <= 0)
                if request.answered or over:
                    return
                self.changed.wait(LOOK_S if left is None else min(LOOK_S, left))

    def _expire(self, requests: Sequence[Request]) -> None:
        """Stop sending requests again; their replies are late from now on."""
        with self.changed:
            for request in requests:
                request.parts = None
                if request.answered and request.ident in self._open:  # nobody took it
                    del self._open[request.ident]
                    self._late.append(request)
            late = [ident for ident, request in self._open.items() if request.parts is None]
            for ident in late[:-MOST_LATE]:
                del self._open[ident]
