"""A federation's server in this process, and sites that follow its protocol or break it.

The server is the real one: its port, its desk, its wire and its rounds. Its sites train nothing:
they send zeros in the form that the server expects, or what an attack wants to send.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import tomli_w

from fedgist.core import random
from fedgist.core.method import Context
from fedgist.core.tree import Tree
from fedgist.engines.message_form import upload_form
from fedgist.federation.agreement.server_setup import server_context
from fedgist.federation.keys import certificates, provision
from fedgist.federation.keys.certificates import Role, sign
from fedgist.federation.keys.kits import Kit, read_kit
from fedgist.federation.keys.roster import ROSTER, RosterFile
from fedgist.federation.network.frames import (
    BEGIN,
    TO_SERVER,
    Assembly,
    Begin,
    note,
    pieces,
    read_begin,
    read_note,
    signed_bytes,
)
from fedgist.federation.network.grpc_options import OPTIONS, SERVICE, STREAM, method_name
from fedgist.federation.network.grpc_server import GrpcServer
from fedgist.federation.network.grpc_site import credentials
from fedgist.federation.network.invitation import Greeting, Versions, outlines
from fedgist.federation.network.wire import SiteWire
from fedgist.federation.server.engine import SitesEngine
from fedgist.federation.server.run_state import RunStateFile
from fedgist.federation.server.serving import SiteDesk
from fedgist.federation.server.status import SiteStatus, StatusBoard
from fedgist.recipe.resolve import resolve
from fedgist.runs.round import ServerRun, start_server
from fedgist.wire.envelope import Header, header_of, seal, unseal
from fedgist.wire.remote_engine import Patience, RemoteEngine
from three_sites import NAMES, parsed, recipe

HUNG_S = 120.0  # only what hangs waits so long
ANY = 1 << 40  # bytes: an envelope of any size
LOOK_S = 0.02
MODEL = {"name": "mlp", "hidden": [8]}
ROUNDS = 3

Line = dict[str, Any]


def make_kits(folder: Path, *, more: tuple[str, ...] = (), name: str = "sepsis") -> Path:
    """Make the kits of a federation with the three sites and some more."""
    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "name": name,
        "server": "localhost:8443",
        "administrators": ["anna"],
        "sites": [*NAMES, *more],
        "keys": "central",
    }
    (folder / "federation.toml").write_text(tomli_w.dumps(table))
    provision.provision(folder / "federation.toml", folder / "kits")
    return folder / "kits"


def site_kit(kits: Path, name: str) -> Kit:
    """Return the kit of a site."""
    return read_kit(kits / "sites" / name)


def issued(kits: Path, role: Role, name: str, **how: Any) -> Kit:
    """Return a kit with a certificate by the federation's own root, which no roster lists."""
    key = certificates.make_key()
    request = certificates.make_request(key, name)
    authority = kits / "authority"
    root_key, root = (
        (authority / "root-key.pem").read_bytes(),
        (authority / "root.pem").read_bytes(),
    )
    given = {"days": 90} | how
    signed = certificates.issue(root_key, root, request, role, name, **given)
    return replace(site_kit(kits, "berlin"), name=name, key=key, certificate=signed)


def wait_until(condition: Callable[[], object], event: str) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + HUNG_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {event}"
        time.sleep(LOOK_S)


