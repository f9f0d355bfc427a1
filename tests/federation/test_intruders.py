"""Intruders, broken sites and false servers: refused, recorded, and the others go on."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from commands import HANG_S, fedgist
from fedgist.core.message import Nothing
from fedgist.core.tree import map_leaves
from fedgist.errors import FederationError
from fedgist.federation.keys import certificates, provision
from fedgist.federation.keys.certificates import serial_text
from fedgist.federation.keys.kits import Kit, read_kit
from fedgist.federation.keys.roster import ROSTER, read_roster
from fedgist.federation.network.frames import (
    ID_BYTES,
    NOTE,
    PIECE,
    TO_SERVER,
    Begin,
    note,
    pieces,
    signed_bytes,
)
from fedgist.federation.network.grpc_options import COMMANDS
from fedgist.federation.network.grpc_site import command
from fedgist.wire.envelope import LONGEST_HEADER, MAGIC, header_of, seal, unseal
from fedgist.wire.site import SLACK
from intruders import (
    ANY,
    MODEL,
    Attack,
    Hall,
    Peer,
    fake_server,
    hall,
    issued,
    make_kits,
    peer,
    site_kit,
    wait_until,
)
from real_federation import RealFederation, real_federation
from three_sites import NAMES, recipe

pytestmark = pytest.mark.slow  # together they are
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kits(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kits of another federation, whose sites and server have the same names."""
    return make_kits(tmp_path_factory.mktemp("others"))


@pytest.fixture
def ours(kits: Path, tmp_path: Path) -> Iterator[Hall]:
    with hall(kits, tmp_path) as opened:
        yield opened


def assert_unaffected(ours: Hall) -> None:
    """All three sites do a round, as if nothing had happened."""
    missing = [name for name in NAMES if NAMES.index(name) not in ours.engine.wire.present()]
    ours.join(*missing)
    (line,) = ours.rounds()
    assert (line["clients/replied"], line.get("refused", [])) == (3, []), line


def refused(port: int, kit: Kit) -> grpc.RpcError:
    with peer(port, kit) as intruder:
        intruder.send(note({}))
        return intruder.refusal()


# ---------------------------------------------------------------- who connects


def test_honest_sites_do_all_rounds(ours: Hall) -> None:
    ours.join(*NAMES)
    lines = ours.rounds(3)
    assert [line["clients/replied"] for line in lines] == [3, 3, 3]
    assert [line.get("refused", []) for line in lines] == [[], [], []]
    assert {ours.site(name)["state"] for name in NAMES} <= {"ready", "training"}


def test_a_site_of_another_root_is_refused(ours: Hall, foreign: Path) -> None:
    ours.join(*NAMES)
    stranger = replace(site_kit(foreign, "berlin"), root=ours.kit("berlin").root)
    assert refused(ours.port, stranger).code() is UNAVAILABLE  # TLS ends it
    assert_unaffected(ours)


def test_a_name_that_is_not_listed_is_refused(ours: Hall, kits: Path) -> None:
    error = refused(ours.port, issued(kits, "site", "mallory"))
    assert error.code() is PERMISSION_DENIED
    assert "'mallory' is not one of this federation's sites" in error.details()
    assert ours.logged("site mallory was refused: 'mallory' is not one of this federation's sites")
    assert_unaffected(ours)


@pytest.mark.parametrize("place", ["administrators/anna", "server"])
def test_only_a_site_takes_part(ours: Hall, kits: Path, place: str) -> None:
    error = refused(ours.port, read_kit(kits / place))
    if place == "server":  # TLS itself: its certificate is no client's
        assert error.code() in {UNAVAILABLE, PERMISSION_DENIED}
    else:
        assert error.code() is PERMISSION_DENIED
        assert ours.logged("administrator anna was refused")
    assert_unaffected(ours)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_site_is_no_administrator(ours: Hall, name: str) -> None:
    kit = replace(ours.kit("berlin"), address=f"127.0.0.1:{ours.port}")
    with pytest.raises(FederationError, match="a certificate of the role site may not do this"):
        command(kit, name)
    assert not ours.engine.stop.is_set()
    assert ours.logged("site berlin was refused: a certificate of the role site")
    assert_unaffected(ours)


