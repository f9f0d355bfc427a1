"""The server of a federation: it waits for its sites, does the rounds, and keeps the record."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedgist.core import random
from fedgist.engines.method_check import check_loss_settings, check_method
from fedgist.engines.worker_pool import default_workers
from fedgist.errors import CheckpointError, FederationError, RecipeError, Stopped
from fedgist.federation.agreement.recipe_check import as_federated, check_stated
from fedgist.federation.agreement.server_setup import server_context
from fedgist.federation.keys.certificates import Identity, expiry_note
from fedgist.federation.keys.kits import Kit
from fedgist.federation.keys.roster import ROSTER, Roster, RosterFile
from fedgist.federation.network.frames import Note
from fedgist.federation.network.grpc_server import GrpcServer
from fedgist.federation.network.invitation import (
    Greeting,
    Hello,
    Invitation,
    Versions,
    check_hello,
    check_versions,
    digest_of_recipe,
    outlines,
    parsed_note,
    recipe_text,
)
from fedgist.federation.network.wire import SiteWire
from fedgist.federation.server.engine import LOOK_S, SitesEngine
from fedgist.federation.server.run_state import TOTALS, RunStateFile, TotalsFolder
from fedgist.federation.server.status import SiteStatus, StatusBoard
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import Recipe
from fedgist.recipe.resolve import resolve
from fedgist.runs.files import checkpoint as checkpoints
from fedgist.runs.files.record import RECIPE
from fedgist.runs.files.run_directory import PARTICIPANTS, SITES_STATE, check_own_files, locked
from fedgist.runs.resuming import ROUNDS_KEY
from fedgist.runs.round import Observer, ServerRun, start_server
from fedgist.runs.run_rounds import Place, run_server
from fedgist.wire.remote_engine import Patience, RemoteEngine
from fedgist.wire.secure.engine import SecureEngine
from fedgist.world.secure_sums import check_secure_sums
from fedgist.world.server_context import ServerContext

LOG = logging.getLogger(__name__)


@dataclass
class SiteDesk:
    """The server's decisions about sites and administrators: see the protocol ``Desk``."""

    side: ServerContext
    state: RunStateFile
    board: StatusBoard
    roster: RosterFile
    certificate: bytes
    stop: threading.Event
    invitations: dict[int, Invitation] = field(default_factory=dict)
    stopped_by: str = ""  # an administrator
    news: list[str] = field(default_factory=list)  # sentences for the next round's line

    def why_refused(self, identity: Identity) -> str | None:
        """Return why a certificate is not accepted; None if it is."""
        return self.roster.now().why_refused(identity)

    def number_of(self, identity: Identity) -> int:
        """Return a site's number."""
        return self.roster.now().numbers[identity.name]

    def invitation(self, number: int, greeting: Note) -> Note:
        """Return all that a site must know to prepare."""
        versions = parsed_note(Greeting, greeting).versions
        if number >= self.side.num_clients:
            raise FederationError(
                f"this run was begun with {self.side.num_clients} sites: this site takes part in "
                "the next one (clients.num_clients leaves places for later sites)"
            )
        site = self.board.sites[number]
        site.version = versions.fedgist
        names = {place: name for name, place in self.roster.now().numbers.items()}
        site.name = names.get(number, site.name)  # a site that was added during the run
        secure = self.side.setup.federation.sums == "secure"
        if secure and site.name != self.side.client_names[number]:
            raise FederationError(
                f"the sites of this run know each other by name, and {site.name} was added after "
                "it began: it takes part in the next one (federation.sums = 'secure')"
            )
        check_versions(Versions.own(), versions)
        invitation = Invitation(
            run=self.state.state.run,
            recipe=recipe_text(self.side.recipe),
            digest=digest_of_recipe(self.side.recipe),
            number=number,
            names=self.side.client_names,
            certificate=self.certificate.decode(),
            last=self.state.state.last.get(number),
            state_lost=self.side.setup.federation.state_lost,
        )
        self.invitations[number] = invitation
        return invitation.model_dump(mode="json")

    def judge(self, number: int, hello: Note) -> None:
        """Check what a prepared site says of itself."""
        site = parsed_note(Hello, hello)
        task = self.side.task
        check_hello(self.invitations[number], site, outlines(task), task.public_digest)
        if site.began_anew:
            name = self.board.sites[number].name
            self.news.append(f"client {number} ({name}) lost its state and begins anew")
            LOG.warning("%s", self.news[-1])

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
        LOG.info("%s asked for %s", identity.name, name)
        if name == "Stop":
            self.stopped_by = identity.name
            self.stop.set()
        return {**self.board.plain(), "stopping": self.stop.is_set()}