class Peer:
    """One stream to a server, over which anything can be sent."""

    def __init__(self, port: int, kit: Kit) -> None:
        self.kit = kit
        self.channel = grpc.secure_channel(f"127.0.0.1:{port}", credentials(kit), OPTIONS)
        self.outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        begin = self.channel.stream_stream(method_name(STREAM))
        self.call: Any = begin(iter(self.outgoing.get, None), timeout=HUNG_S)
        self.answered = False

    def send(self, *frames: bytes) -> None:
        """Send frames."""
        for frame in frames:
            self.outgoing.put(frame)

    def read(self) -> bytes:
        """Return the next frame."""
        frame: bytes = next(self.call)
        self.answered = True
        return frame

    def greet(self, process: str = "p") -> None:
        """Greet the server."""
        self.send(note(Greeting(process=process, versions=Versions.own()).model_dump()))

    def greeted(self, process: str = "p") -> dict[str, Any]:
        """Greet the server; return its invitation."""
        self.greet(process)
        return read_note(self.read())

    def ready(self, hello: Mapping[str, object], process: str = "p") -> dict[str, Any]:
        """Greet the server and say hello; return its invitation when it says that it is ready."""
        invitation = self.greeted(process)
        own = {key: invitation[key] for key in ("run", "digest", "number", "last")}
        self.send(note({**own, **hello}))
        assert read_note(self.read()) == {"ready": True}
        return invitation

    def request(self) -> tuple[Begin, bytes] | None:
        """Return the next request; None at the run's end."""
        frame = self.read()
        if frame[:1] != BEGIN:
            return None
        begin = read_begin(frame)
        assembly = Assembly(begin)
        while not assembly.add(self.read()):
            pass
        return begin, assembly.take()

    def reply(self, ident: bytes, envelope: bytes, *, kit: Kit | None = None) -> None:
        """Send a reply that is signed as it should be, or by another kit's key."""
        signature = sign((kit or self.kit).key, signed_bytes(TO_SERVER, ident, envelope))
        self.send(Begin(ident, len(envelope), signature).frame(), *pieces((envelope,)))

    def refusal(self) -> grpc.RpcError:
        """Read until the server ends the stream; return its status and reason."""
        try:
            while True:
                self.read()
        except grpc.RpcError as error:
            return error
        except StopIteration:
            raise AssertionError("the server ended the stream without a reason") from None

    def close(self) -> None:
        """End the stream."""
        self.outgoing.put(None)
        self.channel.close()


@contextlib.contextmanager
def peer(port: int, kit: Kit) -> Iterator[Peer]:
    """A stream to a server, which is closed at the end."""
    opened = Peer(port, kit)
    try:
        yield opened
    finally:
        opened.close()


Attack = Callable[["Hall", Peer, Begin, bytes], None]


@dataclass
class Hall:
    """A server with its port open, and what it recorded."""

    kits: Path
    folder: Path
    side: Any
    engine: SitesEngine
    server: GrpcServer
    board: StatusBoard
    log: list[str]
    port: int = 0
    threads: list[threading.Thread] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)

    @property
    def hello(self) -> dict[str, object]:
        """What an honest site says of itself, besides what it repeats from its invitation."""
        task = self.side.task
        own = {name: each.model_dump() for name, each in outlines(task).items()}
        return {"outlines": own, "public_digest": task.public_digest}

    def kit(self, name: str) -> Kit:
        """Return the kit of a site."""
        return site_kit(self.kits, name)

    def peer(self, name: str) -> contextlib.AbstractContextManager[Peer]:
        """A stream with the kit of a site."""
        return peer(self.port, self.kit(name))

    def zeros(self, envelope: bytes, **changed: object) -> bytes:
        """Return a valid reply to a request: zeros; ``changed`` are values of its header."""
        header, messages = unseal(envelope, ANY)
        reply = header.model_copy(update={"purpose": "reply", **changed})
        if header.purpose != "train":
            refusal = {"purpose": "refusal", "reason": "no scores leave"}
            return seal(header.model_copy(update=refusal), {})
        return seal(reply, {"upload": self.upload(header, messages["download"])})

    def upload(self, header: Header, down: Tree) -> Tree:
        """Return a valid upload of a stage: zeros."""
        ctx = Context(random.key(0), self.side.task, header.round, header.stage)
        form = upload_form(self.side.method, ctx, header.architecture, down)
        return form.zeros(self.side.setup.device)

    def join(self, *names: str, attack: Attack | None = None) -> None:
        """Start sites that answer all requests; the first request is answered by an attack."""
        for name in names:
            arguments = (self.kit(name), attack)
            thread = threading.Thread(target=self._serve, args=arguments, daemon=True)
            thread.start()
            self.threads.append(thread)
        numbers = {NAMES.index(name) for name in names}
        wait_until(lambda: numbers <= self.engine.wire.present(), f"{names} are ready")

    def _serve(self, kit: Kit, attack: Attack | None) -> None:
        """Answer requests until the run's end; connect again if the server ends the stream."""
        while not self.stopped.is_set():
            with contextlib.suppress(grpc.RpcError, StopIteration), peer(self.port, kit) as site:
                self.peers.append(site)
                site.ready(self.hello)
                while (request := site.request()) is not None:
                    if attack is not None and header_of(request[1]).purpose == "train":
                        first, attack = attack, None
                        self._noting(first, site, *request)
                    else:
                        site.reply(request[0].ident, self.zeros(request[1]))
                return
            time.sleep(LOOK_S)

    def wait(self) -> None:
        """Wait for the sites' threads, when the server is closed.

        gRPC leaves a stream unanswered that opens in the moment in which the port closes. The end
        of the server's process would end it; here the site does. Streams that the server answered
        must be ended by the server.
        """
        end = time.monotonic() + HUNG_S
        while any(thread.is_alive() for thread in self.threads) and time.monotonic() < end:
            for site in [each for each in self.peers if not each.answered]:
                site.close()
            time.sleep(LOOK_S)
        assert not any(thread.is_alive() for thread in self.threads)

    def _noting(self, attack: Attack, site: Peer, begin: Begin, envelope: bytes) -> None:
        try:
            attack(self, site, begin, envelope)
        except BaseException as error:
            self.failures.append(error)
            raise

    def rounds(self, count: int = 1) -> list[Line]:
        """Do some rounds; return their lines."""
        federation = ServerRun(self.side, self.engine, start_server(self.side))
        lines = [federation.advance()[0] for _ in range(count)]
        assert self.failures == []
        return lines

    def site(self, name: str) -> dict[str, Any]:
        """Return what ``status.json`` says of a site."""
        table = json.loads((self.folder / "status.json").read_text())
        site: dict[str, Any] = table["sites"][NAMES.index(name)]
        return site

    def logged(self, text: str) -> bool:
        """Return whether the server's log has a line with this text."""
        return any(text in line for line in self.log)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _log_lines() -> Iterator[list[str]]:
    """Keep what fedgist logs, inside this context."""
    logger, handler = logging.getLogger("fedgist"), _Lines([])
    before, propagated = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = propagated


