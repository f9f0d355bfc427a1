"""The engine of a real federation: a remote engine that knows which sites take part in a round."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fedgist.core.method import ClientInfo, Context, Order, Reply
from fedgist.core.replies import Subtotal
from fedgist.core.tree import Tree
from fedgist.engines.engine import Answer, Scores, Split
from fedgist.errors import Stopped, listed
from fedgist.federation.network.wire import SiteWire
from fedgist.federation.server.run_state import RunStateFile
from fedgist.federation.server.status import StatusBoard
from fedgist.recipe.federation_section import FederationSection
from fedgist.wire.remote_engine import RemoteEngine
from fedgist.wire.secure.engine import SecureEngine

LOOK_S = 0.2  # between looks at who is there
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a stage is asked again


@dataclass
class SitesEngine:
    """Clients at real sites. ``stop`` is set when the run is to stop."""

    remote: RemoteEngine
    wire: SiteWire
    clients: tuple[ClientInfo, ...]
    section: FederationSection
    state: RunStateFile
    board: StatusBoard
    stop: threading.Event
    pause_s: float = FIRST_PAUSE_S
    took_part: frozenset[int] = frozenset()  # in all stages of the round
    news: list[str] = field(default_factory=list)  # sentences for the next round's line
    say: Callable[[str], None] = lambda _: None  # shows what a round waits for
    sums: SecureEngine | None = None  # opens totals alone, if it is there
    stage: str = ""  # how the stage under way goes on

    def check_stop(self) -> None:
        """Raise Stopped if the run is to stop: nothing is lost, for sites keep their replies.

        It is called while the server waits, so it also keeps the shown state up to date.
        """
        if self.stage and (pending := self.wire.pending()):
            self.board.waiting_for = f"waiting for {self._names(pending)}; {self.stage}"
            self.board.changed = True
        self.board.refresh()
        if self.stop.is_set():
            raise Stopped(self.state.folder)

    def online(self, number: int) -> list[ClientInfo]:
        """Wait until enough sites are ready for a round; return them.

        A round that was begun before a restart is done again with the same sites, ready or not.
        """
        begun = self.state.state.begun
        self.board.round, self.board.attempt = number, 1
        if begun is not None and begun[0] == number:
            ready = frozenset(begun[1])
            least, patience = len(ready), self.section.deadline_s
        else:
            ready, least, patience = frozenset(), self.section.least_sites, None
        self.wait_for(least, ready, patience)
        self.wait_for(min(least, self.section.least_sites), ready, None)
        sites = ready or self.wire.present()
        self.state.begin(number, sites)
        self.took_part = frozenset(sites)
        self._show("")
        return [client for client in self.clients if client.id in sites]

    def wait_for(
        self, least: int, among: Collection[int], seconds: float | None, then: str = ""
    ) -> None:
        """Wait until so many sites are ready, or until the time is over. An empty list is all.

        ``then`` says what begins afterwards, if that is not a round.
        """
        end = None if seconds is None else time.monotonic() + seconds
        at = None if seconds is None else time.time() + seconds
        while True:
            self.check_stop()
            present = self.wire.present()
            count = len(present.intersection(among) if among else present)
            if count >= least or (end is not None and time.monotonic() >= end):
                return
            sites = among or self.board.sites
            missing = self._names([site for site in sites if site not in present])
            begins = then or self.begins(least, len(sites), count, at)
            self._show(f"waiting for {missing}; {begins}", aloud=not then)
            with self.wire.changed:
                self.wire.changed.wait(LOOK_S)

    def begins(self, least: int, total: int, ready: int, at: float | None) -> str:
        """Return when a round begins: with how many sites, and when at the latest, if known."""
        number = self.board.round
        if at is not None:
            few = min(least, self.section.least_sites)
            return f"round {number} begins with {few} of {total} at {_clock(at)}, or with all"
        are = "is" if ready == 1 else "are"
        return f"round {number} begins with {least} of {total}, and {ready} {are} ready"

    def before_repeating(self, event: str) -> None:
        """Wait a little before a stage is asked again, longer each time."""
        self.board.attempt += 1
        self._show(event)
        end = time.monotonic() + self.pause_s
        while time.monotonic() < end:
            self.check_stop()
            time.sleep(LOOK_S)
        self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s)

    def ask(self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        """Send each order with its download; return the replies."""
        self.pause_s = FIRST_PAUSE_S
        with self._waiting(f"round {ctx.round}, {ctx.stage}", ctx.round, len(orders)):
            answer = (self.sums or self.remote).ask(ctx, orders, downs)
        parts: list[Subtotal | Reply] = [*answer.subtotals, *answer.each]
        sites = {a.client for part in parts if part.round == ctx.round for a in part.asked}
        place = self.remote.method.stages(ctx).index(ctx.stage)
        self.state.answered(sites, (ctx.round, place))
        self.took_part &= sites
        news = tuple(self.news)
        del self.news[: len(news)]  # another thread may have added some
        for who, reason in answer.refused:
            self.board.refusal(who.client, reason)
        for site in sites:
            self.board.sites[site].last_round = ctx.round
        return replace(answer, events=(*answer.events, *news))

    def score(
        self, ctx: Context, orders: Sequence[Order], downs: Sequence[Tree], split: Split
    ) -> Scores:
        """Let each site that is ready score its model; show who has no score, and why."""
        self.pause_s = FIRST_PAUSE_S
        with self._waiting(f"round {ctx.round}, its scores,", ctx.round, len(orders)):
            scores = self.remote.score(ctx, orders, downs, split)
        names = [f"{self._names([site])}: {reason}" for site, reason in scores.missing]
        count = len(orders) - len(names)
        whole = f"{count} of {len(orders)} clients"
        self.board.scored = f"{whole} (not {listed(names)})" if names else whole
        return scores

    @contextlib.contextmanager
    def _waiting(self, stage: str, number: int, total: int) -> Iterator[None]:
        """While a stage is under way, show who is waited for, and until when."""
        seconds, least = self.remote.patience.deadline(number), self.remote.patience.least_replies
        ends = "" if seconds is None else f" at {_clock(time.time() + seconds)}"
        self.stage = f"{stage} goes on with {min(least, total)} of {total}{ends}, or with all"
        try:
            yield
        finally:
            self.stage, self.board.waiting_for, self.board.changed = "", "", True

    def close(self) -> None:
        """Close the wire."""
        self.remote.close()

    def _names(self, sites: Collection[int]) -> str:
        return listed(self.board.sites[site].name for site in sorted(sites))

    def _show(self, text: str, *, aloud: bool = False) -> None:
        if text != self.board.waiting_for:
            self.board.waiting_for = text
            self.board.write()
            if aloud and text:
                self.say(text)


def _clock(seconds: float) -> str:
    """Return a time of the machine's clock, as hours and minutes."""
    return time.strftime("%H:%M", time.localtime(seconds))
