"""Provisioning: make a federation's root and kits, sign requests, add sites, renew and revoke.

Each function does what one form of ``fedgist provision`` does, and returns sentences for the user.
The folder of all kits, KITS, has the parts ``authority`` (the root's key, which is in no kit),
``server``, ``administrators/NAME`` and ``sites/NAME``.

A certificate is listed in the roster before it is written, so that a revocation of a name misses
none of its certificates, even if a command was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from filelock import FileLock, Timeout
from pydantic import AfterValidator, BaseModel, Field

from fedgist.errors import InputError, KitError, OutputError, listed, one_of, shown
from fedgist.federation.keys.certificates import (
    ADMINISTRATOR,
    SERVER,
    SITE,
    Role,
    check_key,
    check_request,
    described,
    fingerprint,
    identity_of,
    issue,
    make_key,
    make_request,
    make_root,
    serial_text,
)
from fedgist.federation.keys.kits import (
    CERTIFICATE,
    FOLDER_MODE,
    FORMAT,
    KEY,
    KIT,
    REQUEST,
    ROOT,
    Address,
    FederationName,
    KitFile,
    MemberName,
    check_private,
    make_folder,
    read_about,
    read_file,
    read_table,
    split_address,
    write_kit,
)
from fedgist.federation.keys.roster import ROSTER, Roster, read_roster, write_roster
from fedgist.options import CLOSED, checked
from fedgist.runs.files import atomic_files

ALL = "all"  # of --renew
AUTHORITY, SERVER_KIT = "authority", "server"
FOLDERS: dict[Role, str] = {SITE: "sites", ADMINISTRATOR: "administrators"}
ROOT_KEY, SETTINGS, LOCK, REQUESTS = "root-key.pem", "settings.toml", "lock", "requests"
PATIENCE_S = 5.0  # another command holds the lock for less than a second

Keys = Literal["site", "central"]
Days = Annotated[int, Field(ge=1, le=3650)]


def _not_reserved(name: str) -> str:
    if name in {SERVER, ALL}:
        raise ValueError(f"must not be {SERVER!r} or {ALL!r}, which have a meaning of their own")
    return name


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"must not hold a name twice: {listed(twice)}")
    return names


NewName = Annotated[MemberName, AfterValidator(_not_reserved)]
NewNames = Annotated[tuple[NewName, ...], AfterValidator(_distinct)]


class Membership(BaseModel):
    """The content of ``federation.toml``."""

    model_config = CLOSED

    name: FederationName
    server: Address
    administrators: NewNames = ()
    sites: Annotated[NewNames, Field(min_length=1)]
    keys: Keys = "site"
    days: Days = 365


class Settings(BaseModel):
    """What the authority remembers of ``federation.toml``; members are in the roster."""

    model_config = CLOSED

    name: FederationName
    server: Address
    keys: Keys
    days: Days


@dataclass(frozen=True)
class Authority:
    """A federation's folder of kits, with the root that signs certificates."""

    out: Path
    settings: Settings
    roster: Roster
    root: bytes
    root_key: bytes = field(repr=False)

    def kit(self, role: Role, name: str) -> Path:
        """Return the folder of a kit."""
        return self.out / (SERVER_KIT if role == SERVER else f"{FOLDERS[role]}/{name}")

    @property
    def roster_file(self) -> Path:
        """The roster in the server's kit."""
        return self.out / SERVER_KIT / ROSTER

    def request(self, site: str) -> Path:
        """Return the file of a site's newest signed request."""
        return self.out / AUTHORITY / REQUESTS / f"{site}.csr"

    def role_of(self, name: str) -> Role:
        """Return the role of a member by its name."""
        if name == SERVER:
            return SERVER
        return SITE if name in self.roster.numbers else ADMINISTRATOR


