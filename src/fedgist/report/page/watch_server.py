"""A web server for the page of ``fedgist watch --serve``, for browsers of this machine only.

Other users of the machine can connect to the port, and any web site that is open in a browser can
send requests to it. So the address contains a random token, requests without it get no answer but
404, and requests under another host name are refused: a site cannot reach the page by pointing its
own name to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import ClassVar

from fedgist.errors import InputError
from fedgist.report.page.watch_page import WatchState, content_policy, fragment, page

ADDRESS = "127.0.0.1"
HOST_NAMES = (ADDRESS, "localhost")
METHODS = ("GET", "HEAD")
NOT_ALLOWED = HTTPStatus.METHOD_NOT_ALLOWED
PAGE, STATE = ("", "/"), "/state"  # paths below the token
TOKEN_BYTES = 32
SLOWEST_S = 30  # a connection that sends no request for so many seconds is closed
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Read = Callable[[], WatchState]


class Latest:
    """The state of the runs, read at most once in ``seconds`` however many pages are open."""

    def __init__(
        self, read: Read, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._seconds, self._clock = read, seconds, clock
        self._lock = threading.Lock()
        self._state: WatchState | None = None
        self._until = 0.0

    def __call__(self) -> WatchState:
        """Return the state, not older than ``seconds``."""
        with self._lock:
            if self._state is None or self._clock() >= self._until:
                self._state = self._read()
                self._until = self._clock() + self._seconds
            return self._state


@dataclass(frozen=True)
class Response:
    """The answer to a request."""

    status: HTTPStatus
    content: str
    kind: str = "text/plain"


@dataclass(frozen=True)
class ServedPages:
    """What is served: the pages below a token, on a port."""

    token: str
    port: int
    read: Read
    every: float

    @property
    def address(self) -> str:
        """The page's address, with its token."""
        return f"http://{ADDRESS}:{self.port}/{self.token}/"

    def answer(self, method: str, hosts: list[str], path: str) -> Response:
        """Return the answer to a request with these Host headers."""
        if [host.lower() for host in hosts] not in [[f"{n}:{self.port}"] for n in HOST_NAMES]:
            return Response(HTTPStatus.FORBIDDEN, "this server has another name\n")
        token, rest = path[1 : 1 + len(self.token)], path[1 + len(self.token) :]
        # in constant time: the time of an answer must not tell how much of a guess is right
        right = secrets.compare_digest(token.encode(), self.token.encode())
        if not right or not path.startswith("/") or rest not in {*PAGE, STATE}:
            return Response(HTTPStatus.NOT_FOUND, "there is nothing here\n")
        if method not in METHODS:
            return Response(NOT_ALLOWED, "only GET and HEAD are allowed\n")
        try:
            state = self.read()
        except OSError:  # a run was moved or deleted meanwhile; the next refresh reads the rest
            return Response(HTTPStatus.SERVICE_UNAVAILABLE, "the runs cannot be read now\n")
        text = fragment(state) if rest == STATE else page(state, self.every)
        return Response(HTTPStatus.OK, text, "text/html")


class Handler(BaseHTTPRequestHandler):
    """Sends the answers of a site, with headers that keep the page to this browser."""

    timeout: ClassVar[float] = SLOWEST_S

    def __init__(
        self, site: ServedPages, request: socket.socket, client: tuple[str, int], server: BaseServer
    ) -> None:
        self.site = site
        super().__init__(request, client, server)

    def handle(self) -> None:
        """Handle the connection; a browser may close it at any time."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()

    def answer(self) -> None:
        """Response a request of any method."""
        hosts = self.headers.get_all("Host", [])
        self._send(self.site.answer(self.command, hosts, self.path))

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Return the function for a method of HTTP, which ``http.server`` looks up by its name."""
        if name.startswith("do_"):
            return self.answer
        raise AttributeError(name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Response a request that is no HTTP, or has an unknown method, without repeating it."""
        del message, explain
        self.close_connection = True
        self._send(Response(HTTPStatus(code), "this request cannot be answered\n"))

    def version_string(self) -> str:
        """Return the server's name, without the versions that make an attack easier."""
        return "fedgist"

    def log_message(self, *args: object) -> None:
        """Log nothing: the paths contain the token."""

    def _send(self, answer: Response) -> None:
        content = answer.content.encode()
        self.send_response(answer.status)
        headers = {
            "Content-Type": f"{answer.kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": content_policy(),
            **({"Allow": ", ".join(METHODS)} if answer.status == NOT_ALLOWED else {}),
            **HEADERS,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextlib.contextmanager
def opened(
    read: Read, every: float, port: int = 0
) -> Iterator[tuple[ThreadingHTTPServer, ServedPages]]:
    """Open the port, by default a free one, and yield the server and its site.

    The server answers requests while its ``serve_forever`` runs.
    """
    try:
        server = ThreadingHTTPServer((ADDRESS, port), BaseHTTPRequestHandler)
    except OSError as error:
        text = f"--port {port} cannot be opened: {error.strerror}; leave --port out for a free port"
        raise InputError(text) from error
    with server:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        site = ServedPages(token, server.server_port, Latest(read, every / 2), every)
        server.RequestHandlerClass = functools.partial(Handler, site)
        yield server, site
