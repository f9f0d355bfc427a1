"""A site's end of the network: one outgoing connection to the server, opened again when it is lost.

The server's certificate must come from the federation's root; no other root is trusted, not even
those of the machine.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import grpc

from fedgist.errors import (
    FederationError,
    KitError,
    MessageError,
    OwnerError,
    key_of,
    kind_of,
    printable,
)
from fedgist.federation.keys.certificates import check_server, is_signed, sign
from fedgist.federation.keys.kits import Kit, split_address
from fedgist.federation.network.frames import (
    BEGIN,
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
from fedgist.federation.network.grpc_options import OPTIONS, STREAM, method_name
from fedgist.federation.network.invitation import Greeting, Versions

FIRST_WAIT_S, LONGEST_WAIT_S, FACTOR = 0.5, 10.0, 1.6  # between two attempts to connect
COMMAND_S = 10.0
LOG = logging.getLogger(__name__)


class Agent(Protocol):
    """What a site does, without a network."""

    def prepare(self, invitation: Note) -> Note:
        """Prepare for the run of an invitation; return what the server must know of this site."""

    def largest(self) -> int:
        """Return the size in bytes of the largest envelope that this site opens."""

    def answer(self, envelope: bytes) -> bytes:
        """Answer an envelope."""

    def saw(self, text: str) -> None:
        """Show the state of the connection."""


def credentials(kit: Kit) -> grpc.ChannelCredentials:
    """Return the credentials of a kit, which trust the federation's root alone."""
    return grpc.ssl_channel_credentials(kit.root, kit.key, kit.certificate)


def command(kit: Kit, name: str) -> Note:
    """Send an administrator's command to the server; return its answer."""
    with grpc.secure_channel(kit.address, credentials(kit), OPTIONS) as channel:
        try:
            return read_note(channel.unary_unary(method_name(name))(note({}), timeout=COMMAND_S))
        except grpc.RpcError as error:
            raise FederationError(_problem(kit, error)) from error


def _problem(kit: Kit, error: grpc.RpcError) -> str:
    status, reason = error.code(), printable(str(error.details()))
    if status in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
        LOG.info("%s", reason)
        return f"the server {kit.address} cannot be reached ({reason.rpartition(': ')[2]})"
    return f"the server {kit.address} refuses: {reason}"


#: Statuses after which another attempt cannot help.
FINAL = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
)


@dataclass
class Connection:
    """A site's connection to its server over the whole run, however often it is lost."""

    kit: Kit
    agent: Agent
    stop: threading.Event = field(default_factory=threading.Event)
    process: str = field(default_factory=lambda: secrets.token_hex(8))

    def run(self) -> str:
        """Take part until the run has ended; return the server's last words.

        Raises
        ------
        FederationError
            If the server refuses this site.
        """
        wait = FIRST_WAIT_S
        while not self.stop.is_set():
            session = _Session(self)
            try:
                with grpc.secure_channel(self.kit.address, credentials(self.kit), OPTIONS) as it:
                    end = session.talk(it)
            except grpc.RpcError as error:
                problem = _problem(self.kit, error)
                if error.code() in FINAL:
                    raise FederationError(problem) from error
                self.agent.saw(f"{problem}; trying again")
            except MessageError as error:
                self.agent.saw(f"the server sent something that cannot be used: {error}")
            else:
                if end is not None:
                    return end
                self.agent.saw("the connection was closed; trying again")
            if session.was_ready:
                wait = FIRST_WAIT_S
            self.stop.wait(wait)
            wait = min(LONGEST_WAIT_S, wait * FACTOR)
        return ""


class _Session:
    """One connection: greeting, invitation, hello, and then requests and replies."""

    def __init__(self, connection: Connection) -> None:
        self.kit, self.agent = connection.kit, connection.agent
        self.process = connection.process
        self.outgoing: queue.Queue[Iterable[bytes] | None] = queue.Queue()  # frames
        self.was_ready = False

    def talk(self, channel: grpc.Channel) -> str | None:
        """Talk until the stream ends; return the server's last words if the run has ended."""
        greeting = Greeting(process=self.process, versions=Versions.own())
        self.outgoing.put([note(greeting.model_dump())])
        frames: Iterator[bytes] = channel.stream_stream(method_name(STREAM))(
            chain.from_iterable(iter(self.outgoing.get, None)), wait_for_ready=False
        )
        try:
            invitation = read_note(next(frames))
            server = self._certificate(invitation)
            self.outgoing.put([self._hello(invitation, frames)])
            for frame in frames:
                if frame[:1] == BEGIN:
                    self._answer(frame, frames, server)
                elif "end" in (news := read_note(frame)):
                    return printable(str(news["end"]))
                elif "said" in news:
                    self.agent.saw(printable(str(news["said"])))
                else:
                    self.was_ready = True
                    self.agent.saw("ready")
        except StopIteration:
            return None
        finally:
            self.outgoing.put(None)
        return None

    def _hello(self, invitation: Note, frames: Iterator[bytes]) -> bytes:
        """Return the site's hello; if it cannot prepare, tell the server so, and raise.

        What the rows of a private site decide, the server is not told: the site only ends.
        """
        try:
            return note(self.agent.prepare(invitation))
        except OwnerError:
            raise
        except Exception as error:
            kept = {key: invitation.get(key) for key in ("run", "digest", "number")}
            why = {"refused": kind_of(error), "about": key_of(error)}
            self.outgoing.put([note({**kept, **why})])
            with contextlib.suppress(grpc.RpcError):
                next(frames, None)  # the server ends the stream when it has read this
            raise

    def _certificate(self, invitation: Note) -> bytes:
        """Return the server's certificate, with which it signs, after its check by the root."""
        certificate = str(invitation.get("certificate", "")).encode(errors="replace")
        try:
            check_server(certificate, self.kit.root, split_address(self.kit.address)[0])
        except KitError as error:
            raise MessageError(str(error)) from error
        return certificate

    def _answer(self, frame: bytes, frames: Iterator[bytes], server: bytes) -> None:
        """Read one request, answer it, and send the reply."""
        begin = read_begin(frame)
        if begin.size > (most := self.agent.largest()):
            raise MessageError(f"a request of {begin.size} bytes; at most {most} are accepted")
        complete = not begin.size
        with Assembly(begin) as assembly:
            while not complete:
                complete = assembly.add(next(frames))
        envelope = assembly.take()
        if not is_signed(server, signed_bytes(TO_SITE, begin.ident, envelope), begin.signature):
            raise MessageError("a request is not signed by the server")
        reply = self.agent.answer(envelope)
        signature = sign(self.kit.key, signed_bytes(TO_SERVER, begin.ident, reply))
        beginning = Begin(begin.ident, len(reply), signature).frame()
        self.outgoing.put(chain([beginning], pieces((reply,))))  # made while they are sent
