"""Keys, certificates and their checks, as functions on PEM bytes.

Everything cryptographic is done by the package ``cryptography``: keys are EC P-256, signatures are
ECDSA with SHA-256. A federation has one root. The root signs the certificates of the server, the
sites and the administrators, and no other certificate can sign another.

A certificate names its role in a URI, such as ``urn:fedgist:site:berlin``. Only a server's
certificate has the extended key usage ``serverAuth``, so TLS itself refuses a site that pretends
to be the server.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fedgist.errors import KitError, shown

Role = Literal["server", "site", "administrator"]
SERVER: Role = "server"  # its role, and its name
SITE: Role = "site"
ADMINISTRATOR: Role = "administrator"
ROLES: tuple[Role, ...] = get_args(Role)

URN = "urn:fedgist:"
ROOT_LIFE = timedelta(days=3650)
CLOCK_SKEW = timedelta(minutes=5)  # clocks of two machines may differ by this much
NOTICE = timedelta(days=30)  # how long before its end a certificate is to be renewed
LOCALHOST = "localhost"
LOOPBACK = "127.0.0.1"
USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)

# what cryptography raises for damaged or foreign files
_BROKEN = (
    *(ValueError, TypeError, OverflowError, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.ExtensionNotFound),
    *(x509.UnsupportedGeneralNameType, x509.AttributeNotFound),
)


@dataclass(frozen=True)
class Identity:
    """Whom a certificate names; ``not_after`` has a time zone."""

    role: Role
    name: str
    serial: int
    not_after: datetime


def make_root(federation: str, now: datetime | None = None) -> tuple[bytes, bytes]:
    """Return the key and the certificate of a federation's root; it is valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject, start = _name(f"fedgist federation {federation}"), _time(now)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(start - CLOCK_SKEW)
        .not_valid_after(start + ROOT_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _pem(key), certificate.sign(key, hashes.SHA256()).public_bytes(_PEM)


def make_key() -> bytes:
    """Return a new private key."""
    return _pem(ec.generate_private_key(ec.SECP256R1()))


def make_request(key_pem: bytes, name: str) -> bytes:
    """Return a request for a certificate that names ``name``, signed with the key."""
    builder = x509.CertificateSigningRequestBuilder(_name(name))
    return builder.sign(_private(key_pem), hashes.SHA256()).public_bytes(_PEM)


def check_request(request_pem: bytes) -> str:
    """Return the name in a request.

    Raises
    ------
    KitError
        If the request is damaged, its key is not EC P-256, or its signature is not by its key.
    """
    request = _request(request_pem)
    with _reading("the request"):
        _check_curve(request.public_key(), "the request's key")
        if not request.is_signature_valid:
            raise KitError("the request's signature is not by its own key: it was changed")
        return _common_name(request.subject)


def issue(
    root_key: bytes,
    root_pem: bytes,
    request_pem: bytes,
    role: Role,
    name: str,
    *,
    days: int,
    host: str = "",
    now: datetime | None = None,
) -> bytes:
    """Return a certificate for the key of a request, signed by the root.

    ``host`` is the DNS name or IP address under which sites reach a server. The certificate is
    valid for ``days``, but not longer than the root.

    Raises
    ------
    KitError
        If the request or the root cannot be used, or the request is of another name.
    """
    if (requested := check_request(request_pem)) != name:
        raise KitError(f"the request is of {shown(requested)}, not of {shown(name)}")
    if (role == SERVER) != bool(host):
        raise KitError("a certificate names a host exactly if it is a server's")
    root, signer, start = _certificate(root_pem), _private(root_key), _time(now)
    if root.public_key() != signer.public_key():
        raise KitError("the root's key does not belong to the root's certificate")
    if start >= root.not_valid_after_utc:
        raise KitError(f"the root's certificate ended on {_day(root.not_valid_after_utc)}")
    key = _check_curve(_request(request_pem).public_key(), "the request's key")
    builder = (
        x509.CertificateBuilder(root.subject, _name(name), key, x509.random_serial_number())
        .not_valid_before(max(start - CLOCK_SKEW, root.not_valid_before_utc))
        .not_valid_after(min(start + timedelta(days=days), root.not_valid_after_utc))
    )
    for extension, critical in _leaf_extensions(root, key, role, name, host):
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA256()).public_bytes(_PEM)


def _leaf_extensions(
    root: x509.Certificate,
    key: ec.EllipticCurvePublicKey,
    role: Role,
    name: str,
    host: str,
) -> Iterator[tuple[x509.ExtensionType, bool]]:
    """Yield the extensions of a certificate that signs no others, and whether each is critical."""
    own = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    names = [x509.UniformResourceIdentifier(_urn(role, name)), *_hosts(host)]
    yield x509.BasicConstraints(ca=False, path_length=None), True
    yield _usage("digital_signature"), True
    yield x509.ExtendedKeyUsage([_purpose(role)]), False
    yield x509.SubjectAlternativeName(names), False
    yield x509.SubjectKeyIdentifier.from_public_key(key), False
    yield x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), False


