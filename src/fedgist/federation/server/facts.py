"""The server of an exchange of facts: it asks all sites, and gets sums, before any training."""

from __future__ import annotations

import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedgist.core.message import Form
from fedgist.core.method import Context, Method, Order, Task
from fedgist.core.objectives.classes import Classes
from fedgist.core.replies import gather
from fedgist.core.training import Training
from fedgist.core.tree import Tree
from fedgist.data.sources.splits import in_order
from fedgist.engines.engine import Answer
from fedgist.errors import FederationError, Stopped, listed
from fedgist.federation.keys.certificates import Identity
from fedgist.federation.keys.kits import Kit
from fedgist.federation.keys.roster import ROSTER, RosterFile
from fedgist.federation.network.frames import Note
from fedgist.federation.network.grpc_server import GrpcServer
from fedgist.federation.network.invitation import (
    Greeting,
    Hello,
    Invitation,
    Versions,
    check_hello,
    check_versions,
    parsed_note,
)
from fedgist.federation.network.wire import SiteWire
from fedgist.federation.server.status import SHUT_OUT, SiteStatus, StatusBoard
from fedgist.runs.files.digests import of_text
from fedgist.wire.remote_engine import Patience, RemoteEngine
from fedgist.wire.secure.engine import SecureEngine
from fedgist.world.facts.pooled import PooledFacts, pooled, scales
from fedgist.world.facts.question import Filling, Plan, Question
from fedgist.world.facts.sums import (
    COMPARE,
    FACTS,
    GROUP,
    ROUNDS,
    SCALES,
    Answered,
    FactsSums,
    ScaleSums,
    Told,
    facts_sums,
    scale_sums,
)

LOOK_S = 0.2  # between looks at who is there
WAITING = "the facts are known; waiting for a run (Ctrl-C ends)"


@dataclass(frozen=True)
class FactsAnswer:
    """What the sites answered: the plan, the facts, and who had which part in it.

    ``absent`` are the sites that are not in the total, by name, each with the reason. ``differs``
    says which sites told that their rows differ. ``received`` and ``sent`` are bytes on the wire.
    """

    plan: Plan
    facts: PooledFacts
    sites: tuple[str, ...]
    absent: Mapping[str, str]
    differs: Mapping[str, str]
    received: int
    sent: int


