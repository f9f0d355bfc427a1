"""The wire to real sites, without a network: who is asked, when, and which reply counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import cast

import pytest

from fedgist.errors import MessageError
from fedgist.federation.network.frames import PIECE, Assembly, Begin
from fedgist.federation.network.wire import MOST_LATE, Request, SiteWire
from intruders import HUNG_S

LARGEST = 100
SOON_S = 0.05
ENVELOPE = (b"request",)


def received(ident: bytes, blob: bytes) -> Assembly:
    assembly = Assembly(Begin(ident, len(blob), b""))
    assembly.add(PIECE + blob)
    return assembly


class Site:
    """A site that is asked; it answers when it is told to, or at once with ``blob``."""

    def __init__(self, wire: SiteWire, number: int, blob: bytes = b"") -> None:
        self.wire, self.number, self.blob = wire, number, blob
        self.requests: list[Request] = []
        self.link = self.send  # a wire tells links apart by identity

    def send(self, request: Request) -> None:
        self.requests.append(request)
        if self.blob:
            threading.Thread(target=self.answer, args=(self.blob,)).start()

    def join(self) -> Site:
        self.wire.join(self.number, self.link)
        return self

    def leave(self) -> None:
        self.wire.leave(self.number, self.link)

    def answer(self, blob: bytes, ident: bytes | None = None) -> None:
        ident = self.requests[-1].ident if ident is None else ident
        request = self.wire.accepted(self.number, Begin(ident, len(blob), b""))
        if request is not None:
            self.wire.complete(request, received(ident, blob))


@pytest.fixture
def wire() -> Iterator[SiteWire]:
    made = SiteWire()
    yield made
    made.close()


def exchanged(
    wire: SiteWire, *clients: int, deadline_s: float | None = HUNG_S
) -> list[tuple[int, bytes]]:
    return list(wire.exchange([(c, ENVELOPE) for c in clients], deadline_s, LARGEST))


def at_once(work: Callable[[], object]) -> threading.Thread:
    """Do something while another thread waits for it."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_replies_come_by_client_whatever_the_order_of_arrival(wire: SiteWire) -> None:
    first, second = Site(wire, 0), Site(wire, 1)
    first.join()
    second.join()
    exchange = wire.exchange([(1, ENVELOPE), (0, ENVELOPE)], HUNG_S, LARGEST)

    def answer() -> None:
        while not (first.requests and second.requests):
            pass
        second.answer(b"b")
        first.answer(b"a")

    thread = at_once(answer)
    assert list(exchange) == [(0, b"a"), (1, b"b")]
    thread.join()
    assert wire.unasked() == {}


def test_a_site_that_is_away_is_left_out(wire: SiteWire) -> None:
    Site(wire, 2, b"c").join()
    assert wire.present() == {2}
    assert exchanged(wire, 0, 2) == [(2, b"c")]


def test_what_is_outstanding_is_sent_again_when_a_site_comes_back(wire: SiteWire) -> None:
    before, after = Site(wire, 0), Site(wire, 0, b"a")
    before.join()

    def come_back() -> None:
        while not before.requests:
            pass
        before.leave()
        assert wire.present() == frozenset()
        after.join()

    thread = at_once(come_back)
    assert exchanged(wire, 0) == [(0, b"a")]
    thread.join()
    assert after.requests == before.requests  # the same id and the same bytes


def test_nothing_is_sent_again_after_the_deadline_or_after_the_answer(wire: SiteWire) -> None:
    site = Site(wire, 0).join()
    assert exchanged(wire, 0, deadline_s=SOON_S) == []
    other = Site(wire, 0).join()
    assert (len(site.requests), other.requests) == (1, [])
    third = Site(wire, 0, b"a").join()
    assert exchanged(wire, 0) == [(0, b"a")]
    last = Site(wire, 0).join()
    assert (len(third.requests), last.requests) == (1, [])


def test_a_late_reply_is_handed_to_a_later_exchange_before_its_own(wire: SiteWire) -> None:
    first, second = Site(wire, 0).join(), Site(wire, 1).join()
    assert exchanged(wire, 0, 1, deadline_s=SOON_S) == []
    second.answer(b"late b")
    first.answer(b"late a")
    third = Site(wire, 2, b"c").join()
    assert exchanged(wire, 2) == [(0, b"late a"), (1, b"late b"), (2, b"c")]
    assert len(third.requests) == 1
    assert exchanged(wire, 2) == [(2, b"c")]
    first.answer(b"late a")  # again
    assert wire.unasked() == {0: 1}