def provision(path: Path, out: Path) -> list[str]:
    """Make the root and all kits of the federation that a ``federation.toml`` describes.

    The folder ``out`` appears when everything in it is complete.
    """
    federation = read_federation(path)
    _refuse_existing(out)
    part = out.resolve().with_name(f".{out.resolve().name}.{os.getpid()}")
    try:
        part.mkdir(FOLDER_MODE, parents=True)
        authority = _make_all(part, federation)
        part.replace(out.resolve())
    except OSError as error:
        _refuse_existing(out)  # another process made it meanwhile
        raise OutputError(f"{out} cannot be made: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return _made(replace(authority, out=out))


def read_federation(path: Path) -> Membership:
    """Read a ``federation.toml``; KitError if it cannot be used."""
    table = read_table(path, "`fedgist provision --help` shows an example")
    try:
        federation: Membership = checked(Membership, table)
    except InputError as error:
        raise KitError(f"{path}: {error}") from error
    if both := sorted(set(federation.sites) & set(federation.administrators)):
        raise KitError(f"{path}: administrators: {listed(both)} is also a site's name")
    return federation


def _refuse_existing(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise KitError(f"{out} is a file, not a folder")
    contents = sorted(p.name for p in out.iterdir()) if out.is_dir() else []
    if contents:
        raise KitError(
            f"{out} exists and holds {listed(contents, 6)}; name another folder, or change this "
            "federation with --add-site, --renew, --revoke or --sign"
        )
    if out.is_dir() and out.resolve() == Path.cwd():
        raise KitError(f"{out} is the current folder; name a folder to be made in it")


def _make_all(out: Path, federation: Membership) -> Authority:
    root_key, root = make_root(federation.name)
    settings = Settings(**federation.model_dump(include=set(Settings.model_fields)))
    roster = Roster(federation.name, administrators=federation.administrators)
    authority = Authority(out, settings, roster, root, root_key)
    folders = (AUTHORITY, f"{AUTHORITY}/{REQUESTS}", SERVER_KIT, *FOLDERS.values())
    for folder in folders:
        make_folder(out / folder)
    atomic_files.write(out / AUTHORITY / ROOT_KEY, root_key, private=True)
    atomic_files.write(out / AUTHORITY / ROOT, root)
    _write_settings(authority)
    authority = _make_member(authority, SERVER, SERVER)
    for name in federation.administrators:
        authority = _make_member(authority, ADMINISTRATOR, name)
    for name in federation.sites:
        authority = _make_site(authority, name)
    return authority


def _make_site(authority: Authority, name: str) -> Authority:
    """Give a site its number and its kit; with central keys, also a key and a certificate."""
    authority = replace(authority, roster=authority.roster.with_site(name))
    if authority.settings.keys == "central":
        return _make_member(authority, SITE, name)
    # the kit first: without the roster it is of no use, and the command can be repeated
    write_kit(authority.kit(SITE, name), _about(authority, SITE, name), authority.root)
    write_roster(authority.roster_file, authority.roster)
    return authority


def _make_member(authority: Authority, role: Role, name: str) -> Authority:
    """Write a kit with a new key and its certificate."""
    key = make_key()
    authority, certificate = _certified(authority, role, name, make_request(key, name))
    folder, about = authority.kit(role, name), _about(authority, role, name)
    write_roster(authority.roster_file, authority.roster)
    write_kit(folder, about, authority.root, key, certificate)
    return authority


def _certified(
    authority: Authority, role: Role, name: str, request_pem: bytes
) -> tuple[Authority, bytes]:
    """Return a new certificate, and the authority with the roster that lists it."""
    settings = authority.settings
    host = split_address(settings.server)[0] if role == SERVER else ""
    signer = (authority.root_key, authority.root)
    certificate = issue(*signer, request_pem, role, name, days=settings.days, host=host)
    serial, key = identity_of(certificate).serial, fingerprint(request_pem)
    roster = authority.roster.with_certificate(name, serial, key)
    return replace(authority, roster=roster), certificate


def _about(authority: Authority, role: Role, name: str) -> KitFile:
    settings = authority.settings
    return KitFile(
        format=FORMAT,
        role=role,
        name=name,
        federation=settings.name,
        address=settings.server,
        number=authority.roster.numbers.get(name) if role == SITE else None,
    )


def _made(authority: Authority) -> list[str]:
    """Return what was made, and who gets which folder."""
    out, settings, roster = authority.out, authority.settings, authority.roster
    central = settings.keys == "central"
    sites = f"{len(roster.numbers)} site{'s' if len(roster.numbers) > 1 else ''}"
    keys = "with keys and certificates" if central else "without keys: each site makes its own"
    return [
        (
            f"Federation {settings.name} is in {out}. Its certificates are valid for "
            f"{settings.days} days, its root for ten years."
        ),
        (
            f"{out / AUTHORITY} holds the root's key {ROOT_KEY}. Whoever has it can admit anybody. "
            "Keep this folder on the authority's machine, and make a backup."
        ),
        f"{out / SERVER_KIT} is the kit of the server at {settings.server}.",
        *(
            f"{authority.kit(ADMINISTRATOR, n)} is a kit of an administrator."
            for n in roster.administrators
        ),
        f"{out / FOLDERS[SITE]} holds the kits of {sites}, {keys}.",
        "Next: give each kit's folder to its owner, in a way that others cannot read or change.",
        *([] if central else [_ask_for_requests("each site", out)]),
    ]


def _ask_for_requests(sites: str, out: Path) -> str:
    return (
        f"Next: {sites} runs fedgist provision --request KIT on its machine and sends {REQUEST} "
        f"to the authority, who runs: {_command('--sign', REQUEST, '--out', str(out))}"
    )


def request(folder: Path) -> list[str]:
    """Make a site's key in its kit, unless it has one, and a request for a certificate."""
    about = read_about(folder)
    if about.role != SITE:
        raise KitError(
            f"{folder} is a kit of {about.role} {about.name}; only sites make their own keys, the "
            f"authority renews others with: {_command('--renew', about.name, '--out', 'KITS')}"
        )
    path = folder / KEY
    fresh = not path.exists()
    if fresh:
        atomic_files.write(path, make_key(), private=True)
    check_private(path)
    key = read_file(path, "run the command again")
    try:
        check_key(key)
    except KitError as error:
        raise KitError(f"{path}: {error}; delete it and run the command again") from error
    made = make_request(key, about.name)
    atomic_files.write(folder / REQUEST, made)
    return [
        f"Made the private key {path}. It stays on this machine: send it to nobody."
        if fresh
        else f"Kept the private key {path}.",
        f"Wrote {folder / REQUEST}, the request of site {about.name}.",
        f"SHA-256 fingerprint of its key: {fingerprint(made)}",
        (
            f"Next: send {REQUEST} to the authority of federation {about.federation}, who runs: "
            f"{_command('--sign', REQUEST, '--out', 'KITS')}. Tell the authority the fingerprint "
            f"by phone. Then put the {CERTIFICATE} that comes back into {folder}."
        ),
    ]


def sign_requests(paths: Sequence[Path], out: Path) -> list[str]:
    """Sign requests of sites, which are files or kits that hold a request."""
    sentences: list[str] = []
    with _opened(out) as opened:
        authority = opened
        files = [path / REQUEST if path.is_dir() else path for path in paths]
        requests = [_checked_request(authority, path) for path in files]
        for name, request_pem in requests:
            atomic_files.write(authority.request(name), request_pem)
            authority, path = _certify_site(authority, name, request_pem)
            sentences += [
                f"Signed the request of site {name}: {path} is {_validity(path)}.",
                f"SHA-256 fingerprint of its key: {fingerprint(request_pem)}",
                (
                    f"Next: compare the fingerprint with the site's, by phone; if they differ, "
                    f"revoke the serial. Then send {path} to {name}, who puts it into its kit."
                ),
            ]
    return sentences


def _checked_request(authority: Authority, path: Path) -> tuple[str, bytes]:
    """Return name and content of a request that may be signed."""
    content = read_file(path, "a site makes it with: fedgist provision --request KIT")
    try:
        name = check_request(content)
    except KitError as error:
        raise KitError(f"{path}: {error}; ask the site for a new one") from error
    if name not in authority.roster.numbers:
        raise KitError(
            f"{path}: the request is of {shown(name)}, which is not one of this federation's "
            f"sites: {listed(authority.roster.numbers)}"
        )
    if authority.settings.keys == "central":
        raise KitError(
            f"{path}: the keys of this federation are made centrally; renew a site with: "
            + _command("--renew", name, "--out", str(authority.out))
        )
    _refuse_revoked_key(authority, name, content)
    return name, content


def _refuse_revoked_key(authority: Authority, name: str, request_pem: bytes) -> None:
    if authority.roster.is_key_revoked(name, fingerprint(request_pem)):
        raise KitError(
            f"all certificates of {name}'s key are revoked; to admit {name} again, the site "
            f"deletes {KEY} in its kit and makes a new key with: fedgist provision --request KIT"
        )


def _certify_site(authority: Authority, name: str, request_pem: bytes) -> tuple[Authority, Path]:
    """Write a certificate for the key of a site's request."""
    authority, certificate = _certified(authority, SITE, name, request_pem)
    folder, about = authority.kit(SITE, name), _about(authority, SITE, name)
    write_roster(authority.roster_file, authority.roster)
    write_kit(folder, about, authority.root, certificate=certificate)
    return authority, folder / CERTIFICATE


def add_site(name: str, out: Path) -> list[str]:
    """Add a site, which gets the next number and a kit."""
    checked(NewName, name, "--add-site")
    with _opened(out) as opened:
        authority = _make_site(opened, name)
    folder, number = authority.kit(SITE, name), authority.roster.numbers[name]
    central = authority.settings.keys == "central"
    keys = f"its certificate is {_validity(folder / CERTIFICATE)}" if central else "it has no key"
    return [
        f"Added site {name} with the number {number}. Its kit is {folder}; {keys}.",
        _copy_roster(authority, "and admits the site"),
        f"Next: give {folder} to {name}, in a way that others cannot read or change.",
        *([] if central else [_ask_for_requests(name, out)]),
    ]


def renew(names: Sequence[str], out: Path, address: str | None = None) -> list[str]:
    """Make new certificates for members; with an address, also a new address of the server."""
    if address is not None:
        checked(Address, address, "--address")
        if SERVER not in names and ALL not in names:
            raise KitError("--address needs --renew server: its certificate names the address")
    sentences: list[str] = []
    with _opened(out) as opened:
        authority = opened
        plan, left_out = _planned(authority, names)
        if address is not None:
            authority = _with_address(authority, address)
            sentences += [
                f"The server's address is now {address}.",
                f"Next: send the new {KIT} to every site and administrator; it names the address.",
            ]
        for role, name, request_pem in plan:
            authority, lines = _renewed(authority, role, name, request_pem)
            sentences += lines
    return sentences + left_out


def _planned(
    authority: Authority, names: Sequence[str]
) -> tuple[list[tuple[Role, str, bytes | None]], list[str]]:
    """Return whom to renew, with the requests of site-made keys, and why others are left out."""
    roster = authority.roster
    everybody = (SERVER, *roster.administrators, *roster.numbers)
    for name in names:
        one_of(name, (*everybody, ALL), "member of the federation")
    plan: list[tuple[Role, str, bytes | None]] = []
    left_out = []
    for name in everybody if ALL in names else dict.fromkeys(names):
        role = authority.role_of(name)
        if ALL in names and roster.is_revoked(name):
            left_out.append(f"Not renewed: {name} is revoked; to admit it again, name it.")
            continue
        try:
            plan.append((role, name, _stored_request(authority, role, name)))
        except KitError as error:
            if ALL not in names:
                raise
            left_out.append(f"Not renewed: {error}.")
    return plan, left_out


def _stored_request(authority: Authority, role: Role, name: str) -> bytes | None:
    """Return the signed request of a site that makes its own key, and None for others."""
    if role != SITE or authority.settings.keys == "central":
        return None
    path = authority.request(name)
    if not path.exists():
        raise KitError(
            f"site {name} has no certificate yet: it runs fedgist provision --request KIT, and the "
            f"authority signs its {REQUEST} with --sign"
        )
    content = read_file(path, "ask the site for a new one")
    _refuse_revoked_key(authority, name, content)
    return content


def _renewed(
    authority: Authority, role: Role, name: str, request_pem: bytes | None
) -> tuple[Authority, list[str]]:
    """Renew a certificate: for the key of the request, or for a new key."""
    if request_pem is None:
        authority = _make_member(authority, role, name)
        path = authority.kit(role, name) / CERTIFICATE
        files, keys = f"{KEY} and {CERTIFICATE}", "with a new key"
    else:
        authority, path = _certify_site(authority, name, request_pem)
        files, keys = CERTIFICATE, "for the same key"
    member = described(identity_of(read_file(path, "run the command again")))
    return authority, [
        f"Renewed the certificate of {member} {keys}: {path} is {_validity(path)}.",
        f"Next: put {files} of {path.parent} into the kit of {member}, and start it again.",
    ]


def _with_address(authority: Authority, address: str) -> Authority:
    """Write a new address of the server into the settings and into every kit."""
    settings = authority.settings.model_copy(update={"server": address})
    authority = replace(authority, settings=settings)
    _write_settings(authority)
    for name in (SERVER, *authority.roster.administrators, *authority.roster.numbers):
        role = authority.role_of(name)
        write_kit(authority.kit(role, name), _about(authority, role, name), authority.root)
    return authority


def revoke(name_or_serial: str, out: Path) -> list[str]:
    """Revoke all certificates of a site or an administrator, or one certificate by its serial."""
    with _opened(out) as authority:
        roster = authority.roster
        name, serials = _to_revoke(roster, name_or_serial)
        if name == SERVER:
            raise KitError(
                "a server's certificate cannot be revoked, because sites do not read the roster; "
                "if the server's key was stolen, make a new federation"
            )
        revoked = roster.with_revoked(serials)
        write_roster(authority.roster_file, revoked)
    left = set(revoked.serials[name]) - revoked.revoked
    new = len(revoked.revoked) - len(roster.revoked)
    return [
        f"Revoked {new} certificate{'' if new == 1 else 's'} of {name}: "
        f"{', '.join(map(serial_text, serials))}."
        if new
        else f"Nothing changed: {name_or_serial} was revoked before.",
        f"{name} still has {len(left)} valid certificate{'' if len(left) == 1 else 's'}."
        if left
        else f"{name} has no valid certificate any more.",
        _copy_roster(authority, f"and refuses what was revoked of {name}"),
    ]


def _to_revoke(roster: Roster, text: str) -> tuple[str, tuple[int, ...]]:
    """Return a name and the serials of its certificates that a user means."""
    if text in {SERVER, *roster.numbers, *roster.administrators}:
        if not roster.serials.get(text):
            raise KitError(f"{text} has no certificate that could be revoked: none was signed")
        return text, roster.serials[text]
    if re.fullmatch(r"(0x)?[0-9A-Fa-f]+", text.replace(":", "")):
        serial = int(text.replace(":", ""), 16)
        for name, serials in roster.serials.items():
            if serial in serials:
                return name, (serial,)
    members = listed([*roster.administrators, *roster.numbers])
    raise KitError(
        f"--revoke {shown(text)} is neither a member nor the serial of a certificate; members: "
        f"{members}; serials are in {ROSTER}"
    )


@contextlib.contextmanager
def _opened(out: Path) -> Iterator[Authority]:
    """Yield the federation in a folder, for this process alone."""
    folder = out / AUTHORITY
    if not folder.is_dir():
        raise KitError(
            f"{out} holds no authority of a federation; make one with: "
            + _command("federation.toml", "--out", str(out))
        )
    lock = FileLock(folder / LOCK, timeout=PATIENCE_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise KitError(f"another fedgist provision is changing {out}; try again") from error
    try:
        yield _read_authority(out)
    finally:
        lock.release()


def _read_authority(out: Path) -> Authority:
    folder, backup = out / AUTHORITY, "restore it from a backup"
    path = folder / SETTINGS
    try:
        settings: Settings = checked(Settings, read_table(path, backup))
    except KitError:
        raise
    except InputError as error:
        raise KitError(f"{path}: {error}; {backup}") from error
    roster = read_roster(out / SERVER_KIT / ROSTER)
    check_private(folder / ROOT_KEY)
    root, root_key = (read_file(folder / file, backup) for file in (ROOT, ROOT_KEY))
    return Authority(out, settings, roster, root, root_key)


def _write_settings(authority: Authority) -> None:
    text = tomli_w.dumps(authority.settings.model_dump())
    atomic_files.write(authority.out / AUTHORITY / SETTINGS, text)


def _validity(path: Path) -> str:
    identity = identity_of(read_file(path, "run the command again"))
    return f"valid until {identity.not_after:%Y-%m-%d} (serial {serial_text(identity.serial)})"


def _copy_roster(authority: Authority, effect: str) -> str:
    return (
        f"Next: copy {authority.roster_file} into the server's kit. A running server reads it "
        f"again {effect}."
    )


def _command(*words: str) -> str:
    return shlex.join(["fedgist", "provision", *words])
