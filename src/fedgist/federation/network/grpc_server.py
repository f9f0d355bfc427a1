"""The server's end of the network: one gRPC port with mutual TLS, to which all sites connect.

Each site holds one stream open. The server reads the site's identity from its certificate, which
TLS has checked against the federation's root alone. One thread runs all streams.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from fedgist.errors import FedgistError, KitError, MessageError, OutputError, printable
from fedgist.federation.keys.certificates import (
    ADMINISTRATOR,
    SITE,
    Identity,
    identity_of,
    is_signed,
    sign,
)
from fedgist.federation.keys.kits import Kit
from fedgist.federation.network.frames import (
    TO_SERVER,
    TO_SITE,
    Assembly,
    Begin,
    Note,
    note,
    pieces,
    read_begin,
    read_note,
    signed_bytes,
)
from fedgist.federation.network.grpc_options import COMMANDS, OPTIONS, SERVICE, STREAM
from fedgist.federation.network.wire import Request, SiteWire

GREETING_S = 30.0  # within this time a new stream says which process it is of
LOOK_S = 1.0  # between looks at the roster
LONGEST_REASON = 500  # characters
STOP_S = 2.0  # that streams have to end
LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Desk(Protocol):
    """The decisions about sites and administrators, made by the server's process."""

    def why_refused(self, identity: Identity) -> str | None:
        """Return why a certificate is not accepted; None if it is."""

    def number_of(self, identity: Identity) -> int:
        """Return a site's number."""

    def invitation(self, number: int, greeting: Note) -> Note:
        """Return all that a site must know to prepare; raise FedgistError to refuse it."""

    def judge(self, number: int, hello: Note) -> None:
        """Check what a prepared site says of itself; raise FedgistError to refuse it."""

    def saw(self, number: int, state: str, text: str = "") -> None:
        """Take note of a site's state."""

    def moved(self, number: int, *, sent: int = 0, received: int = 0) -> None:
        """Take note of a request of so many bytes to a site, or of its reply."""

    def command(self, name: str, identity: Identity) -> Note:
        """Do what an administrator asked for; return the answer."""


@dataclass(eq=False)
class Link:
    """A site's connection: its identity, its process, and the frames to send."""

    identity: Identity
    number: int
    certificate: bytes = field(repr=False)
    process: str
    outgoing: asyncio.Queue[Request | bytes | None] = field(default_factory=asyncio.Queue)
    ended: str = ""  # why the server ended it
    status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE

    def end(self, status: grpc.StatusCode, reason: str) -> None:
        """End the connection with a status and a reason for the site."""
        self.status, self.ended = status, reason
        self.outgoing.put_nowait(None)


class RefusedError(Exception):
    """A connection is refused, with a status and a reason for the other side.

    The reason may repeat what the other side sent, so it becomes one short line.
    """

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        line = printable(reason)
        super().__init__(line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}...")
        self.status = status


class Stream(Protocol):
    """The functions of gRPC's context of a stream that are used here."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return what TLS knows of the other side, such as its certificate."""

    async def read(self) -> object:
        """Return the next frame, or a sign of the end."""

    async def write(self, frame: bytes) -> None:
        """Send a frame."""

    async def abort(self, status: grpc.StatusCode, reason: str) -> NoReturn:
        """End the stream with a status."""


