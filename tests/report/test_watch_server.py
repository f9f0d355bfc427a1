"""The server of the page: who gets an answer, with which headers; and the page in a browser."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commands import HANG_S, OUT, Command, wait_until
from fedgist.cli.main import app
from fedgist.errors import InputError
from fedgist.report.page import watch_server
from fedgist.report.page.watch_page import WatchState, read_state
from fedgist.report.page.watch_server import Latest, ServedPages
from fedgist.runs.files.run_directory import locked

from browsers import in_browser, new_page, open_browser  # isort: skip
from written import FEDERATION_STATE, change_line, write_federation, write_run  # isort: skip

METHODS = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")


@contextmanager
def served(folder: Path, every: float = 0.2) -> Iterator[ServedPages]:
    with watch_server.opened(lambda: read_state([folder]), every) as (server, site):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("watched") / "a", [0.5, 0.6], planned=9, result=False)
    change_line(run, 2, events=["see https://example.org/x and //example.org/y"])
    return write_federation(run, FEDERATION_STATE)


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[ServedPages]:
    with served(folder) as site:
        yield site


def ask(
    site: ServedPages, path: str, method: str = "GET", host: str | None = None
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=HANG_S)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{site.port}"})
    answer = connection.getresponse()
    return answer, answer.read().decode()


def ask_raw(site: ServedPages, request: str) -> str:
    with socket.create_connection(("127.0.0.1", site.port), timeout=HANG_S) as connection:
        connection.sendall(request.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_the_page_and_its_fragment_are_served(site: ServedPages) -> None:
    for path in (f"/{site.token}/", f"/{site.token}"):
        answer, html = ask(site, path)
        assert answer.status == 200
        assert html.startswith("<!doctype html>")
        assert "berlin" in html
    answer, part = ask(site, f"/{site.token}/state")
    assert answer.status == 200
    assert "<!doctype" not in part
    assert part.strip() in html


def test_the_token_is_long_and_new_each_time(tmp_path: Path) -> None:
    tokens = set()
    for _ in range(3):
        with watch_server.opened(lambda: read_state([tmp_path]), 1.0) as (_, site):
            tokens.add(site.token)
            assert site.address == f"http://127.0.0.1:{site.port}/{site.token}/"
    assert len(tokens) == 3
    assert all(len(base64.urlsafe_b64decode(f"{token}=")) == 32 for token in tokens)


@pytest.mark.parametrize("method", ["GET", "HEAD", *METHODS])
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/state",
        "/favicon.ico",
        "/{shorter}/",
        "/{token}x/",
        "/x{token}/",
        "/{other}/state",
        "/{swapped}/",
        "/{token}/state/",
        "/{token}/state?x",
        "/{token}/../state",
        "/{token}/%2e",
        "/\xe4/",
        "/?{token}",
        "{token}/",
        "http://127.0.0.1/{token}/",
    ],
)
def test_without_the_exact_token_there_is_nothing(
    site: ServedPages, path: str, method: str
) -> None:
    token = site.token
    swapped, other = token.swapcase(), "A" * len(token)
    target = path.format(token=token, shorter=token[:-1], swapped=swapped, other=other)
    text = ask_raw(site, f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n\r\n")
    head, _, body = text.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 404 "), target
    assert body == ("" if method == "HEAD" else "there is nothing here\n")
    assert token not in text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("LocalHost:{port}", 200),
        ("127.0.0.1", 403),
        ("localhost", 403),
        ("localhost:1", 403),
        ("attacker.example:{port}", 403),
        ("127.0.0.1.attacker.example:{port}", 403),
        ("localhost:{port}.attacker.example", 403),
        ("[::1]:{port}", 403),
        ("0.0.0.0:{port}", 403),
        ("localhost.:{port}", 403),
    ],
)
def test_a_site_that_points_its_name_here_is_refused(
    site: ServedPages, host: str, status: int
) -> None:
    answer, text = ask(site, f"/{site.token}/", host=host.format(port=site.port))
    assert answer.status == status
    assert ("berlin" in text) == (status == 200)


@pytest.mark.parametrize("hosts", ["", "Host: attacker.example\r\n", "Host: {own}\r\nHost: x\r\n"])
def test_a_request_with_no_host_or_two_is_refused(site: ServedPages, hosts: str) -> None:
    headers = hosts.format(own=f"127.0.0.1:{site.port}")
    text = ask_raw(site, f"GET /{site.token}/ HTTP/1.1\r\n{headers}\r\n")
    assert text.startswith("HTTP/1.0 403 ")
    assert "berlin" not in text


@pytest.mark.parametrize("method", METHODS)
def test_only_reading_is_allowed(site: ServedPages, method: str) -> None:
    answer, text = ask(site, f"/{site.token}/", method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"
    assert "berlin" not in text


def test_head_is_get_without_the_page(site: ServedPages) -> None:
    answer, text = ask(site, f"/{site.token}/", "HEAD")
    assert answer.status == 200
    assert text == ""
    assert int(answer.headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    "request_", ["\x16\x03\x01\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9\r\n\r\n"]
)
def test_what_is_no_http_is_not_repeated(site: ServedPages, request_: str) -> None:
    text = ask_raw(site, request_)
    assert "this request cannot be answered" in text
    assert "\x16" not in text


@pytest.mark.parametrize("path", ["/", "/{token}/", "/{token}/state"])
def test_every_answer_has_the_headers_that_keep_it_here(site: ServedPages, path: str) -> None:
    answer, text = ask(site, path.format(token=site.token))
    policy = dict(
        rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for rule in ("frame-ancestors", "base-uri", "form-action"):
        assert policy[rule] == "'none'"
    for rule in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/=]{44}'", policy[rule]), rule
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Server"] == "fedgist", "no version of Python"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        for content in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert policy[rule] == f"'sha256-{digest}'"


class Outside(HTMLParser):
    """Collects what a page would fetch, and what its policy would not allow."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.code = ""
        self._in_code = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_code = tag in {"script", "style"}
        for name, value in attrs:
            if "//" in (value or "") or name == "style" or name.startswith("on"):
                self.found.append(f"<{tag} {name}={value}>")
            if name in {"src", "href", "action", "srcset"} and value != "data:,":
                self.found.append(f"<{tag} {name}={value}>")

    def handle_endtag(self, tag: str) -> None:
        self._in_code = False

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.code += data


