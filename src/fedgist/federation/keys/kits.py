"""Kits: the folders with which the server, a site or an administrator takes part in a federation.

A kit holds ``kit.toml`` (whose kit it is, and the server's address), ``root.pem`` (the federation's
root), ``key.pem`` (a private key, mode 0600) and ``certificate.pem``. A site that makes its own key
also has ``request.csr``, and its certificate arrives later.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import stat
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel

from fedgist.core.bounds import NonNegativeInt
from fedgist.errors import InputError, KitError, first_line, shown
from fedgist.federation.keys.certificates import (
    SERVER,
    SITE,
    Identity,
    Role,
    check_client,
    check_key,
    check_server,
    described,
    identity_of,
)
from fedgist.options import CLOSED, checked
from fedgist.runs.files import atomic_files

KIT, ROOT, KEY, CERTIFICATE = "kit.toml", "root.pem", "key.pem", "certificate.pem"
REQUEST = "request.csr"
FORMAT: Literal[1] = 1
FOLDER_MODE = 0o700
LARGEST = 1 << 20  # bytes of a file in a kit; real files have some hundred
LONGEST_NAME, LONGEST_HOST, HIGHEST_PORT = 40, 253, 2**16 - 1
COMMENT = "# A kit of a fedgist federation, made by fedgist provision\n"


def _member_name(name: str) -> str:
    if not re.fullmatch(rf"[a-z0-9][a-z0-9-]{{0,{LONGEST_NAME - 1}}}", name):
        raise ValueError(
            f"must be at most {LONGEST_NAME} lower-case letters, digits and hyphens, "
            "and begin with a letter or a digit"
        )
    return name


def _federation_name(name: str) -> str:
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9-]{{0,{LONGEST_NAME - 1}}}", name):
        raise ValueError(
            f"must be at most {LONGEST_NAME} letters, digits and hyphens, "
            "and begin with a letter or a digit"
        )
    return name


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address; the host is in lower case and without brackets.

    Raises
    ------
    ValueError
        If it is no address that sites can dial.

    >>> split_address("fed.example.org:8443"), split_address("[::1]:8443")
    (('fed.example.org', 8443), ('::1', 8443))
    """
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z.-]+):([0-9]{1,5})", address)
    if not match or not 0 < int(match[2]) <= HIGHEST_PORT:
        raise ValueError(
            "must be the host and the port that sites dial, such as fed.example.org:8443, "
            "192.0.2.7:8443 or [2001:db8::7]:8443"
        )
    return _host(match[1].lower()), int(match[2])


def _host(host: str) -> str:
    if host.startswith("[") or re.fullmatch(r"[0-9.]+", host):
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError as error:
            raise ValueError(f"has the host {host}, which is no IP address") from error
        if address.is_unspecified:
            raise ValueError(f"has the host {host}, which sites cannot dial: name a real address")
        return str(address)
    label = r"[0-9a-z]([0-9a-z-]{0,61}[0-9a-z])?"
    if len(host) > LONGEST_HOST or not re.fullmatch(rf"{label}(\.{label})*", host):
        raise ValueError(f"has the host {host}, which is no DNS name")
    return host


def _address(address: str) -> str:
    split_address(address)
    return address


MemberName = Annotated[str, AfterValidator(_member_name)]
FederationName = Annotated[str, AfterValidator(_federation_name)]
Address = Annotated[str, AfterValidator(_address)]


class KitFile(BaseModel):
    """The content of ``kit.toml``; a site's has its number in the federation."""

    model_config = CLOSED

    format: Literal[1]
    role: Role
    name: MemberName
    federation: FederationName
    address: Address
    number: NonNegativeInt | None = None


@dataclass(frozen=True)
class Kit:
    """A checked kit: root, certificate and key are PEM bytes that belong together."""

    folder: Path
    role: Role
    name: str
    federation: str
    address: str
    root: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    number: int | None = None


def read_kit(folder: Path, now: datetime | None = None) -> Kit:
    """Read a kit and check it.

    Raises
    ------
    KitError
        If a file is missing or damaged, others can read the key, the key and the certificate do not
        belong together, or the certificate is expired, of another root, role or name.
    """
    about = read_about(folder)
    root = read_file(folder / ROOT, "ask the authority of the federation for it")
    key_path, path = folder / KEY, folder / CERTIFICATE
    key = read_file(key_path, _remedy_of_key(about, folder))
    check_private(key_path)
    certificate = read_file(path, _remedy_of_certificate(about))
    renewal = f"the authority makes a new one with: {renew_command(about.name)}"
    identity = _named(path, certificate, about, renewal)
    try:
        check_key(key)
    except KitError as error:
        raise KitError(f"{key_path}: {error}; {_remedy_of_key(about, folder)}") from error
    try:
        check_key(key, certificate)
    except KitError as error:
        raise KitError(f"{key_path}: {error} in {path}; {_remedy_of_pair(about)}") from error
    if (now or datetime.now(UTC)) > identity.not_after:
        ended = f"the certificate expired on {identity.not_after:%Y-%m-%d}"
        raise KitError(f"{path}: {ended}; {renewal}")
    _check_chain(folder, certificate, root, about, now)
    names = about.role, about.name, about.federation, about.address
    return Kit(folder, *names, root, certificate, key, about.number)


