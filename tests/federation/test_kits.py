"""Kits and rosters: what is read, and how each problem of a file is told with its remedy."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fedgist.errors import KitError
from fedgist.federation.keys import certificates, provision
from fedgist.federation.keys.certificates import Identity, Role
from fedgist.federation.keys.kits import read_kit, split_address
from fedgist.federation.keys.roster import Roster, read_roster, write_roster
from fedgist.federation.site.file import read_site_file

SEPSIS = """
name = "sepsis"
server = "localhost:8443"
administrators = ["anna"]
sites = ["berlin", "ulm"]
keys = "central"
"""
ROLES: dict[str, tuple[Role, str]] = {
    "server": ("server", "server"),
    "administrators/anna": ("administrator", "anna"),
    "sites/berlin": ("site", "berlin"),
}


def provisioned(folder: Path, text: str = SEPSIS, encoding: str = "utf-8") -> Path:
    (folder / "federation.toml").write_text(text, encoding)
    provision.provision(folder / "federation.toml", folder / "kits")
    return folder / "kits"


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    return provisioned(tmp_path)


@pytest.mark.parametrize("place", ROLES)
def test_a_kit_is_read(kits: Path, place: str) -> None:
    kit = read_kit(kits / place)
    assert (kit.role, kit.name) == ROLES[place]
    assert (kit.federation, kit.address) == ("sepsis", "localhost:8443")
    assert kit.folder == kits / place
    assert kit.root == (kits / "authority/root.pem").read_bytes()
    certificates.check_key(kit.key, kit.certificate)
    assert "PRIVATE" not in repr(kit)
    assert {field.name for field in dataclasses.fields(kit) if not field.repr} == {"key"}


def without(name: str) -> Callable[[Path, Path], object]:
    return lambda kit, other: (kit / name).unlink()


def of_the_other(name: str) -> Callable[[Path, Path], object]:
    return lambda kit, other: (kit / name).write_bytes((other / name).read_bytes())


def damaged(name: str) -> Callable[[Path, Path], object]:
    return lambda kit, other: (kit / name).write_bytes((kit / name).read_bytes()[:60])


def stated(**values: object) -> Callable[[Path, Path], None]:
    def change(kit: Path, other: Path) -> None:
        table = tomllib.loads((kit / "kit.toml").read_text()) | values
        (kit / "kit.toml").write_text(tomli_w.dumps(table))

    return change


def readable_by_others(kit: Path, other: Path) -> None:
    (kit / "key.pem").chmod(0o640)


SITE, OTHER = "sites/berlin", "sites/ulm"
PROBLEMS = [
    (SITE, without("kit.toml"), "kit.toml is missing; a kit's folder holds it"),
    (SITE, without("root.pem"), "root.pem is missing; ask the authority"),
    (SITE, without("key.pem"), "key.pem is missing; make a key with: fedgist provision --request"),
    ("server", without("key.pem"), "the authority makes a new key with: fedgist provision --renew"),
    (SITE, without("certificate.pem"), "certificate.pem is missing; ask the authority to sign"),
    ("server", without("certificate.pem"), "--renew server --out KITS"),
    (SITE, readable_by_others, "key.pem can be read by others: chmod 600 "),
    (SITE, of_the_other("key.pem"), "key.pem: the key does not belong to the certificate in "),
    ("server", of_the_other("key.pem"), "or let the authority run: fedgist provision --renew"),
    (SITE, of_the_other("certificate.pem"), "is of site ulm, but kit.toml is of site berlin"),
    ("server", of_the_other("certificate.pem"), "is of site ulm, but kit.toml is of server"),
    (SITE, damaged("key.pem"), "key.pem: the private key is damaged"),
    (SITE, damaged("certificate.pem"), "certificate.pem: the certificate is damaged"),
    (SITE, damaged("root.pem"), "certificate.pem: the root's file is damaged"),
    (SITE, damaged("kit.toml"), "kit.toml: "),
    (SITE, stated(format=2), "kit.toml: format = 2: must be 1"),
    (SITE, stated(role="client"), "role = 'client': must be 'server', 'site' or 'administrator'"),
    (SITE, stated(name="Berlin"), "name = 'Berlin': must be at most 40 lower-case letters"),
    (SITE, stated(name="server"), "name = 'server': only the server is named 'server'"),
    (SITE, stated(address="localhost"), "address = 'localhost': must be the host and the port"),
    (SITE, stated(adress="a:1"), "adress: unknown key; did you mean 'address'?"),
    ("server", stated(address="fed.example.org:1"), "not for the host 'fed.example.org', but for"),
]


@pytest.mark.parametrize(("place", "change", "says"), PROBLEMS, ids=[p[2][:40] for p in PROBLEMS])
def test_a_problem_is_one_line_with_the_file_and_the_remedy(
    kits: Path, place: str, change: Callable[[Path, Path], object], says: str
) -> None:
    change(kits / place, kits / OTHER)
    with pytest.raises(KitError) as error:
        read_kit(kits / place)
    assert says in str(error.value)
    assert str(kits / place) in str(error.value)
    assert "\n" not in str(error.value)
    assert "PRIVATE" not in str(error.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="there is no such folder; the authority makes kits with"):
        read_kit(tmp_path / "nowhere")


def test_a_kit_of_another_federation_of_the_same_name(kits: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = provisioned(tmp_path / "b")
    of_the_other("root.pem")(kits / SITE, other / SITE)
    with pytest.raises(KitError, match=r"was not signed by this federation's root; compare it"):
        read_kit(kits / SITE)


def test_an_expired_certificate_names_its_renewal(kits: Path) -> None:
    end = certificates.identity_of((kits / SITE / "certificate.pem").read_bytes()).not_after
    read_kit(kits / SITE, now=end)
    with pytest.raises(KitError, match=f"expired on {end:%Y-%m-%d}; .*--renew berlin"):
        read_kit(kits / SITE, now=end + timedelta(seconds=1))
    with pytest.raises(KitError, match="is the clock right"):
        read_kit(kits / SITE, now=datetime(2020, 1, 1, tzinfo=UTC))


def test_a_file_that_cannot_be_read_is_a_kit_error(kits: Path) -> None:
    (kits / SITE / "root.pem").unlink()
    (kits / SITE / "root.pem").mkdir()
    with pytest.raises(KitError, match=r"root.pem is no file of a federation"):
        read_kit(kits / SITE)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("fed.example.org:8443", "fed.example.org", 8443),
        ("FED.Example.org:1", "fed.example.org", 1),
        ("192.0.2.7:65535", "192.0.2.7", 65535),
        ("[2001:DB8:0::7]:8443", "2001:db8::7", 8443),
        ("localhost:80", "localhost", 80),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        *("fed.example.org", "fed.example.org:0", "fed.example.org:65536", "fed.example.org:"),
        *(":8443", "::1:8443", "[::1]", "[fed]:1", "999.1.1.1:1", "1.2.3:1", "-a.org:1"),
        *("a..b:1", "a_b:1", "*.example.org:1", "http://a:1", "0.0.0.0:1", "[::]:1", "a:1\n"),
        *("a" * 64 + ":1", "a." * 130 + "b:1", "fed.exämple.org:1", "fed:٣"),
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"^(must be the host and the port|has the host)"):
        split_address(address)


# --- the roster ---


def identity(role: Role, name: str, serial: int = 7) -> Identity:
    return Identity(role, name, serial, datetime(2040, 1, 1, tzinfo=UTC))


def small_roster() -> Roster:
    roster = Roster("sepsis", administrators=("anna",)).with_site("berlin").with_site("ulm")
    return roster.with_certificate("berlin", 7, "aa").with_certificate("berlin", 0xABC, "aa")


def test_a_roster_is_written_and_read_again(tmp_path: Path) -> None:
    roster = small_roster().with_revoked([0xABC])
    write_roster(tmp_path / "roster.json", roster)
    assert read_roster(tmp_path / "roster.json") == roster
    assert json.loads((tmp_path / "roster.json").read_text()) == {
        "format": 1,
        "federation": "sepsis",
        "sites": {"berlin": 0, "ulm": 1},
        "administrators": ["anna"],
        "certificates": {"berlin": [{"serial": "7", "key": "aa"}, {"serial": "abc", "key": "aa"}]},
        "revoked": ["abc"],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["roster.json"]


def test_who_is_refused() -> None:
    roster = small_roster()
    assert roster.why_refused(identity("site", "berlin")) is None
    assert roster.why_refused(identity("administrator", "anna", 99)) is None
    for role, name, kind in (
        ("site", "lyon", "sites"),
        ("administrator", "berlin", "administrators"),
        ("site", "anna", "sites"),
        ("server", "server", "sites"),
    ):
        reason = roster.why_refused(identity(role, name))  # type: ignore[arg-type]
        assert reason == f"{name!r} is not one of this federation's {kind}"
    revoked = roster.with_revoked([7])
    reason = revoked.why_refused(identity("site", "berlin"))
    assert reason == "its certificate (serial 7) was revoked"
    assert revoked.why_refused(identity("site", "berlin", 0xABC)) is None


def test_a_key_is_revoked_with_all_of_its_certificates() -> None:
    roster = small_roster().with_certificate("ulm", 8, "bb")
    assert not roster.with_revoked([7]).is_key_revoked("berlin", "aa")
    both = roster.with_revoked([7, 0xABC])
    assert both.is_key_revoked("berlin", "aa")
    assert both.is_revoked("berlin")
    assert not both.is_key_revoked("berlin", "cc")  # a new key of the same site
    assert not both.is_key_revoked("ulm", "bb")
    assert not roster.is_revoked("lyon")


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.sets(st.integers(0, 9)))
def test_numbers_are_only_added(names: list[str], revoked: set[int]) -> None:
    roster = Roster("sepsis")
    for number, name in enumerate(names):
        before = dict(roster.numbers)
        roster = roster.with_site(name).with_certificate(name, number, "aa").with_revoked(revoked)
        assert roster.numbers == {**before, name: number}
    for name in names:
        with pytest.raises(KitError, match="is a site already, with the number"):
            roster.with_site(name)


def test_a_name_is_revoked_when_all_its_certificates_are() -> None:
    # rejects a name that goes with the first of its certificates: a renewal revokes the old one
    roster = Roster("sepsis").with_site("ulm")
    assert not roster.is_revoked("ulm")
    roster = roster.with_certificate("ulm", 1, "aa").with_certificate("ulm", 2, "bb")
    assert [roster.with_revoked(some).is_revoked("ulm") for some in ({1}, {2}, {3}, {1, 2})] == [
        *(False, False, False),
        True,
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format = 2: must be 1"),
        ({"sites": {"berlin": 0, "ulm": 0}}, "several sites have the number 0"),
        ({"sites": {"berlin": -1}}, "sites.berlin = -1: must be at least 0"),
        ({"sites": {"Berlin": 0}}, "must be at most 40 lower-case letters"),
        ({"administrators": ["berlin"]}, "administrators: berlin is also a site's name"),
        ({"revoked": ["xyz"]}, "revoked.0 = 'xyz': "),
        ({"revoked": ["7\n"]}, "revoked.0 = '7\\n': "),
        ({"more": 1}, "more: unknown key"),
        (
            {"certificates": {n: [{"serial": "7", "key": "aa"}] for n in ("berlin", "ulm")}},
            "several certificates have the same serial",
        ),
    ],
)
def test_a_broken_roster_names_the_key(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    path = tmp_path / "roster.json"
    write_roster(path, small_roster())
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(KitError) as error:
        read_roster(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)


# --- garbage ---

TEXTS = st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda s: s.encode()))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)
ROSTER_KEYS = ["format", "federation", "sites", "administrators", "certificates", "revoked"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provisioned(tmp_path_factory.mktemp("shared"))


@given(st.sampled_from(["kit.toml", "root.pem", "key.pem", "certificate.pem"]), TEXTS)
def test_garbage_in_a_kit_is_a_kit_error(shared: Path, name: str, garbage: bytes) -> None:
    path = shared / SITE / name
    before = path.read_bytes()
    path.write_bytes(garbage)
    try:
        with pytest.raises(KitError):
            read_kit(shared / SITE)
    finally:
        path.write_bytes(before)


@given(TEXTS | st.dictionaries(st.sampled_from(ROSTER_KEYS), VALUES).map(json.dumps))
def test_garbage_in_a_roster_is_a_kit_error(shared: Path, garbage: bytes | str) -> None:
    path = shared / "roster.json"
    path.write_bytes(garbage.encode() if isinstance(garbage, str) else garbage)
    with pytest.raises(KitError):
        read_roster(path)


@given(st.sampled_from(ROSTER_KEYS), VALUES)
def test_a_roster_with_one_odd_value_is_read_or_a_kit_error(
    shared: Path, key: str, value: object
) -> None:
    path = shared / "roster.json"
    write_roster(path, small_roster())
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    try:
        roster = read_roster(path)
    except KitError:
        return
    write_roster(path, roster)
    assert read_roster(path) == roster


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    kits = provisioned(tmp_path, encoding="utf-8-sig")  # as a text editor of Windows writes it
    assert read_kit(kits / "sites" / "ulm").federation == "sepsis"
    (tmp_path / "site.toml").write_text('name = "ulm"\n[data]\nname = "digits"\n', "utf-8-sig")
    assert read_site_file(tmp_path / "site.toml").table.name == "ulm"