def test_a_reply_that_the_exchange_did_not_take_is_late(wire: SiteWire) -> None:
    """An exchange that ends by an error loses no reply."""
    Site(wire, 0, b"a").join()
    second = Site(wire, 1, b"b").join()
    exchange = cast(
        "Generator[tuple[int, bytes], None, None]",
        wire.exchange([(0, ENVELOPE), (1, ENVELOPE)], HUNG_S, LARGEST),
    )
    assert next(exchange) == (0, b"a")
    while not second.requests[0].answered:
        pass
    with pytest.raises(KeyboardInterrupt):
        exchange.throw(KeyboardInterrupt)
    assert exchanged(wire) == [(1, b"b")]


def test_only_so_many_late_replies_are_waited_for(wire: SiteWire) -> None:
    site = Site(wire, 0).join()
    for _ in range(MOST_LATE + 1):
        assert exchanged(wire, 0, deadline_s=0.0) == []
    oldest, newest = site.requests[0], site.requests[-1]
    site.answer(b"x", oldest.ident)
    assert wire.unasked() == {0: 1}
    site.answer(b"x", newest.ident)
    assert wire.unasked() == {}
    assert exchanged(wire) == [(0, b"x")]


def test_answers_that_nobody_asked_for_are_counted_by_site(wire: SiteWire) -> None:
    site, other = Site(wire, 0, b"a").join(), Site(wire, 1).join()
    assert exchanged(wire, 0) == [(0, b"a")]
    site.answer(b"a")
    site.answer(b"a")
    other.answer(b"b", bytes(16))
    assert wire.unasked() == {0: 2, 1: 1}
    assert wire.unasked() == {}


def test_the_request_of_another_site_cannot_be_answered(wire: SiteWire) -> None:
    site, thief = Site(wire, 0).join(), Site(wire, 1).join()

    def steal() -> None:
        while not site.requests:
            pass
        thief.answer(b"stolen", site.requests[0].ident)
        site.answer(b"a")

    thread = at_once(steal)
    assert exchanged(wire, 0) == [(0, b"a")]
    thread.join()
    assert wire.unasked() == {1: 1}


def test_a_link_that_was_replaced_may_leave(wire: SiteWire) -> None:
    older = Site(wire, 0).join()
    newer = Site(wire, 0).join()
    older.leave()
    assert wire.present() == {0}
    newer.leave()
    assert wire.present() == frozenset()


def test_two_answers_at_once_count_once(wire: SiteWire) -> None:
    """Both connections of a site had begun to answer when the first reply was complete."""
    site = Site(wire, 0).join()

    def answer() -> None:
        while not site.requests:
            pass
        begin = Begin(site.requests[0].ident, 1, b"")
        both = wire.accepted(0, begin), wire.accepted(0, begin)
        for request, blob in zip(both, (b"a", b"b"), strict=True):
            assert request is not None
            wire.complete(request, received(begin.ident, blob))

    thread = at_once(answer)
    assert exchanged(wire, 0) == [(0, b"a")]
    thread.join()
    assert wire.unasked() == {0: 1}


def test_a_site_that_is_shut_out_is_not_waited_for(wire: SiteWire) -> None:
    site, other = Site(wire, 0).join(), Site(wire, 1, b"b").join()

    def shut_out() -> None:
        while not site.requests:
            pass
        wire.leave(0, site.link, for_good=True)

    thread = at_once(shut_out)
    assert exchanged(wire, 0, 1, deadline_s=None) == [(1, b"b")]
    thread.join()
    assert len(other.requests) == 1
    assert Site(wire, 0).join().requests == []


def test_a_reply_that_is_too_large_counts_as_answered_without_bytes(wire: SiteWire) -> None:
    site = Site(wire, 0).join()

    def answer() -> None:
        while not site.requests:
            pass
        with pytest.raises(MessageError, match=r"of 101 bytes was announced; at most 100"):
            site.answer(bytes(LARGEST + 1))

    thread = at_once(answer)
    assert exchanged(wire, 0) == [(0, b"")]
    thread.join()
    with pytest.raises(MessageError, match=r"of 101 bytes was announced; at most 100"):
        site.answer(bytes(LARGEST + 1))  # nobody asks for it any more
    assert wire.unasked() == {0: 1}


def test_a_wait_is_stopped_by_the_check() -> None:
    calls = iter([None, None, KeyboardInterrupt()])

    def check() -> None:
        if (error := next(calls)) is not None:
            raise error

    wire = SiteWire(check)
    site = Site(wire, 0).join()
    with suppress(KeyboardInterrupt):
        exchanged(wire, 0, deadline_s=None)
        raise AssertionError("it waited until an answer came")
    assert site.requests[0].parts is None  # it is not sent again
    wire.close()


def test_after_its_end_a_wire_has_no_sites(wire: SiteWire) -> None:
    site = Site(wire, 0).join()
    exchanged(wire, 0, deadline_s=0.0)
    site.answer(b"late")
    wire.close()
    assert wire.present() == frozenset()
    assert exchanged(wire, 0) == []