def identity_of(cert_pem: bytes) -> Identity:
    """Return whom a certificate names. Who signed it is not checked.

    Raises
    ------
    KitError
        If the PEM is damaged, or the certificate was not made by fedgist.
    """
    certificate = _certificate(cert_pem)
    with _reading("the certificate"):
        role, name = _role_and_name(certificate)
        ends = certificate.not_valid_after_utc
        return Identity(role, name, certificate.serial_number, ends)


def _role_and_name(certificate: x509.Certificate) -> tuple[Role, str]:
    extensions = certificate.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    common = _common_name(certificate.subject)
    for role in ROLES:
        if uris == [_urn(role, common)] and (role != SERVER or common == SERVER):
            uses = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            if list(uses) != [_purpose(role)]:
                raise KitError(f"the certificate's key usage is not that of a {role}")
            return role, common
    raise KitError("the certificate names no role in a federation")


def check_server(cert_pem: bytes, root_pem: bytes, host: str, now: datetime | None = None) -> None:
    """Check that a certificate is a server's, for ``host``, valid now and signed by this root.

    Raises
    ------
    KitError
        If it is not; the message says why.
    """
    identity = _check_leaf(cert_pem, root_pem, now)
    if identity.role != SERVER:
        raise KitError(f"the certificate is of {described(identity)}, not of a server")
    certificate = _certificate(cert_pem)
    with _reading(f"the host {shown(host)}"):
        subject = _general_name(host)
    with _reading("the certificate"):
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if subject not in names:
            raise KitError(
                f"the server's certificate is not for the host {shown(host)}, but for "
                + ", ".join(_texts(names))
            )
    with _reading("the certificate"):
        _policy(root_pem, now).build_server_verifier(subject).verify(certificate, [])


def check_client(cert_pem: bytes, root_pem: bytes, now: datetime | None = None) -> Identity:
    """Return whom a certificate names: a site or an administrator, valid now, of this root.

    Raises
    ------
    KitError
        If it is another certificate; the message says why.
    """
    identity = _check_leaf(cert_pem, root_pem, now)
    if identity.role == SERVER:
        raise KitError("the certificate is of the server, not of a site or an administrator")
    with _reading("the certificate"):
        _policy(root_pem, now).build_client_verifier().verify(_certificate(cert_pem), [])
    return identity


def _check_leaf(cert_pem: bytes, root_pem: bytes, now: datetime | None) -> Identity:
    """Check root, issuer and dates with messages of their own; the verifier repeats this."""
    certificate, root, time = _certificate(cert_pem), _certificate(root_pem, "root"), _time(now)
    with _reading("the certificate"):
        try:
            certificate.verify_directly_issued_by(root)
        except (InvalidSignature, *_BROKEN) as error:
            raise KitError("the certificate was not signed by this federation's root") from error
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if time > ends:
            raise KitError(f"the certificate expired on {_day(ends)}")
        if time < begins:
            raise KitError(
                f"the certificate is valid from {begins:%Y-%m-%d %H:%M} UTC: is the clock right?"
            )
    return identity_of(cert_pem)


def _policy(root_pem: bytes, now: datetime | None) -> PolicyBuilder:
    return PolicyBuilder().store(Store([_certificate(root_pem, "root")])).time(_time(now))


def check_key(key_pem: bytes, cert_pem: bytes | None = None) -> None:
    """Check that a private key is EC P-256, and that it belongs to a certificate if one is given.

    Raises
    ------
    KitError
        If it is not, or does not.
    """
    key = _private(key_pem)
    if cert_pem is None:
        return
    with _reading("the certificate"):
        if _certificate(cert_pem).public_key() != key.public_key():
            raise KitError("the key does not belong to the certificate")


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 digest of the public key in a certificate or a request, in hex."""
    with _reading("the request or certificate"):
        holder = _request(pem) if b"REQUEST" in pem else _certificate(pem)
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        digest = hashes.Hash(hashes.SHA256())
        digest.update(holder.public_key().public_bytes(serialization.Encoding.DER, form))
        return digest.finalize().hex()


def sign(key_pem: bytes, data: bytes) -> bytes:
    """Return the signature of ``data``: ECDSA with SHA-256."""
    return _private(key_pem).sign(data, _ECDSA)


def is_signed(cert_pem: bytes, data: bytes, signature: bytes) -> bool:
    """Return whether ``signature`` is that of ``data`` by the certificate's key."""
    with _reading("the certificate"):
        key = _check_curve(_certificate(cert_pem).public_key(), "the certificate's key")
    try:
        key.verify(signature, data, _ECDSA)
    except InvalidSignature:
        return False
    return True