def _named(path: Path, certificate: bytes, about: KitFile, remedy: str) -> Identity:
    """Return whom a kit's certificate names, which must be whom ``kit.toml`` names."""
    try:
        identity = identity_of(certificate)
    except KitError as error:
        raise KitError(f"{path}: {error}; {remedy}") from error
    if (identity.role, identity.name) != (about.role, about.name):
        raise KitError(
            f"{path}: the certificate is of {described(identity)}, but {KIT} is of "
            f"{about.role} {about.name}; put the certificate of {about.role} {about.name} here"
        )
    return identity


def _check_chain(
    folder: Path, certificate: bytes, root: bytes, about: KitFile, now: datetime | None
) -> None:
    try:
        if about.role == SERVER:
            check_server(certificate, root, split_address(about.address)[0], now)
        else:
            check_client(certificate, root, now)
    except KitError as error:
        raise KitError(
            f"{folder / CERTIFICATE}: {error}; compare it with {ROOT} and {KIT}, which must be of "
            "the same federation, or ask the authority for a new kit"
        ) from error


def read_about(folder: Path) -> KitFile:
    """Return the content of a kit's ``kit.toml``; KitError if it cannot be used."""
    if not folder.is_dir():
        raise KitError(
            f"{folder}: there is no such folder; the authority makes kits with: "
            "fedgist provision federation.toml --out KITS"
        )
    path = folder / KIT
    table = read_table(path, "a kit's folder holds it: name such a folder")
    try:
        about: KitFile = checked(KitFile, table)
    except InputError as error:
        raise KitError(f"{path}: {error}; ask the authority for a new {KIT}") from error
    if (about.role == SERVER) != (about.name == SERVER):
        raise KitError(f"{path}: name = {shown(about.name)}: only the server is named {SERVER!r}")
    return about


def write_kit(
    folder: Path, about: KitFile, root: bytes, key: bytes = b"", certificate: bytes = b""
) -> None:
    """Write a kit's files, with modes that keep others out; omitted files are left as they are."""
    make_folder(folder)
    atomic_files.write(folder / KIT, COMMENT + tomli_w.dumps(about.model_dump(exclude_none=True)))
    atomic_files.write(folder / ROOT, root)
    if key:
        atomic_files.write(folder / KEY, key, private=True)
    if certificate:
        atomic_files.write(folder / CERTIFICATE, certificate)


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter; an existing folder is left as it is."""
    folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)


def read_table(path: Path, remedy: str) -> dict[str, object]:
    """Return the table in a TOML file; KitError if the file is missing or damaged."""
    blob = read_file(path, remedy)
    try:
        return tomllib.loads(blob.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise KitError(f"{path}: {first_line(error)}") from error


def read_file(path: Path, remedy: str) -> bytes:
    """Return the content of a small file; KitError with a remedy if it is missing."""
    try:
        if not path.exists():
            raise KitError(f"{path} is missing; {remedy}")
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise KitError(f"{path} is no file of a federation; {remedy}")
        return path.read_bytes()
    except OSError as error:
        raise KitError(f"{path} cannot be read: {error.strerror}") from error


def renew_command(name: str) -> str:
    """Return the command with which the authority renews a certificate."""
    return f"fedgist provision --renew {name} --out KITS"


def check_private(path: Path) -> None:
    """Check that nobody but its owner may read a key; Windows has no such modes."""
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise KitError(f"{path} can be read by others: chmod 600 {shlex.quote(str(path))}")


def _remedy_of_key(about: KitFile, folder: Path) -> str:
    if about.role == SITE:
        request = shlex.join(["fedgist", "provision", "--request", str(folder)])
        return f"make a key with: {request} (or copy the key of the authority, if it made one)"
    return f"the authority makes a new key with: {renew_command(about.name)}"


def _remedy_of_certificate(about: KitFile) -> str:
    if about.role == SITE:
        return (
            f"ask the authority to sign {REQUEST} with: fedgist provision --sign {REQUEST} "
            f"--out KITS, and put the {CERTIFICATE} that this makes here"
        )
    return f"the authority makes a new one with: {renew_command(about.name)}"


def _remedy_of_pair(about: KitFile) -> str:
    if about.role == SITE:
        return f"ask the authority to sign {REQUEST} of this kit"
    return f"copy both from the same kit, or let the authority run: {renew_command(about.name)}"