def test_a_revoked_site_is_cut_while_it_is_connected(tmp_path: Path) -> None:
    kits = make_kits(tmp_path / "own")
    with hall(kits, tmp_path) as ours, ours.peer("berlin") as berlin:
        berlin.ready(ours.hello)
        ours.join("lyon", "ulm")
        roster = read_roster(kits / "server" / ROSTER)
        (serial,) = roster.serials["berlin"]
        provision.revoke(serial_text(serial), kits)
        began = time.monotonic()
        error = berlin.refusal()
        assert time.monotonic() - began < 30.0  # one second; a busy machine takes longer
        assert error.code() is PERMISSION_DENIED
        reason = f"its certificate (serial {serial_text(serial)}) was revoked"
        assert error.details() == reason
        assert ours.logged(f"the stream of berlin is cut: {reason}")
        wait_until(lambda: 0 not in ours.engine.wire.present(), "berlin is gone")
        assert (ours.site("berlin")["state"], ours.site("berlin")["note"]) == ("revoked", reason)
        assert refused(ours.port, ours.kit("berlin")).code() is PERMISSION_DENIED
        ours.engine.section = ours.engine.section.model_copy(update={"least_sites": 2})
        (line,) = ours.rounds()
        assert line["clients/replied"] == 2


def test_a_round_does_not_wait_for_a_revoked_site(tmp_path: Path) -> None:
    kits = make_kits(tmp_path / "own")

    def revoked(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
        provision.revoke("berlin", kits)
        assert site.refusal().code() is PERMISSION_DENIED

    with hall(kits, tmp_path, deadline_s=HANG_S) as ours:
        ours.join("lyon", "ulm")
        ours.join("berlin", attack=revoked)
        (line,) = ours.rounds()
        assert line["clients/replied"] == 2
        assert line["absent"] == [{"client": 0, "name": "berlin", "reason": "not connected"}]


PLAIN = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "noise": bytes(range(256)) * 64,
}


@pytest.mark.parametrize("name", PLAIN)
def test_bytes_without_tls_are_refused(ours: Hall, name: str) -> None:
    ours.join(*NAMES)
    with socket.create_connection(("127.0.0.1", ours.port), 30.0) as connection:
        connection.sendall(PLAIN[name])
        with contextlib.suppress(ConnectionError):
            while answer := connection.recv(1 << 16):
                assert not answer.startswith((b"HTTP", b"\x00"))  # at most an alert of TLS
    assert_unaffected(ours)


def test_tls_without_a_certificate_is_refused(ours: Hall) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ours.kit("berlin").root.decode())
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", ours.port), 30.0) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secured,
    ):
        answer = b""
        with contextlib.suppress(ssl.SSLError, ConnectionError):  # an alert, after the handshake
            secured.sendall(PLAIN["http2"])
            answer = secured.recv(1)
        assert answer == b""
    assert_unaffected(ours)


def test_old_tls_is_refused(ours: Hall) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ours.kit("berlin").root.decode())
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection(("127.0.0.1", ours.port), 30.0) as connection,
        pytest.raises(OSError, match=r"alert|protocol|reset"),
    ):
        context.wrap_socket(connection, server_hostname="localhost")


def test_silent_connections_lock_nobody_out(ours: Hall) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            address = ("127.0.0.1", ours.port)
            stack.enter_context(socket.create_connection(address, 30.0))
        ours.join(*NAMES)
        assert_unaffected(ours)


def test_silent_streams_lock_nobody_out(ours: Hall) -> None:
    """A site's own certificate is needed for these."""
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            opened = stack.enter_context(ours.peer("berlin"))
            assert opened.call.is_active()
        ours.join(*NAMES)
        assert_unaffected(ours)


# ---------------------------------------------------------------- notes before a site is ready