def expiry_note(cert_pem: bytes, now: datetime | None = None) -> str | None:
    """Return a sentence if a certificate ends within 30 days or has ended, else None."""
    identity, time = identity_of(cert_pem), _time(now)
    subject = f"The certificate of {described(identity)}"
    renew = f"The authority renews it with: fedgist provision --renew {identity.name} --out KITS"
    if time > identity.not_after:
        return f"{subject} expired on {_day(identity.not_after)}. {renew}"
    if (left := identity.not_after - time) <= NOTICE:
        days = f"{left.days} day{'' if left.days == 1 else 's'}"
        return f"{subject} expires on {_day(identity.not_after)}, in {days}. {renew}"
    return None


def described(identity: Identity) -> str:
    """Return an identity for a message: "the server", "site berlin" or "administrator anna"."""
    return "the server" if identity.role == SERVER else f"{identity.role} {identity.name}"


def serial_text(serial: int) -> str:
    """Return a serial number as messages, rosters and ``--revoke`` write it: in hex."""
    return f"{serial:x}"


_PEM = serialization.Encoding.PEM
_ECDSA = ec.ECDSA(hashes.SHA256())


@contextlib.contextmanager
def _reading(subject: str) -> Iterator[None]:
    """Inside this context, an error of cryptography's is a KitError about ``subject``."""
    try:
        yield
    except KitError:
        raise
    except VerificationError as error:
        reason = str(error).partition(" (encountered")[0].removeprefix("validation failed: ")
        raise KitError(f"{subject} is refused: {reason}") from error
    except _BROKEN as error:
        raise KitError(f"{subject} is damaged or has an unknown form") from error


def _certificate(pem: bytes, kind: str = "certificate") -> x509.Certificate:
    """Return the only certificate in a PEM file: TLS would trust each root of a file."""
    with _reading(f"the {kind}'s file" if kind == "root" else "the certificate"):
        certificates = x509.load_pem_x509_certificates(pem)
    if len(certificates) != 1:
        raise KitError(f"the {kind}'s file holds {len(certificates)} certificates instead of one")
    if certificates[0].serial_number <= 0:
        raise KitError(f"the {kind}'s serial number is not positive")
    return certificates[0]


def _request(pem: bytes) -> x509.CertificateSigningRequest:
    with _reading("the request"):
        return x509.load_pem_x509_csr(pem)


def _private(pem: bytes) -> ec.EllipticCurvePrivateKey:
    with _reading("the private key"):
        key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != ec.SECP256R1.name:
        raise KitError("the private key is not an EC P-256 key")
    return key


def _check_curve(key: object, subject: str) -> ec.EllipticCurvePublicKey:
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != ec.SECP256R1.name:
        raise KitError(f"{subject} is not an EC P-256 key")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _common_name(name: x509.Name) -> str:
    """Return the common name, which must be the only part of a name."""
    parts = list(name)
    if len(parts) != 1 or parts[0].oid != NameOID.COMMON_NAME:
        raise KitError("its subject is not a common name alone")
    return str(parts[0].value)


def _urn(role: Role, name: str) -> str:
    return f"{URN}{role}" if role == SERVER else f"{URN}{role}:{name}"


def _purpose(role: Role) -> x509.ObjectIdentifier:
    return ExtendedKeyUsageOID.SERVER_AUTH if role == SERVER else ExtendedKeyUsageOID.CLIENT_AUTH


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in allowed for usage in USAGES})


def _hosts(host: str) -> list[x509.GeneralName]:
    """Return the names of a server's host: a local host has all of its usual names."""
    if not host:
        return []
    first = _general_name(host)
    address = isinstance(first, x509.IPAddress) and first.value
    local = host == LOCALHOST or getattr(address, "is_loopback", False)
    usual = [_general_name(LOCALHOST), _general_name(LOOPBACK)] if local else []
    return [first, *(name for name in usual if name != first)]


def _general_name(host: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host.lower())


def _texts(names: x509.SubjectAlternativeName) -> list[str]:
    kinds = (x509.DNSName, x509.IPAddress)
    return [shown(str(name.value)) for name in names if isinstance(name, kinds)]


def _time(now: datetime | None) -> datetime:
    """Return a time in whole seconds, as certificates hold it."""
    return (now or datetime.now(UTC)).astimezone(UTC).replace(microsecond=0)


def _day(time: datetime) -> str:
    return f"{time:%Y-%m-%d}"