@contextlib.contextmanager
def hall(
    kits: Path, folder: Path, deadline_s: float = HUNG_S, raw: Line | None = None
) -> Iterator[Hall]:
    """A federation's server, open for its sites; closed at the end, with all of its threads."""
    raw = raw or recipe("fedavg", rounds=ROUNDS, model=MODEL, federation={"least_sites": 3})
    side = server_context(resolve(parsed(raw)), NAMES)
    kit, stop = read_kit(kits / "server"), threading.Event()
    state = RunStateFile.open(folder, NAMES)
    board = StatusBoard(folder, state.state.run, kit.federation, kit.address)
    board.sites = {number: SiteStatus.of(number, name) for number, name in enumerate(NAMES)}
    wire = SiteWire()
    patience = Patience(deadline_s, deadline_s, 1, 2)
    remote = RemoteEngine(side.method, wire, run=state.state.run, patience=patience)
    section = side.setup.federation
    engine = SitesEngine(remote, wire, side.clients, section, state, board, stop)
    wire.check = engine.check_stop
    side = replace(side, online=engine.online)
    desk = SiteDesk(side, state, board, RosterFile(kits / "server" / ROSTER), kit.certificate, stop)
    server = GrpcServer(kit, "127.0.0.1:0", desk, wire, folder)
    with _log_lines() as lines:
        made = Hall(kits, folder, side, engine, server, board, lines)
        made.port = server.start()
        try:
            yield made
            server.end("the run has ended")
        finally:
            made.stopped.set()
            server.close()
            made.wait()


Script = Callable[[Iterator[bytes]], Iterator[bytes]]


@contextlib.contextmanager
def fake_server(identity: Kit, root: bytes, script: Script, port: int = 0) -> Iterator[int]:
    """A server that is not the federation's: it has some certificate, and follows a script."""
    handler = grpc.stream_stream_rpc_method_handler(lambda frames, _: script(frames))
    server = grpc.server(futures.ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {STREAM: handler}),)
    )
    pairs = [(identity.key, identity.certificate)]
    secured = grpc.ssl_server_credentials(pairs, root, require_client_auth=True)
    bound: int = server.add_secure_port(f"127.0.0.1:{port}", secured)
    server.start()
    try:
        yield bound
    finally:
        server.stop(None).wait()