def nested(depth: int) -> bytes:
    return NOTE + b'{"a":' * depth + b"1" + b"}" * depth


GREETINGS = {
    "no note": PIECE + b"x",
    "empty": b"",
    "no JSON": NOTE + b"\xff\xfe{",
    "a list": NOTE + b"[1, 2]",
    "too deep": nested(100_000),
    "a number of many digits": NOTE + b'{"process": ' + b"9" * 100_000 + b"}",
    "no text": note({"process": 3, "versions": {"fedgist": "1", "protocol": "1"}}),
    "a long text": note({"process": "p" * 10_000, "versions": {"fedgist": "", "protocol": ""}}),
    "a key too many": note({"process": "p", "versions": {}, "more": 1}),
    "lone surrogates": NOTE + b'{"process": "\\ud800", "\\udfff": 1}',
}


@pytest.mark.parametrize("name", GREETINGS)
def test_a_greeting_that_cannot_be_read_is_refused(ours: Hall, name: str) -> None:
    with ours.peer("berlin") as intruder:
        intruder.send(GREETINGS[name])
        error = intruder.refusal()
    assert error.code() is FAILED_PRECONDITION, error
    assert ours.site("berlin")["refusals"] == 1
    assert ours.site("berlin")["note"] == error.details()
    assert ours.logged(f"site berlin was refused: {error.details()}")
    assert_unaffected(ours)


def test_a_note_of_100_mb_is_refused_before_it_is_held(ours: Hall) -> None:
    with ours.peer("berlin") as intruder:
        intruder.outgoing.put(NOTE + bytes(100 << 20))
        error = intruder.refusal()
    # gRPC itself: the site's own limit, or the server's
    assert error.code() in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
    assert_unaffected(ours)


def test_another_version_is_refused_with_both_values(ours: Hall) -> None:
    with ours.peer("berlin") as intruder:
        intruder.send(note({"process": "p", "versions": {"fedgist": "0.0", "protocol": "99"}}))
        error = intruder.refusal()
    assert error.code() is FAILED_PRECONDITION
    assert "the site has 0.0" in error.details()
    own = ours.site("berlin")
    assert (own["state"], own["refusals"], own["note"]) == ("refused", 1, error.details())
    assert_unaffected(ours)


HELLOS: dict[str, tuple[dict[str, Any], str]] = {
    "run": ({"run": "ab" * 8}, "run: the server has {run}, and the site has abababababababab"),
    "recipe": ({"digest": "cd" * 32}, "recipe digest: the server has {digest}, and the site has"),
    "number": ({"number": 2}, "number: the server has 0, and the site has 2"),
    "public": ({"public_digest": 7}, "digest of the public rows: the server has 0, and the site"),
    "model": (
        {"outlines": {"evil": {"input_shape": [1], "feature_width": 2, "num_classes": 3}}},
        "architecture 'evil': the server has None, and the site has",
    ),
    "no hello": ({"run": "../../etc"}, "Hello: run: "),
    "refuses": (
        {"refused": "policy", "about": "most_rounds"},
        "the site does not take part: policy: most_rounds (its log says why)",
    ),
    "no kind": ({"refused": "SiteError"}, "Hello: refused: Input should be 'policy', 'budget'"),
    "no key": ({"refused": "policy", "about": "x\n2026 INFO"}, "Hello: about: String should match"),
}


@pytest.mark.parametrize("name", HELLOS)
def test_a_hello_of_something_else_is_refused_with_both_values(ours: Hall, name: str) -> None:
    changed, expected = HELLOS[name]
    with ours.peer("berlin") as intruder:
        plan = intruder.greeted()
        own = {key: plan[key] for key in ("run", "digest", "number", "last")}
        intruder.send(note({**own, **ours.hello, **changed}))
        error = intruder.refusal()
    assert error.code() is FAILED_PRECONDITION
    assert error.details().startswith(expected.format(**plan))
    wait_until(lambda: ours.site("berlin")["refusals"], "the refusal is recorded")
    own_line = ours.site("berlin")
    assert (own_line["state"], own_line["note"]) == ("refused", error.details())
    assert_unaffected(ours)


