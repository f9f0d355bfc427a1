"""The engine of a real federation: a remote engine that knows which sites take part in a round."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from fedgist.core.method import ClientInfo, Context, Order, Reply
from fedgist.core.replies import Subtotal
from fedgist.core.tree import Tree
from fedgist.engines.engine import Answer, Scores, Split
from fedgist.engines.remote_engine import RemoteEngine
from fedgist.errors import Stopped
from fedgist.federation.run_state import RunStateFile, StatusBoard
from fedgist.federation.site_wire import SiteWire
from fedgist.recipe.federation_section import FederationSection

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

    def check_stop(self) -> None:
        """Raise Stopped if the run is to stop: nothing is lost, for sites keep their replies.

        It is called while the server waits, so it also keeps the shown state up to date.
        """
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

    def wait_for(self, least: int, among: Collection[int], seconds: float | None) -> None:
        """Wait until so many sites are ready, or until the time is over. An empty list is all."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            self.check_stop()
            present = self.wire.present()
            count = len(present.intersection(among) if among else present)
            if count >= least or (end is not None and time.monotonic() >= end):
                return
            self._show(f"{count} of {least} sites are ready; {self._missing()}")
            with self.wire.changed:
                self.wire.changed.wait(LOOK_S)

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
        answer = self.remote.ask(ctx, orders, downs)
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
        """Let each site that is ready score its model."""
        return self.remote.score(ctx, orders, downs, split)

    def close(self) -> None:
        """Close the wire."""
        self.remote.close()

    def _missing(self) -> str:
        present = self.wire.present()
        names = [s.name for s in self.board.sites.values() if s.number not in present]
        return f"missing: {', '.join(names) or 'nobody'}"

    def _show(self, text: str) -> None:
        if text != self.board.waiting_for:
            self.board.waiting_for = text
            self.board.write()
