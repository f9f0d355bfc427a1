"""Certificates of a federation: chains, roles, hosts and dates, with OpenSSL and TLS as oracles."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from concurrent import futures
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from commands import HANG_S, call
from fedgist.errors import KitError
from fedgist.federation.keys import certificates
from fedgist.federation.keys.certificates import Role

HOST = "localhost"
NOW = datetime(2030, 5, 17, 12, 30, tzinfo=UTC)


@dataclass(frozen=True)
class Leaf:
    key: bytes
    cert: bytes


@dataclass(frozen=True)
class Root:
    key: bytes
    cert: bytes

    def leaf(
        self, role: Role, name: str, now: datetime | None = None, days: int = 90, host: str = HOST
    ) -> Leaf:
        key = certificates.make_key()
        request = certificates.make_request(key, name)
        host = host if role == "server" else ""
        cert = certificates.issue(
            self.key, self.cert, request, role, name, days=days, host=host, now=now
        )
        return Leaf(key, cert)


def root(now: datetime | None = None) -> Root:
    return Root(*certificates.make_root("sepsis", now))


ROOT = root()
SERVER = ROOT.leaf("server", "server")
BERLIN = ROOT.leaf("site", "berlin")
ANNA = ROOT.leaf("administrator", "anna")


def extension(pem: bytes, kind: type[x509.ExtensionType]) -> x509.Extension[x509.ExtensionType]:
    return x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(kind)


@pytest.mark.parametrize(
    ("leaf", "role", "name"),
    [(SERVER, "server", "server"), (BERLIN, "site", "berlin"), (ANNA, "administrator", "anna")],
    ids=["server", "site", "administrator"],
)
def test_a_certificate_names_its_role_and_can_sign_no_other(
    leaf: Leaf, role: Role, name: str
) -> None:
    identity = certificates.identity_of(leaf.cert)
    loaded = x509.load_pem_x509_certificate(leaf.cert)
    assert (identity.role, identity.name) == (role, name)
    assert (identity.serial, identity.not_after) == (
        loaded.serial_number,
        loaded.not_valid_after_utc,
    )
    basic = extension(leaf.cert, x509.BasicConstraints)
    assert (basic.critical, basic.value) == (True, x509.BasicConstraints(False, None))
    usage = extension(leaf.cert, x509.KeyUsage).value
    assert isinstance(usage, x509.KeyUsage)
    assert (usage.digital_signature, usage.key_cert_sign, usage.crl_sign) == (True, False, False)
    assert isinstance(loaded.signature_hash_algorithm, hashes.SHA256)
    key = loaded.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"


def test_the_root_signs_certificates_for_ten_years_and_no_further_authority() -> None:
    loaded = x509.load_pem_x509_certificate(ROOT.cert)
    basic = extension(ROOT.cert, x509.BasicConstraints)
    assert (basic.critical, basic.value) == (True, x509.BasicConstraints(True, 0))
    life = loaded.not_valid_after_utc - loaded.not_valid_before_utc
    assert timedelta(days=3650) <= life <= timedelta(days=3650, minutes=10)


def test_each_side_accepts_the_other() -> None:
    certificates.check_server(SERVER.cert, ROOT.cert, HOST)
    certificates.check_server(SERVER.cert, ROOT.cert, "127.0.0.1")  # a local host's usual names
    for leaf in (BERLIN, ANNA):
        assert certificates.check_client(leaf.cert, ROOT.cert) == certificates.identity_of(
            leaf.cert
        )


@pytest.mark.parametrize(
    ("host", "others"),
    [
        ("fed.example.org", ["example.org", "a.fed.example.org", "localhost", "127.0.0.1"]),
        ("192.0.2.7", ["192.0.2.8", "localhost", "fed.example.org"]),
        ("2001:db8::7", ["2001:db8::8", "[::1]"]),
    ],
)
def test_a_server_is_accepted_for_its_own_host_only(host: str, others: list[str]) -> None:
    leaf = ROOT.leaf("server", "server", host=host)
    certificates.check_server(leaf.cert, ROOT.cert, host)
    for other in others:
        with pytest.raises(KitError, match="is not for the host"):
            certificates.check_server(leaf.cert, ROOT.cert, other)
    with pytest.raises(KitError):
        certificates.check_server(leaf.cert, ROOT.cert, "no host")


def test_a_site_is_no_server_and_a_server_no_client() -> None:
    for leaf, whom in ((BERLIN, "site berlin"), (ANNA, "administrator anna")):
        with pytest.raises(KitError, match=f"is of {whom}, not of a server"):
            certificates.check_server(leaf.cert, ROOT.cert, HOST)
    with pytest.raises(KitError, match="is of the server, not of a site"):
        certificates.check_client(SERVER.cert, ROOT.cert)


def test_another_root_of_the_same_name_is_refused() -> None:
    other = root()
    with pytest.raises(KitError, match="not signed by this federation's root"):
        certificates.check_client(BERLIN.cert, other.cert)
    with pytest.raises(KitError, match="not signed by this federation's root"):
        certificates.check_server(SERVER.cert, other.cert, HOST)
    with pytest.raises(KitError, match="holds 2 certificates instead of one"):
        certificates.check_client(BERLIN.cert, other.cert + ROOT.cert)  # TLS would trust both


def test_a_site_cannot_sign_for_another() -> None:
    # the site takes itself for a root, as a client that checks one signature only would accept
    request = certificates.make_request(certificates.make_key(), "ulm")
    forged = certificates.issue(BERLIN.key, BERLIN.cert, request, "site", "ulm", days=9)
    with pytest.raises(KitError, match="not signed by this federation's root"):
        certificates.check_client(forged, ROOT.cert)
    with pytest.raises(KitError):
        certificates.check_client(forged, BERLIN.cert)  # its own certificate is no root
    with pytest.raises(KitError):
        certificates.check_client(ROOT.cert, ROOT.cert)


def test_dates() -> None:
    made = root(NOW)
    leaf = made.leaf("site", "berlin", NOW, days=10)
    for moment in (-timedelta(minutes=5), timedelta(0), timedelta(days=10)):
        certificates.check_client(leaf.cert, made.cert, NOW + moment)
    with pytest.raises(KitError, match="expired on 2030-05-27"):
        certificates.check_client(leaf.cert, made.cert, NOW + timedelta(days=10, seconds=1))
    with pytest.raises(KitError, match="valid from 2030-05-17 12:25 UTC: is the clock right"):
        certificates.check_client(leaf.cert, made.cert, NOW - timedelta(minutes=5, seconds=1))
    late = NOW + timedelta(days=3640)
    last = certificates.identity_of(made.leaf("site", "berlin", late, days=365).cert)
    assert last.not_after == NOW + timedelta(days=3650)  # never after the root
    with pytest.raises(KitError, match="the root's certificate ended on 2040-05-14"):
        made.leaf("site", "berlin", NOW + timedelta(days=3650))


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (timedelta(days=31), None),
        (timedelta(days=30, seconds=1), None),
        (timedelta(days=30), "site berlin expires on 2030-08-15, in 30 days."),
        (timedelta(days=1, hours=3), "site berlin expires on 2030-08-15, in 1 day."),
        (timedelta(0), "site berlin expires on 2030-08-15, in 0 days."),
        (-timedelta(seconds=1), "site berlin expired on 2030-08-15."),
    ],
)
def test_the_end_is_announced_thirty_days_ahead(left: timedelta, words: str | None) -> None:
    leaf = root(NOW).leaf("site", "berlin", NOW, days=90)
    note = certificates.expiry_note(leaf.cert, NOW + timedelta(days=90) - left)
    if words is None:
        assert note is None
    else:
        assert note is not None
        assert words in note
        assert "fedgist provision --renew berlin --out KITS" in note


def test_signatures_of_data() -> None:
    signature = certificates.sign(ANNA.key, b"start the run")
    assert certificates.is_signed(ANNA.cert, b"start the run", signature)
    assert not certificates.is_signed(ANNA.cert, b"start the run!", signature)
    assert not certificates.is_signed(BERLIN.cert, b"start the run", signature)
    for damaged in (b"", signature[:-1], signature + b"\0", b"\xff" * 70):
        assert not certificates.is_signed(ANNA.cert, b"start the run", damaged)
    # the oracle: cryptography's own verification with the key's public half
    key = x509.load_pem_x509_certificate(ANNA.cert).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    key.verify(signature, b"start the run", ec.ECDSA(hashes.SHA256()))


def test_a_request_must_be_signed_by_its_own_key_and_of_the_right_name() -> None:
    request = certificates.make_request(certificates.make_key(), "berlin")
    assert certificates.check_request(request) == "berlin"
    with pytest.raises(KitError, match="request is of 'berlin', not of 'ulm'"):
        certificates.issue(ROOT.key, ROOT.cert, request, "site", "ulm", days=9)
    with pytest.raises(KitError, match="signature is not by its own key"):
        certificates.check_request(with_another_name(request))
    with pytest.raises(KitError, match="root's key does not belong"):
        certificates.issue(ANNA.key, ROOT.cert, request, "site", "berlin", days=9)


def with_another_name(request: bytes) -> bytes:
    """The request with a name of the same length, and the signature of the old one."""
    loaded = x509.load_pem_x509_csr(request)
    changed = loaded.public_bytes(serialization.Encoding.DER).replace(b"berlin", b"merlin")
    forged = x509.load_der_x509_csr(changed)
    return forged.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "key", [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())]
)
def test_other_kinds_of_keys_are_refused(
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey,
) -> None:
    pem = serialization.Encoding.PEM
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "berlin")])
    request = x509.CertificateSigningRequestBuilder(name).sign(key, hashes.SHA256())
    with pytest.raises(KitError, match="request's key is not an EC P-256 key"):
        certificates.check_request(request.public_bytes(pem))
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(KitError, match="private key is not an EC P-256 key"):
        certificates.sign(private, b"")


DOORS = (
    certificates.identity_of,
    certificates.check_request,
    certificates.check_key,
    certificates.fingerprint,
    certificates.expiry_note,
    lambda pem: certificates.sign(pem, b""),
    lambda pem: certificates.is_signed(pem, b"", b""),
    lambda pem: certificates.check_client(pem, ROOT.cert),
    lambda pem: certificates.check_client(BERLIN.cert, pem),
    lambda pem: certificates.check_server(pem, ROOT.cert, HOST),
)


@given(st.one_of(st.binary(), st.text().map(str.encode)))
def test_garbage_is_a_kit_error(garbage: bytes) -> None:
    for door in DOORS:
        with pytest.raises(KitError):
            door(garbage)


def der(pem: bytes) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem.decode())


def signed_part(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).tbs_certificate_bytes


@pytest.mark.filterwarnings("ignore:Parsed a serial number")  # cryptography's, of a negative one
@given(st.integers(0, len(der(BERLIN.cert)) - 1), st.integers(1, 255))
def test_no_changed_byte_of_what_is_signed_is_accepted(place: int, change: int) -> None:
    content = bytearray(der(BERLIN.cert))
    content[place] ^= change
    changed = ssl.DER_cert_to_PEM_cert(bytes(content)).encode()
    with contextlib.suppress(KitError):
        certificates.check_client(changed, ROOT.cert)
        # one signature has several encodings: the count of unused bits may differ
        assert signed_part(changed) == signed_part(BERLIN.cert)
    for door in DOORS:
        with contextlib.suppress(KitError):
            door(changed)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_serial_that_is_not_positive_is_refused() -> None:
    content = bytearray(der(BERLIN.cert))
    content[15] |= 0x80  # the serial's first byte; positive serials begin with a zero bit
    with pytest.raises(KitError, match=r"serial number is not positive|is damaged"):
        certificates.identity_of(ssl.DER_cert_to_PEM_cert(bytes(content)).encode())


def test_errors_are_one_line_and_hold_no_key() -> None:
    for pem in (ROOT.key, ROOT.key[:-40], ROOT.key.replace(b"E", b"F")):
        with pytest.raises(KitError) as error:
            certificates.identity_of(pem)
        assert "PRIVATE" not in str(error.value)
        assert "\n" not in str(error.value)


# --- OpenSSL and TLS ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pairs: dict[str, Root | Leaf] = {"root": ROOT, "server": SERVER, "berlin": BERLIN, "anna": ANNA}
    for name, leaf in pairs.items():
        (tmp_path / f"{name}.pem").write_bytes(leaf.cert)
        (tmp_path / f"{name}-key.pem").write_bytes(leaf.key)
    (tmp_path / "other.pem").write_bytes(root().cert)
    return tmp_path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is not here")
@pytest.mark.parametrize(
    ("name", "purpose", "trusted", "accepted"),
    [
        ("server", "sslserver", "root", True),
        ("server", "sslclient", "root", False),
        ("berlin", "sslclient", "root", True),
        ("berlin", "sslserver", "root", False),
        ("anna", "sslclient", "root", True),
        ("anna", "sslserver", "root", False),
        ("berlin", "sslclient", "other", False),
    ],
)
def test_openssl_agrees(
    folder: Path, name: str, purpose: str, trusted: str, *, accepted: bool
) -> None:
    host = ("-verify_hostname", HOST) if purpose == "sslserver" else ()
    words = ("-x509_strict", "-purpose", purpose, *host, "-CAfile", f"{trusted}.pem")
    done = call(["openssl", "verify", *words, f"{name}.pem"], folder, code=None)
    assert (done.returncode == 0) == accepted, done.stdout + done.stderr


def context(folder: Path, name: str, purpose: ssl.Purpose) -> ssl.SSLContext:
    made = ssl.create_default_context(purpose, cafile=str(folder / "root.pem"))
    made.load_cert_chain(folder / f"{name}.pem", folder / f"{name}-key.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def greeting(folder: Path, server: str, client: str, host: str = HOST) -> bytes:
    """What a client receives from a server over mutual TLS on loopback."""
    inside = context(folder, server, ssl.Purpose.CLIENT_AUTH)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            with (
                contextlib.suppress(OSError),
                plain,
                inside.wrap_socket(plain, server_side=True) as secure,
            ):
                secure.sendall(b"welcome")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            outside = context(folder, client, ssl.Purpose.SERVER_AUTH)
            with (
                socket.create_connection(listener.getsockname()) as plain,
                outside.wrap_socket(plain, server_hostname=host) as secure,
            ):
                return secure.recv(7)
        finally:
            thread.join(HANG_S)


def test_tls_accepts_both_sides(folder: Path) -> None:
    assert greeting(folder, "server", "berlin") == b"welcome"
    assert greeting(folder, "server", "anna", "127.0.0.1") == b"welcome"


def test_tls_refuses_a_site_as_a_server_and_a_server_as_a_client(folder: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="unsuitable certificate purpose"):
        greeting(folder, "berlin", "anna")
    with pytest.raises(ssl.SSLError):
        greeting(folder, "server", "server")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        greeting(folder, "server", "berlin", "fed.example.org")


@pytest.mark.parametrize(("server", "accepted"), [(SERVER, True), (BERLIN, False)])
def test_grpc_accepts_a_server_and_refuses_a_site_in_its_place(
    server: Leaf, *, accepted: bool
) -> None:
    grpc = pytest.importorskip("grpc")
    peers: list[str] = []

    def answer(request: bytes, ctx: Any) -> bytes:
        peers.append(ctx.auth_context()["x509_common_name"][0].decode())
        return request.upper()

    handler = grpc.unary_unary_rpc_method_handler(answer)
    service = grpc.server(futures.ThreadPoolExecutor(1))
    service.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("fedgist", {"greet": handler}),)
    )
    inside = grpc.ssl_server_credentials(
        [(server.key, server.cert)], ROOT.cert, require_client_auth=True
    )
    port = service.add_secure_port("127.0.0.1:0", inside)
    service.start()
    outside = grpc.ssl_channel_credentials(ROOT.cert, ANNA.key, ANNA.cert)
    with grpc.secure_channel(f"127.0.0.1:{port}", outside) as channel:
        greet = channel.unary_unary("/fedgist/greet")
        if accepted:
            assert greet(b"hello", timeout=HANG_S) == b"HELLO"
        else:
            with pytest.raises(grpc.RpcError, match=r"UNAVAILABLE"):
                greet(b"hello", timeout=HANG_S)
    service.stop(None).wait()
    assert peers == ["anna"] * accepted