def test_a_reason_is_one_short_line_in_the_log(ours: Hall) -> None:
    """A site cannot write lines of its own into the server's log, nor fill it."""
    with ours.peer("berlin") as intruder:
        plan = intruder.greeted()
        own = {key: plan[key] for key in ("run", "digest", "number", "last")}
        small = {"input_shape": [7], "feature_width": 2, "num_classes": 3}
        forged = {"x\n2026-01-01 INFO lyon is revoked\x1b[2J": small}
        intruder.send(note({**own, "outlines": forged}))
        first = intruder.refusal()
    with ours.peer("berlin") as intruder:
        plan = intruder.greeted()
        shape = {"input_shape": [7] * 300_000, "feature_width": 2, "num_classes": 3}
        intruder.send(note({**own, "outlines": {"evil": shape}}))
        second = intruder.refusal()
    assert "\\n2026-01-01" in first.details()
    assert all(line.isprintable() and len(line) < 1000 for line in ours.log)
    assert len(ours.site("berlin")["note"]) < 1000
    assert second.code() is FAILED_PRECONDITION
    assert "architecture 'evil'" in second.details()
    assert_unaffected(ours)


def test_a_site_that_leaves_at_once_is_absent(ours: Hall) -> None:
    for _ in range(20):
        with ours.peer("berlin") as hasty:
            hasty.greet()
        with ours.peer("berlin") as hasty:
            hasty.greeted()
    wait_until(lambda: ours.site("berlin")["state"] == "absent", "berlin is absent")
    assert ours.server.links == {}
    assert_unaffected(ours)


# ---------------------------------------------------------------- replies in a round