def test_the_page_loads_nothing_from_outside(site: ServedPages) -> None:
    _, html = ask(site, f"/{site.token}/")
    page = Outside(html)
    assert page.found == []
    assert re.findall(r"https?:|@import|url\(", page.code) == []
    assert re.findall(r"[\"'(]//", page.code) == [], "only comments begin with two slashes"
    assert '<noscript><meta http-equiv="refresh" content="1"></noscript>' in html
    assert site.token not in html


def test_a_new_round_is_in_the_next_fragment(tmp_path: Path) -> None:
    with served(tmp_path / "later", every=0.01) as site:
        path = f"/{site.token}/state"
        assert "no run yet in" in ask(site, path)[1]
        run = write_run(tmp_path / "later", [0.5], planned=9, result=False)
        wait_until(lambda: "round <b>1</b> of 9" in ask(site, path)[1])
        add_round(run, 2)
        wait_until(lambda: "round <b>2</b> of 9" in ask(site, path)[1])
        written_files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert all(site.token not in p.read_text("latin-1") for p in written_files)


def add_round(folder: Path, number: int) -> None:
    line = {"round": number, "eval/client/accuracy_mean": 0.75, "time/round_s": 1.0}
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_many_pages_read_the_files_once() -> None:
    clock, reads = [0.0], list[float]()

    def read() -> WatchState:
        reads.append(clock[0])
        return WatchState(())

    latest = Latest(read, 1.0, lambda: clock[0])
    for at in (0.0, 0.5, 0.99, 1.0, 1.5, 2.5):
        clock[0] = at
        latest()
    assert reads == [0.0, 1.0, 2.5]


def test_a_run_that_is_deleted_meanwhile_ends_no_server() -> None:
    def read() -> WatchState:
        raise FileNotFoundError("rounds.jsonl")

    site = ServedPages("token", 8765, read, 1.0)
    answer = site.answer("GET", ["127.0.0.1:8765"], "/token/")
    assert (answer.status, answer.content) == (503, "the runs cannot be read now\n")


def test_only_this_machine_can_connect(site: ServedPages) -> None:
    with socket.socket() as connection:  # another address of this machine, of the same interface
        assert connection.connect_ex(("127.0.0.2", site.port)) != 0