class GrpcServer:
    """The port of a federation, and the thread that serves it."""

    def __init__(self, kit: Kit, listen: str, desk: Desk, wire: SiteWire, folder: Path) -> None:
        """Prepare to serve on the address ``listen``; large replies are kept in ``folder``."""
        self.kit, self.listen, self.desk, self.wire, self.folder = kit, listen, desk, wire, folder
        self.links: dict[int, Link] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="sites", daemon=True)

    def start(self) -> int:
        """Open the port; return its number.

        Raises
        ------
        OutputError
            If the address cannot be used.
        """
        self.thread.start()
        try:
            self.server, port = self._run(self._open())
        except OutputError:
            self._end_thread()
            raise
        return port

    def end(self, text: str, *, sites_wait: bool = False) -> None:
        """Tell all sites that the run has ended, and close; or that they wait for another one."""

        async def say() -> None:
            for link in self.links.values():
                link.outgoing.put_nowait(note({"said" if sites_wait else "end": text}))
                link.end(grpc.StatusCode.OK, text)

        self._run(say())

    def close(self) -> None:
        """Close the port and all streams."""

        async def stop() -> None:
            for link in self.links.values():
                if not link.ended:
                    link.end(grpc.StatusCode.UNAVAILABLE, "the server stops")
            await self.server.stop(STOP_S)

        if self.thread.is_alive():
            self._run(stop())
            self._end_thread()

    def _end_thread(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _open(self) -> tuple[grpc.aio.Server, int]:
        kit = self.kit
        server = grpc.aio.server(options=OPTIONS)
        stream = grpc.stream_stream_rpc_method_handler(self._site)
        handlers = {STREAM: stream} | {
            name: grpc.unary_unary_rpc_method_handler(partial(self._command, name))
            for name in COMMANDS
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        credentials = grpc.ssl_server_credentials(
            [(kit.key, kit.certificate)], kit.root, require_client_auth=True
        )
        try:
            port = server.add_secure_port(self.listen, credentials)
        except RuntimeError as error:
            raise OutputError(f"the address {self.listen} cannot be used: {error}") from error
        await server.start()
        return server, port

    def _identified(self, stream: Stream, role: str) -> tuple[Identity, bytes]:
        """Return whom a connection's certificate names, and the certificate."""
        certificate = stream.auth_context()["x509_pem_cert"][0]
        try:
            identity = identity_of(certificate)
        except KitError as error:
            raise RefusedError(grpc.StatusCode.PERMISSION_DENIED, str(error)) from error
        reason = self.desk.why_refused(identity)
        if reason is None and identity.role != role:
            reason = f"a certificate of the role {identity.role} may not do this"
        if reason is not None:
            LOG.warning("%s %s was refused: %s", identity.role, identity.name, reason)
            raise RefusedError(grpc.StatusCode.PERMISSION_DENIED, reason)
        return identity, certificate

    async def _command(self, name: str, request: bytes, stream: Stream) -> bytes:
        del request
        try:
            identity, _ = self._identified(stream, ADMINISTRATOR)
            return note(self.desk.command(name, identity))
        except RefusedError as error:
            await stream.abort(error.status, str(error))

    async def _site(self, requests: object, stream: Stream) -> None:
        """Serve one stream of a site, until either side ends it."""
        del requests  # they are read one by one
        try:
            link = await self._greeted(stream)
        except RefusedError as error:
            await stream.abort(error.status, str(error))

        def send(request: Request) -> None:
            self.loop.call_soon_threadsafe(link.outgoing.put_nowait, request)

        parts = self._receive(link, send, stream), self._send(link, stream), self._look(link)
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._left(link, send)
        await self._closed(link, results, stream)

    async def _closed(self, link: Link, results: Sequence[object], stream: Stream) -> None:
        """End a stream with the status that says why."""
        if link.status is grpc.StatusCode.OK:
            return
        if link.ended:
            await stream.abort(link.status, link.ended)
        for result in results:
            if isinstance(result, RefusedError):
                await stream.abort(result.status, str(result))
            if isinstance(result, Exception) and not isinstance(result, asyncio.CancelledError):
                LOG.warning("the stream of %s ended: %s", link.identity.name, result)

    async def _greeted(self, stream: Stream) -> Link:
        """Return the link of a new stream. It takes the place of an older one of its site."""
        identity, certificate = self._identified(stream, SITE)
        try:
            greeting = read_note(_frame(await asyncio.wait_for(stream.read(), GREETING_S)))
            number, process = self.desk.number_of(identity), str(greeting.get("process", ""))
            invitation = note(self.desk.invitation(number, greeting))
        except TimeoutError as error:
            reason = f"no greeting within {GREETING_S:g} seconds"
            raise RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from error
        except (FedgistError, TypeError) as error:
            raise self._refused(identity, error, grpc.StatusCode.FAILED_PRECONDITION) from error
        link = Link(identity, number, certificate, process)
        if (older := self.links.get(number)) is not None:
            other = "this kit is in use by another process, which connected later"
            if older.process == process:  # it connected again
                older.end(grpc.StatusCode.UNAVAILABLE, "")
            else:
                LOG.warning("site %s: a later process with its kit takes over", identity.name)
                older.end(grpc.StatusCode.ALREADY_EXISTS, other)
        self.links[number] = link
        self.desk.saw(number, "preparing")
        link.outgoing.put_nowait(invitation)
        return link

    def _refused(
        self, identity: Identity, error: Exception, status: grpc.StatusCode
    ) -> RefusedError:
        """Record why a site is refused; return the exception that ends its stream."""
        refused = RefusedError(status, str(error))
        LOG.warning("site %s was refused: %s", identity.name, refused)
        self.desk.saw(self.desk.number_of(identity), "refused", str(refused))
        return refused

    async def _receive(self, link: Link, send: Callable[[Request], None], stream: Stream) -> None:
        """Read a site's hello, then its replies."""
        try:
            self.desk.judge(link.number, read_note(_frame(await stream.read())))
        except FedgistError as error:
            status = grpc.StatusCode.FAILED_PRECONDITION
            raise self._refused(link.identity, error, status) from error
        link.outgoing.put_nowait(note({"ready": True}))  # one task writes, as gRPC demands
        self.desk.saw(link.number, "ready")
        self.wire.join(link.number, send)
        try:
            while True:
                await self._reply(link, stream)
        except MessageError as error:
            raise self._refused(link.identity, error, grpc.StatusCode.INVALID_ARGUMENT) from error

    async def _reply(self, link: Link, stream: Stream) -> None:
        """Read one reply, and hand it to the wire if it was asked for and is signed."""
        begin = read_begin(_frame(await stream.read()))
        request = self.wire.accepted(link.number, begin)
        if request is None:  # its pieces are read and dropped
            left = begin.size
            while left > 0:
                left -= len(_frame(await stream.read())) - 1
            return
        complete = not begin.size
        with Assembly(begin, self.folder) as assembly:
            while not complete:
                complete = assembly.add(_frame(await stream.read()))
            self._check_signature(link, begin, assembly)
        self.desk.moved(link.number, received=begin.size)
        self.wire.complete(request, assembly)

    def _check_signature(self, link: Link, begin: Begin, assembly: Assembly) -> None:
        data = signed_bytes(TO_SERVER, begin.ident, assembly.beginning())
        if not is_signed(link.certificate, data, begin.signature):
            raise MessageError("the reply is not signed by its site")

    async def _send(self, link: Link, stream: Stream) -> None:
        """Write requests and notes to a site, until its link is ended."""
        while (item := await link.outgoing.get()) is not None:
            if isinstance(item, bytes):
                await stream.write(item)
                continue
            parts, size = item.parts, sum(len(part) for part in item.parts or ())
            if parts is None:  # its deadline is over
                continue
            signature = sign(self.kit.key, signed_bytes(TO_SITE, item.ident, parts[0]))
            await stream.write(Begin(item.ident, size, signature).frame())
            for piece in pieces(parts):
                await stream.write(piece)
            self.desk.moved(link.number, sent=size)

    async def _look(self, link: Link) -> None:
        """End the stream of a site whose certificate is revoked."""
        reason = None
        while reason is None:
            await asyncio.sleep(LOOK_S)
            reason = self.desk.why_refused(link.identity)
        LOG.warning("the stream of %s is cut: %s", link.identity.name, reason)
        self.desk.saw(link.number, "revoked", reason)
        link.end(grpc.StatusCode.PERMISSION_DENIED, reason)
        await asyncio.sleep(STOP_S)

    def _left(self, link: Link, send: Callable[[Request], None]) -> None:
        revoked = link.status is grpc.StatusCode.PERMISSION_DENIED
        self.wire.leave(link.number, send, for_good=revoked)
        if self.links.get(link.number) is link:
            del self.links[link.number]
            self.desk.saw(link.number, "absent")


def _frame(frame: object) -> bytes:
    """Return a frame; raise RefusedError at the end of a stream."""
    if not isinstance(frame, bytes):
        raise RefusedError(grpc.StatusCode.CANCELLED, "the site ended the stream")
    return frame