def bad_value(value: float) -> Attack:
    def attack(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
        header, messages = unseal(request, ANY)
        upload = ours.upload(header, messages["download"])
        spoilt = map_leaves(lambda leaf: leaf + value, upload)
        reply = header.model_copy(update={"purpose": "reply"})
        site.reply(begin.ident, seal(reply, {"upload": spoilt}))

    return attack


def changed_header(**values: object) -> Attack:
    def attack(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
        site.reply(begin.ident, ours.zeros(request, **values))

    return attack


def mixed_up(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    """The last bytes of the message come before its first."""
    reply = ours.zeros(request)
    start = len(reply) - next(iter(header_of(reply).messages.values())).size
    site.reply(begin.ident, reply[:start] + reply[-32:] + reply[start:-32])


def another_type(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    """The envelope names a type that this process has not declared: nothing is imported."""
    header, _ = unseal(request, ANY)
    reply = seal(header.model_copy(update={"purpose": "reply"}), {"upload": Nothing()})
    head = reply.replace(b"fedgist.core.message:Nothing", b"os.path.expandvars:system...")
    start = len(MAGIC) + 4 + 32
    length = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 4], "big")
    checksum = hashlib.sha256(head[start : start + length]).digest()
    site.reply(begin.ident, head[: start - 32] + checksum + head[start:])


def nothing_inside(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    header, _ = unseal(request, ANY)
    site.reply(begin.ident, seal(header.model_copy(update={"purpose": "reply"}), {}))


def wrong_message(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    header, _ = unseal(request, ANY)
    site.reply(
        begin.ident, seal(header.model_copy(update={"purpose": "reply"}), {"upload": Nothing()})
    )


#: Attacks after which the site is refused in this round, and the reason in the round's line.
REFUSED: dict[str, tuple[Attack, str]] = {
    "NaN": (bad_value(float("nan")), "not finite"),
    "infinite": (bad_value(float("inf")), "not finite"),
    "another run": (changed_header(run="ab" * 8), "it is of run 'abababababababab', not"),
    "another client": (changed_header(client=2), "it names client 2, but came from client 0"),
    "a request": (changed_header(purpose="train"), "a train is not an answer"),
    "a refusal": (
        changed_header(purpose="refusal", reason="would spend more\n\x1b[2J"),
        "would spend more\\n\\x1b[2J",
    ),
    "mixed-up pieces": (mixed_up, "is not what its digest says: it was cut or changed"),
    "an unknown type": (another_type, "unknown message type 'os.path.expandvars:system...'"),
    "no message": (nothing_inside, "it holds no upload"),
    "another message": (wrong_message, "it is a Nothing, not a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_reply_that_is_not_valid_is_refused_in_the_rounds_line(ours: Hall, name: str) -> None:
    attack, reason = REFUSED[name]
    ours.join("lyon", "ulm")
    ours.join("berlin", attack=attack)
    first, second = ours.rounds(2)
    (entry,) = first["refused"]
    assert (entry["client"], entry["name"]) == (0, "berlin")
    assert reason in entry["reason"]
    assert (first["clients/replied"], second["clients/replied"]) == (2, 3)


def wrong_stage(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    site.reply(begin.ident, ours.zeros(request, stage="no such stage"))


def reply_later(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    """Old bytes, signed again by the site itself, under the id of a new request."""
    old = ours.zeros(request)
    site.reply(begin.ident, old)
    while (new := site.request()) is not None and header_of(new[1]).purpose != "train":
        site.reply(new[0].ident, ours.zeros(new[1]))
    assert new is not None
    assert new[0].ident != begin.ident
    site.reply(new[0].ident, old)


#: Attacks that are counted as unexpected answers in a round's events; the site's reply is missing.
UNEXPECTED: dict[str, tuple[Attack, list[int]]] = {
    "forged stage": (changed_header(stage="no such stage"), [2, 3]),
    "forged round": (changed_header(round=2), [2, 3]),
    "old bytes, new id": (reply_later, [3, 2]),
}


@pytest.mark.parametrize("name", UNEXPECTED)
def test_an_answer_to_something_else_is_not_used(ours: Hall, name: str) -> None:
    attack, replied = UNEXPECTED[name]
    ours.join("lyon", "ulm")
    ours.join("berlin", attack=attack)
    lines = ours.rounds(2)
    assert [line["clients/replied"] for line in lines] == replied
    bad = lines[replied.index(2)]
    assert bad["events"] == ["1 unexpected answer of client 0 dropped"]
    assert bad["absent"] == [{"client": 0, "name": "berlin", "reason": "no reply in time"}]


def unasked_before(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    """An answer to a request that does not exist comes first, with an empty piece in it."""
    reply = ours.zeros(request)
    unasked = secrets.token_bytes(ID_BYTES)
    signature = certificates.sign(site.kit.key, signed_bytes(TO_SERVER, unasked, reply))
    site.send(Begin(unasked, len(reply), signature).frame(), PIECE, *pieces((reply,)))
    site.reply(begin.ident, reply)


def answered_twice(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    """The old id is used again: a replayed reply, byte by byte."""
    site.reply(begin.ident, ours.zeros(request))
    site.reply(begin.ident, ours.zeros(request))


@pytest.mark.parametrize("attack", [unasked_before, answered_twice])
def test_an_answer_that_nobody_asked_for_is_dropped_and_counted(ours: Hall, attack: Attack) -> None:
    ours.join("lyon", "ulm")
    ours.join("berlin", attack=attack)
    lines = ours.rounds(2)
    assert [line["clients/replied"] for line in lines] == [3, 3]
    events = [event for line in lines for event in line.get("events", [])]
    assert events == ["1 unexpected answer of client 0 dropped"]


def announced(size: int, *frames: bytes) -> Attack:
    def attack(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
        site.send(Begin(begin.ident, size, b"").frame(), *frames)
        note_refusal(ours, site)

    return attack


def note_refusal(ours: Hall, site: Peer) -> None:
    assert site.refusal().code() is INVALID_ARGUMENT
    assert ours.site("berlin")["refusals"] == 1
    assert ours.logged("site berlin was refused: ")


def unsigned(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    reply = ours.zeros(request)
    site.send(Begin(begin.ident, len(reply), b"").frame(), *pieces((reply,)))
    note_refusal(ours, site)


def signed_by_another(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    site.reply(begin.ident, ours.zeros(request), kit=ours.kit("lyon"))
    note_refusal(ours, site)


def signed_for_another_id(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    """Old bytes with their old signature under a new id, as a thief of the stream could send."""
    reply = ours.zeros(request)
    old = certificates.sign(site.kit.key, signed_bytes(TO_SERVER, bytes(ID_BYTES), reply))
    site.send(Begin(begin.ident, len(reply), old).frame(), *pieces((reply,)))
    note_refusal(ours, site)


def signed_as_request(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    """The server's own request comes back with the server's own signature."""
    site.send(Begin(begin.ident, len(request), begin.signature).frame(), *pieces((request,)))
    note_refusal(ours, site)


def header_without_end(ours: Hall, site: Peer, begin: Begin, request: bytes) -> None:
    blob = MAGIC + (LONGEST_HEADER + 1).to_bytes(4, "big") + bytes(100)
    site.send(Begin(begin.ident, len(blob), b"").frame(), *pieces((blob,)))
    note_refusal(ours, site)


#: Attacks that end the site's stream. It connects again, and its honest reply counts.
CUT: dict[str, tuple[Attack, str]] = {
    "a piece more": (announced(4, PIECE + b"four", PIECE + b"more"), "is not"),
    "a larger piece": (announced(4, PIECE + b"fives"), "the pieces are larger than was announced"),
    "a piece of 2 MiB": (announced(1 << 20, PIECE + bytes(2 << 20)), "larger than was announced"),
    "no piece": (announced(4, note({})), "it is not a piece of an envelope"),
    "no beginning": (announced(4, PIECE + b"four", note({})), "is not"),
    "nothing": (announced(0), "it is not an envelope"),
    "no signature": (unsigned, "the reply is not signed by its site"),
    "another site's": (signed_by_another, "the reply is not signed by its site"),
    "another id's": (signed_for_another_id, "the reply is not signed by its site"),
    "the server's own": (signed_as_request, "the reply is not signed by its site"),
    "no end": (header_without_end, "its header is to have 65537 bytes"),
}


@pytest.mark.parametrize("name", CUT)
def test_a_stream_that_breaks_the_protocol_is_cut_and_may_come_back(ours: Hall, name: str) -> None:
    attack, reason = CUT[name]
    ours.join("lyon", "ulm")
    ours.join("berlin", attack=attack)
    (line,) = ours.rounds()
    assert (line["clients/replied"], line.get("refused", [])) == (3, [])
    assert ours.site("berlin")["refusals"] == 1
    assert any(reason in text for text in ours.log)


def test_a_gibibyte_that_is_announced_is_not_waited_for(ours: Hall) -> None:
    ours.join("lyon", "ulm")
    ours.join("berlin", attack=announced(1 << 30))
    first, second = ours.rounds(2)
    (entry,) = first["refused"]
    assert entry["reason"] == f"its reply has more than {ours.engine.remote.largest + SLACK} bytes"
    assert ours.logged("a reply of 1073741824 bytes was announced; at most")
    assert (first["clients/replied"], second["clients/replied"]) == (2, 3)


def test_a_gibibyte_that_nobody_asked_for_is_refused(ours: Hall) -> None:
    with ours.peer("berlin") as intruder:
        intruder.ready(ours.hello)
        intruder.send(Begin(bytes(ID_BYTES), 1 << 63, b"").frame())
        error = intruder.refusal()
    assert error.code() is INVALID_ARGUMENT
    assert_unaffected(ours)


def test_the_later_process_of_a_kit_takes_over(ours: Hall) -> None:
    with ours.peer("berlin") as older, ours.peer("berlin") as newer:
        older.ready(ours.hello, process="older")
        newer.ready(ours.hello, process="newer")
        error = older.refusal()
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert error.details() == "this kit is in use by another process, which connected later"
        assert ours.logged("site berlin: a later process with its kit takes over")
        wait_until(lambda: len(ours.server.links) == 1, "the older is gone")
        wait_until(lambda: ours.engine.wire.present() == {0}, "the newer is there")
        assert ours.site("berlin")["state"] == "ready"
        assert newer.call.is_active()
    wait_until(lambda: not ours.server.links, "the newer is gone")
    assert_unaffected(ours)


# ---------------------------------------------------------------- with real processes


def greeted(frames: Iterator[bytes]) -> Iterator[bytes]:
    raise AssertionError("a site greeted a server of another root")


def test_intruders_among_real_processes(foreign: Path, tmp_path: Path) -> None:
    """One federation: a false server, a policy, a kit used twice, a revocation, a stop."""
    with real_federation(tmp_path) as fed:
        patient = {"deadline_s": 120.0, "first_deadline_s": 120.0}
        raw = recipe("fedavg", rounds=1000, model=MODEL, federation={"least_sites": 2, **patient})
        fed.write_recipe(raw)
        kits = tmp_path / "kits"
        other = foreign / "server"
        wrong, right = str(other / "root.pem"), (kits / "server/root.pem").read_bytes()
        with fake_server(read_kit(other), right, greeted, fed.port):
            fed.start_site("berlin", SSL_CERT_FILE=wrong, GRPC_DEFAULT_SSL_ROOTS_FILE_PATH=wrong)
            fed.wait_for(lambda: "cannot be reached" in fed.output("berlin"))
        fed.start_server()
        fed.wait_for(lambda: states(fed, "berlin") in {"ready", "training"})
        # the same kit again, with a state folder of its own
        kit, table = kits / "sites/berlin", tmp_path / "again.toml"
        table.write_text((tmp_path / "berlin.toml").read_text().replace("state-", "elsewhere-"))
        fed._start("again", None, "site", kit, "--config", table)
        text = in_one_line(fed.wait_end("berlin", 1))
        assert "error: the server" in text
        assert "this kit is in use by another process, which connected later" in text
        assert "Traceback" not in text
        # a run outside the policy
        fed.write_site("ulm", policy={"methods": ["fedlog"]})
        fed.start_site("ulm")
        text = in_one_line(fed.wait_end("ulm", 2))
        assert "policy.methods accepts fedlog, not 'fedavg'" in text
        fed.wait_for(lambda: "policy: methods (its log says why)" in note_of(fed, "ulm"))
        fed.write_site("ulm")
        fed.start_site("ulm")
        fed.start_site("lyon")
        fed.wait_for(lambda: any(r["clients/replied"] == 3 for r in fed.rounds()))
        # a revocation while the run goes on
        provision.revoke("ulm", kits)
        assert "was revoked" in in_one_line(fed.wait_end("ulm", 1))
        fed.wait_for(lambda: states(fed, "ulm") == "revoked")
        fed.wait_round(fed.rounds()[-1]["round"] + 2)
        assert fed.rounds()[-1]["clients/replied"] == 2
        log = (fed.run / "server.log").read_text()
        for line in (
            "site berlin: a later process with its kit takes over",
            "site ulm was refused: the site does not take part: policy: methods (its log",
            "the stream of ulm is cut: its certificate (serial ",
        ):
            assert line in log
        # a site is no administrator
        fedgist("stop", kits / "sites/lyon", cwd=tmp_path, code=2)
        fedgist("stop", kits / "administrators/anna", cwd=tmp_path)
        assert "stopped by anna" in fed.wait_end("server")


def states(fed: RealFederation, name: str) -> str:
    return "".join(site["state"] for site in fed.status()["sites"] if site["name"] == name)


def note_of(fed: RealFederation, name: str) -> str:
    return "".join(site["note"] for site in fed.status()["sites"] if site["name"] == name)


def in_one_line(text: str) -> str:
    return " ".join(text.split())