def test_a_port_in_use_is_an_error_that_says_what_to_type(site: ServedPages) -> None:
    with (
        pytest.raises(InputError, match=f"--port {site.port} cannot be opened: .*; leave --port"),
        watch_server.opened(lambda: WatchState(()), 1.0, site.port),
    ):
        pass


# the command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--serve", "--once"], "--once has no effect with --serve"),
        (["--serve", "--track", "mlflow"], "--track has no effect with --serve"),
        (["--port", "8765"], "--port needs --serve"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["watch", str(folder), *words])
    assert isinstance(done.exception, InputError)
    assert says in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "code"), [("", 0), ("[", 1)], ids=["good", "damaged"])
def test_the_command_prints_the_address_and_ends_at_ctrl_c(
    tmp_path: Path, recipe: str, code: int
) -> None:
    write_run(tmp_path / "runs" / "a", [0.5])
    if recipe:  # as for watch in the terminal: a run that is left out makes the code 1
        (write_run(tmp_path / "runs" / "b", [0.5]) / "recipe.toml").write_text(recipe)
    command = Command(["watch", "runs", "later", "--serve"], tmp_path)
    output = command._said / OUT
    wait_until(lambda: not command.runs or (output.exists() and "Ctrl-C" in output.read_text()))
    text = output.read_text()
    port, token = re.findall(r"http://127\.0\.0\.1:(\d+)/(\S+)/\n", text)[0]
    site = ServedPages(token, int(port), lambda: WatchState(()), 1.0)
    assert ask(site, f"/{token}/")[0].status == 200
    command.signal(signal.SIGINT)
    done = command.end()
    assert done.returncode == code
    assert done.stderr == "", "no request is logged, for its path has the token"
    assert done.stdout == text
    assert text.startswith("no run yet in later\n")


# in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as chromium:
        yield chromium


@in_browser
def test_a_new_round_appears_without_a_reload_until_the_watch_ends(
    browser: Any, tmp_path: Path
) -> None:
    run = write_federation(
        write_run(tmp_path / "a", [0.5], planned=9, result=False), FEDERATION_STATE
    )
    page = new_page(browser, 1000, 800)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    with locked(run), served(run) as site:  # the run goes on
        page.goto(site.address)
        page.evaluate("window.mark = 1; document.querySelector('.scroll').focus()")
        page.wait_for_selector("text=round 1 of 9")
        add_round(run, 2)
        page.wait_for_selector("text=round 2 of 9")
        assert page.evaluate("window.mark") == 1, "it was reloaded"
        assert page.evaluate("document.activeElement.className") == "scroll", "the focus is kept"
        assert page.title() == "2/9 running - fedgist watch"
        summary = page.get_by_role("status").text_content()
        assert summary.startswith("1 running; waiting for ulm; round 1 begins")
        assert not page.is_visible("#ended")
        assert complaints == []
    page.wait_for_selector("text=The watch ended")
    assert page.is_visible("text=round 2 of 9")


@in_browser
def test_without_javascript_the_page_reloads_itself(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.5], planned=9, result=False)
    page = browser.new_context(java_script_enabled=False).new_page()
    page.set_default_timeout(HANG_S * 1000)
    with served(run) as site:
        page.goto(site.address)
        add_round(run, 2)
        page.wait_for_selector("text=round 2 of 9")
        page.close()


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "media"), [(390, "screen"), (1280, "screen"), (700, "print")])
def test_nothing_overflows(
    browser: Any, tmp_path: Path, width: int, media: str, scheme: str
) -> None:
    sites = [
        {**FEDERATION_STATE["sites"][0], "name": "x" * 80, "note": "y" * 300, "version": "z" * 90}
    ]
    hostile = {**FEDERATION_STATE, "sites": sites, "waiting_for": "w" * 200, "address": "a" * 200}
    run = write_run(tmp_path / ("long-" * 30), [0.5, 0.6], planned=9, result=False)
    change_line(run, 2, absent=[{"client": 1, "name": "n" * 200, "reason": "r" * 200}])
    page = new_page(browser, width, 900, scheme)
    with served(write_federation(run, hostile)) as site:
        page.goto(site.address)
        page.emulate_media(media=media)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if media == "print":  # paper does not scroll
            wide = (
                "[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right)"
            )
            assert max(page.evaluate(wide)) <= width
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        assert dark == (scheme == "dark" and media == "screen")
        page.close()