def serve(
    kit: Kit,
    recipe: Recipe,
    folder: Path,
    observer: Observer,
    listen: str,
    *,
    ready: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> None:
    """Run a federation, or go on with the run in ``folder``; return when the run has ended.

    ``listen`` is the address to listen on. ``ready`` is called with the port when it is open.
    ``stop`` may be set by another thread to stop the run.

    Raises
    ------
    RecipeError
        If the recipe cannot be used in a federation.
    FederationError
        If too few sites answered in every attempt at a round. The checkpoint is kept.
    """
    check_stated(recipe)
    roster = RosterFile(kit.folder / ROSTER)
    with locked(folder):
        saved = checkpoints.load(folder)
        _check_folder(folder, begun=saved is not None or (folder / RECIPE).exists())
        check_own_files(folder)
        state = RunStateFile.open(folder, _in_order(roster.now()))
        side = checked_context(recipe, state.state.names, observer)
        run = _run_of(kit, side, state, roster, stop or threading.Event(), observer.note)
        run.server.listen = listen
        port = run.server.start()
        observer.note(f"listening on port {port}; sites dial {kit.address}")
        ready(port)
        more = saved is not None and recipe.train.num_rounds > saved.binding.recipe[ROUNDS_KEY]
        if more and saved and saved.round == saved.binding.recipe[ROUNDS_KEY]:
            state.go_on()
        _do_rounds(run, Place(folder, saved, raising=more, notes=_notes(kit)), observer)


@dataclass
class _Run:
    """The parts of a running federation."""

    desk: SiteDesk
    side: ServerContext
    engine: SitesEngine
    server: GrpcServer
    state: RunStateFile
    board: StatusBoard
    say: Callable[[str], None]

    def keep_participants(self, server_run: ServerRun, number: int | None) -> None:
        """After each round, write down who took part; at the end, send the last downloads."""
        if number is None:
            self.finish(server_run)
            return
        before = (self.state.folder / PARTICIPANTS).read_bytes().decode()
        lines = "".join(f"{number},{site}\r\n" for site in sorted(self.engine.took_part))
        self.state.write_participants(before + lines)

    def finish(self, server_run: ServerRun) -> None:
        """Send each site that took part, or is here, the download that completes its model."""
        orders, downs, ctx = server_run.downloads(server_run.round)
        known = set(self.state.state.last) | self.engine.wire.present()
        waiting = known - set(self.state.state.finished)
        end = time.monotonic() + self.side.setup.federation.deadline_s
        while waiting and time.monotonic() < end:
            pairs = [(o, d) for o, d in zip(orders, downs, strict=True) if o.client in waiting]
            recipients, messages = [o for o, _ in pairs], [d for _, d in pairs]
            received, _ = self.engine.remote.finish(ctx, recipients, messages)
            self.state.finish(received)
            waiting -= received
            if waiting:
                self.engine.wait_for(len(waiting), waiting, LOOK_S, "it lacks its last download")
        for site in sorted(waiting):
            name = self.board.sites[site].name
            self.say(f"{name} has not received its model: start the server again when it is there")


def _run_of(
    kit: Kit,
    side: ServerContext,
    state: RunStateFile,
    roster: RosterFile,
    stop: threading.Event,
    say: Callable[[str], None],
) -> _Run:
    section = side.setup.federation
    run = state.state.run
    board = StatusBoard(state.folder, run, kit.federation, kit.address)
    board.sites = {
        client.id: SiteStatus.of(client.id, name)
        for client, name in zip(side.clients, side.client_names, strict=True)
    }
    wire = SiteWire()
    least = section.least_replies or 1
    patience = Patience(
        section.deadline_s,
        section.first_deadline_s,
        max(least, side.setup.recipe.privacy.min_replies),
        section.most_attempts,
    )
    remote = RemoteEngine(side.method, wire, run=run, patience=patience)
    engine = SitesEngine(remote, wire, side.clients, section, state, board, stop, say=say)
    if section.sums == "secure":
        totals = TotalsFolder(state.folder / TOTALS)
        engine.sums = SecureEngine(remote, digest_of_recipe(side.recipe), totals)
    wire.check, remote.before_repeating = engine.check_stop, engine.before_repeating
    side = replace(side, online=engine.online)
    desk = SiteDesk(side, state, board, roster, kit.certificate, stop, news=engine.news)
    server = GrpcServer(kit, "", desk, wire, state.folder)
    return _Run(desk, side, engine, server, state, board, say)


def _do_rounds(run: _Run, place: Place, observer: Observer) -> None:
    """Do the rounds, and end the connections as the run ended."""
    _cut_participants(run.state, place.saved.round if place.saved else -1)
    try:
        run_server(
            run.side,
            run.engine,
            place,
            observer,
            save_arrays=run.keep_participants,
            stop=run.engine.stop,
        )
        run.server.end("the run has ended")
        observer.note(f"the run has ended; look at it with: fedgist show {place.folder}")
    except Stopped:
        if not run.desk.stopped_by:
            raise
        observer.note(f"stopped by {run.desk.stopped_by}; the same command goes on with this run")
    finally:
        run.server.close()


def _cut_participants(state: RunStateFile, last: int) -> None:
    """Drop the participants of rounds after the checkpoint, which are done again."""
    path, header = state.folder / PARTICIPANTS, "round,client"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else [header]
    kept = [line for line in lines[1:] if int(line.partition(",")[0]) <= last]
    state.write_participants("".join(f"{line}\r\n" for line in [header, *kept]))


def checked_context(recipe: Recipe, names: Sequence[str], observer: Observer) -> ServerContext:
    """Return the context of a server with these sites, its method checked as in a simulation."""
    saved_often = as_federated(recipe).changed({"engine.checkpoint_every": 1})
    setup = resolve(saved_often, Overrides())
    side = server_context(setup, names, observer.note)
    check_secure_sums(side)
    notes = list(side.notes)
    if setup.private_width is None:  # an outline has no body to try the method on
        server, key = start_server(side), random.key(setup.recipe.seed).to(setup.device)
        notes += check_method(side.method, side.task, server, key)
        check_loss_settings(side.method, side.task, server, key)
    threads = setup.recipe.engine.server_threads
    count = default_workers(setup.device) if threads == "auto" else threads
    return replace(side, notes=tuple(notes), server_threads=count)


def _notes(kit: Kit) -> tuple[str, ...]:
    note = expiry_note(kit.certificate)
    return () if note is None else (note,)


def _in_order(roster: Roster) -> list[str]:
    return sorted(roster.numbers, key=lambda name: roster.numbers[name])


def _check_folder(folder: Path, *, begun: bool) -> None:
    """Raise an error if a run was begun in a folder, and which sites it has is not known."""
    if not begun or (folder / SITES_STATE).exists():
        return
    if (folder / PARTICIPANTS).exists():  # a new identity would charge the sites' budgets again
        raise CheckpointError(f"{folder / SITES_STATE} is missing: put it back from a copy")
    raise RecipeError(f"{folder} holds a run that is not a federation's: choose another")