@dataclass
class FactsDesk:
    """The server's decisions about sites: see the protocol ``Desk``."""

    question: str
    run: str
    names: tuple[str, ...]
    certificate: bytes
    roster: RosterFile
    board: StatusBoard
    stop: threading.Event
    told: dict[int, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def why_refused(self, identity: Identity) -> str | None:
        """Return why a certificate is not accepted; None if it is."""
        return self.roster.now().why_refused(identity)

    def number_of(self, identity: Identity) -> int:
        """Return a site's number."""
        return self.roster.now().numbers[identity.name]

    def invitation(self, number: int, greeting: Note) -> Note:
        """Return the question, and what a site must know to answer it."""
        versions = parsed_note(Greeting, greeting).versions
        if number >= len(self.names):
            raise FederationError("this exchange was begun before the site was added")
        self.board.sites[number].version = versions.fedgist
        check_versions(Versions.own(), versions)
        return self._invitation(number).model_dump(mode="json")

    def _invitation(self, number: int) -> Invitation:
        return Invitation(
            run=self.run,
            recipe="",
            digest=of_text(self.question),
            number=number,
            names=self.names,
            certificate=self.certificate.decode(),
            last=None,
            state_lost="refuse",
            question=self.question,
        )

    def judge(self, number: int, hello: Note) -> None:
        """Check what a prepared site says of itself, and keep the names that it tells."""
        site = parsed_note(Hello, hello)
        check_hello(self._invitation(number), site, {}, 0)
        self.told[number] = site.names

    def saw(self, number: int, state: str, text: str = "") -> None:
        """Take note of a site's state."""
        if number in self.board.sites:
            self.board.saw(number, state, text)

    def moved(self, number: int, *, sent: int = 0, received: int = 0) -> None:
        """Take note of a request to a site, or of its reply."""
        if number in self.board.sites:
            self.board.moved(number, sent, received)

    def command(self, name: str, identity: Identity) -> Note:
        """Do what an administrator asked for."""
        del identity
        if name == "Stop":
            self.stop.set()
        return {**self.board.plain(), "stopping": self.stop.is_set()}


def ask_sites(
    kit: Kit,
    question: Question,
    listen: str,
    say: Callable[[str], None],
    *,
    ready: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> FactsAnswer:
    """Ask the sites of a federation; return their answer when enough have given it.

    ``listen`` is the address to listen on. ``ready`` is called with the port when it is open.

    Raises
    ------
    FederationError
        If too few sites answered, or no total was opened.
    Stopped
        If an administrator stopped it.
    """
    roster, text = RosterFile(kit.folder / ROSTER), question.model_dump_json()
    numbers = roster.now().numbers
    names = tuple(sorted(numbers, key=lambda name: numbers[name]))
    run, stop = secrets.token_hex(8), stop or threading.Event()
    with tempfile.TemporaryDirectory(prefix="fedgist-facts-") as place:
        folder = Path(place)
        board = StatusBoard(folder, run, kit.federation, kit.address)
        board.sites = {number: SiteStatus.of(number, name) for number, name in enumerate(names)}
        desk = FactsDesk(text, run, names, kit.certificate, roster, board, stop)
        exchange = _Exchange(question, desk, SiteWire(), say, folder)
        server = GrpcServer(kit, listen, desk, exchange.wire, folder)
        port = server.start()
        say(f"listening on port {port}; sites dial {kit.address}")
        ready(port)
        try:
            answer = exchange.run()
            server.end(WAITING, sites_wait=True)
        finally:
            server.close()
    return answer


@dataclass
class _Exchange:
    """The stages of an exchange of facts with the sites that are there."""

    question: Question
    desk: FactsDesk
    wire: SiteWire
    say: Callable[[str], None]
    folder: Path
    received: int = 0
    sent: int = 0
    absent: dict[int, str] = field(default_factory=dict)

    @property
    def least(self) -> int:
        """The number of sites that must answer."""
        count = len(self.desk.names)
        return min(count, self.question.least_sites or count)

    def run(self) -> FactsAnswer:
        """Do all stages, and return what the sites answered."""
        self.wire.check = self._check
        self._wait()
        filling = Filling(names=self._names())
        sites, searched = sorted(self.wire.present()), self.question.searched
        if self.question.epsilon is not None:
            times = " in each of two exchanges" if searched else ""
            self.say(f"each site is charged epsilon {self.question.epsilon:g}{times}")
        if searched:
            self.say(f"asking {len(sites)} sites for centre and unit of {listed(searched)}")
            form = Form.of(scale_sums(Plan(self.question, filling), ()))
            first, members = self._total(SCALES, sites, Told.of(filling.model_dump_json()), form)
            assert isinstance(first, ScaleSums)  # the form's
            found = scales(self.question, first, len(members))
            filling = filling.model_copy(update={"scales": found})
            if self.question.sums == "secure":
                sites = sorted(members)  # all totals of facts are over the same sites
        plan, told = Plan(self.question, filling), Told.of(filling.model_dump_json())
        self.say(f"asking {len(sites)} sites for {listed(self.question.kinds)}")
        total, members = self._total(FACTS, sites, told, Form.of(facts_sums(plan, ())))
        assert isinstance(total, FactsSums)  # the form's
        facts = pooled(plan, total, len(members))
        differs = self._compared(members, Answered(told.text, total))
        return FactsAnswer(
            plan,
            facts,
            tuple(self.desk.names[site] for site in members),
            self._without(members),
            differs,
            self.received,
            self.sent,
        )

    def _total(
        self, stage: str, sites: Sequence[int], told: Told, form: Form
    ) -> tuple[Tree, tuple[int, ...]]:
        """Return the total of a stage, and whose it is."""
        engine, ctx = self._engine(stage, form), self._context(stage)
        orders = [Order(site, GROUP) for site in sites]
        secure = self.question.sums == "secure"
        by = SecureEngine(engine, of_text(self.desk.question)) if secure else engine
        try:
            answer: Answer = by.ask(ctx, orders, [told] * len(orders))
        except FederationError as error:
            raise FederationError(self._named(str(error))) from error
        received, sent = answer.wire_bytes or (0, 0)
        self.received, self.sent = self.received + received, self.sent + sent
        self._note(answer)
        (total,) = gather(answer.subtotals, ()).totals
        return total.message, total.clients

    def _note(self, answer: Answer) -> None:
        """Keep who did not take part, and say it."""
        for who, why in (*answer.refused, *answer.absent):
            if self.absent.get(who.client) != why:
                self.say(f"{self.desk.names[who.client]}: {why}")
            self.absent[who.client] = why
        for event in answer.events:
            self.say(self._named(event))

    def _without(self, members: Sequence[int]) -> dict[str, str]:
        """Return the sites that are not in the total, with the reason."""
        notes = {n: site.note or "it was not there" for n, site in self.desk.board.sites.items()}
        every = notes | self.absent
        return {self.desk.names[n]: every[n] for n in sorted(notes) if n not in members}

    def _named(self, text: str) -> str:
        """Return a text with the names of sites in place of their numbers."""
        names = self.desk.names
        return re.sub(r"\bclient (\d+)", lambda found: names[int(found[1])], text)

    def _compared(self, members: Sequence[int], answered: Answered) -> dict[str, str]:
        """Send the total to the sites of it; return what they say about differences."""
        engine, ctx = self._engine(COMPARE, None), self._context(COMPARE)
        orders = [Order(site, GROUP) for site in members]
        _, refused = engine.finish(ctx, orders, [answered] * len(orders))
        for site, words in refused.items():
            self.say(f"{self.desk.names[site]}: {words}")
        return {self.desk.names[site]: words for site, words in refused.items()}

    def _engine(self, stage: str, form: Form | None) -> RemoteEngine:
        seconds = self.question.deadline_s
        engine = RemoteEngine(
            Method(),
            self.wire,
            run=self.desk.run,
            patience=Patience(seconds, seconds, self.least, 2),
            before_repeating=lambda event: self.say(self._named(event)),
        )
        if form is not None:
            engine.expect(stage, GROUP, form)
        return engine

    def _context(self, stage: str) -> Context:
        """Return the context of a stage in which no model is trained."""
        count = len(self.desk.names)
        task = Task((1,), 1, count, {}, {}, Training(), Classes(1))
        return Context(torch.zeros(2, dtype=torch.int64), task, ROUNDS[stage], stage)

    def _names(self) -> dict[str, tuple[str, ...]]:
        """Return the names that sites have told, in order."""
        present, found = self.wire.present(), dict[str, tuple[str, ...]]()
        for key in self.question.unnamed:
            told = {name for site in present for name in self.desk.told[site].get(key, ())}
            if not told:
                raise FederationError(
                    f"{key}: no site has named any (policy.least_rows): list them"
                )
            found[key] = in_order(told)
        return found

    def _check(self) -> None:
        self.desk.board.refresh()
        if self.desk.stop.is_set():
            raise Stopped(self.folder)

    def _wait(self) -> None:
        """Wait until enough sites are ready, and say for whom."""
        before, board = "", self.desk.board
        while len(present := self.wire.present()) < self.least:
            self._check()
            missing = [
                f"{site.name} ({site.note})" if site.state in SHUT_OUT else site.name
                for number, site in sorted(board.sites.items())
                if number not in present
            ]
            text = f"waiting for {listed(missing)}; {self.least} of {len(board.sites)} are needed"
            if text != before:
                self.say(text)
            before = board.waiting_for = text
            with self.wire.changed:
                self.wire.changed.wait(LOOK_S)
        board.waiting_for = ""
