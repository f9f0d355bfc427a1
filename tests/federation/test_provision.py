"""The command ``fedgist provision``, end to end: what it writes, prints and refuses."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

import commands
from commands import fedgist
from fedgist.cli import main
from fedgist.errors import KitError
from fedgist.federation.keys import certificates, provision
from fedgist.federation.keys.kits import read_kit
from fedgist.federation.keys.roster import read_roster
from fedgist.runs.files import atomic_files

pytestmark = pytest.mark.slow  # each command is a process

SEPSIS = """
name = "sepsis"
server = "localhost:8443"
administrators = ["anna"]
sites = ["berlin", "ulm", "lyon"]
"""
CENTRAL = f'{SEPSIS}keys = "central"\ndays = 30\n'
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    def call(*words: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = fedgist("provision", *words, cwd=tmp_path, code=code, **env)
        assert "PRIVATE" not in done.stdout + done.stderr  # no key is ever printed
        if code:
            assert done.stderr.startswith("error: ")
            assert done.stderr.count("\n") == 1
        return done

    return call


def make(cli: Cli, folder: Path, text: str = SEPSIS) -> Path:
    (folder / "federation.toml").write_text(text)
    cli("federation.toml", "--out", "kits")
    return folder / "kits"


@pytest.fixture
def kits(cli: Cli, tmp_path: Path) -> Path:
    """A federation whose sites make their own keys; berlin's certificate is signed."""
    kits = make(cli, tmp_path)
    cli("--request", "kits/sites/berlin")
    cli("--sign", "kits/sites/berlin/request.csr", "--out", "kits")
    return kits


@pytest.fixture
def central(cli: Cli, tmp_path: Path) -> Path:
    return make(cli, tmp_path, CENTRAL)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def numbers(kits: Path) -> dict[str, int]:
    return dict(read_roster(kits / "server/roster.json").numbers)


def serial(kit: Path) -> int:
    """The serial by cryptography's own reader."""
    loaded = x509.load_pem_x509_certificate((kit / "certificate.pem").read_bytes())
    return loaded.serial_number


def why_refused(kits: Path, kit: str) -> str | None:
    identity = certificates.identity_of((kits / kit / "certificate.pem").read_bytes())
    return read_roster(kits / "server/roster.json").why_refused(identity)


def test_a_federation_with_keys_of_the_sites(cli: Cli, tmp_path: Path) -> None:
    kits = make(cli, tmp_path)
    assert set(content(kits)) == {
        *(f"authority/{name}" for name in ("root.pem", "root-key.pem", "settings.toml")),
        *(f"server/{name}" for name in ("kit.toml", "root.pem", "key.pem", "certificate.pem")),
        "server/roster.json",
        *(
            f"administrators/anna/{name}"
            for name in ("kit.toml", "root.pem", "key.pem", "certificate.pem")
        ),
        *(f"sites/{s}/{f}" for s in ("berlin", "ulm", "lyon") for f in ("kit.toml", "root.pem")),
    }
    assert (kits / "authority/requests").is_dir()
    assert numbers(kits) == {"berlin": 0, "ulm": 1, "lyon": 2}
    assert read_kit(kits / "server").role == "server"
    assert read_kit(kits / "administrators/anna").name == "anna"
    table = tomllib.loads((kits / "sites/ulm/kit.toml").read_text())
    assert table == {
        "format": 1,
        "role": "site",
        "name": "ulm",
        "federation": "sepsis",
        "address": "localhost:8443",
        "number": 1,
    }
    with pytest.raises(KitError, match="make a key with: fedgist provision --request"):
        read_kit(kits / "sites/ulm")


def test_a_federation_with_central_keys(central: Path) -> None:
    for place in ("server", "administrators/anna", "sites/berlin", "sites/ulm", "sites/lyon"):
        kit = read_kit(central / place)
        life = x509.load_pem_x509_certificate(kit.certificate)
        assert 30 <= (life.not_valid_after_utc - life.not_valid_before_utc).days <= 31


def test_keys_are_private_and_the_roots_key_is_in_no_kit(kits: Path, cli: Cli) -> None:
    cli("--renew", "all", "--out", "kits")
    keys = [path for path in kits.rglob("*") if path.is_file() and b"PRIVATE" in path.read_bytes()]
    assert {str(path.relative_to(kits)) for path in keys} == {
        *("authority/root-key.pem", "server/key.pem", "administrators/anna/key.pem"),
        "sites/berlin/key.pem",
    }
    assert {mode(path) for path in keys} == {0o600}
    assert {mode(path.parent) for path in keys} == {0o700}
    secret = (kits / "authority/root-key.pem").read_bytes()
    assert [name for name, text in content(kits).items() if text == secret] == [
        "authority/root-key.pem"
    ]


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(CENTRAL)
    script = "import os, sys; os.umask(0); from fedgist.cli.main import main; main()"
    words = ["provision", "federation.toml", "--out", "kits"]
    commands.call([sys.executable, "-c", script, *words], tmp_path)
    kits = tmp_path / "kits"
    assert {mode(path) for path in kits.rglob("*key.pem")} == {0o600}
    assert {mode(path) for path in [kits, *kits.rglob("*")] if path.is_dir()} == {0o700}


def test_an_existing_folder_is_refused_and_unchanged(cli: Cli, kits: Path) -> None:
    before = content(kits)
    refused = cli("federation.toml", "--out", "kits", code=2).stderr
    assert "kits exists and holds administrators, authority, server, sites; name" in refused
    assert content(kits) == before
    assert sorted(path.name for path in kits.parent.iterdir()) == ["federation.toml", "kits"]


def test_request_and_signature(cli: Cli, tmp_path: Path) -> None:
    kits = make(cli, tmp_path)
    far = tmp_path / "far"  # the site's machine
    far.mkdir()
    (kits / "sites/ulm").rename(far / "kit")
    made = cli("--request", "far/kit").stdout
    assert "Made the private key far/kit/key.pem" in made
    (print_of_key,) = [line for line in made.splitlines() if "fingerprint of" in line]
    key = (far / "kit/key.pem").read_bytes()
    assert "Kept the private key far/kit/key.pem" in cli("--request", "far/kit").stdout
    assert (far / "kit/key.pem").read_bytes() == key
    signed = cli("--sign", "far/kit/request.csr", "--out", "kits").stdout
    assert print_of_key in signed.splitlines()
    assert not (kits / "sites/ulm/key.pem").exists()
    (far / "kit/certificate.pem").write_bytes((kits / "sites/ulm/certificate.pem").read_bytes())
    assert read_kit(far / "kit").name == "ulm"
    assert (kits / "authority/requests/ulm.csr").read_bytes() == (
        far / "kit/request.csr"
    ).read_bytes()
    assert read_roster(kits / "server/roster.json").serials["ulm"] == (serial(far / "kit"),)


def test_several_requests_are_signed_at_once_from_their_kits(cli: Cli, tmp_path: Path) -> None:
    kits = make(cli, tmp_path)
    for name in ("ulm", "lyon"):
        cli("--request", f"kits/sites/{name}")
    cli("--sign", "kits/sites/ulm", "--sign", "kits/sites/lyon", "--out", "kits")
    assert [read_kit(kits / "sites" / name).name for name in ("ulm", "lyon")] == ["ulm", "lyon"]


def test_requests_that_are_not_signed(cli: Cli, kits: Path, tmp_path: Path) -> None:
    before = content(kits)

    def refused(request: bytes) -> str:
        (tmp_path / "request.csr").write_bytes(request)
        return cli("--sign", "request.csr", "--out", "kits", code=2).stderr

    key = certificates.make_key()
    for name in ("paris", "anna", "server"):  # an administrator is no site
        text = refused(certificates.make_request(key, name))
        assert f"is of {name!r}, which is not one of this federation's sites: berlin, ulm" in text
    good = certificates.make_request(key, "ulm")
    assert "signature is not by its own key" in refused(renamed(key, "xlm", "ulm"))
    assert "the request is damaged" in refused(good[:80])
    assert "is missing; a site makes it" in cli("--sign", "nix", "--out", "kits", code=2).stderr
    assert content(kits) == before


def renamed(key: bytes, old: str, new: str) -> bytes:
    """A request with a changed name, and the signature of the old one."""
    request = x509.load_pem_x509_csr(certificates.make_request(key, old))
    body = request.public_bytes(Encoding.DER).replace(old.encode(), new.encode())
    return x509.load_der_x509_csr(body).public_bytes(Encoding.PEM)


def test_central_keys_need_no_request(cli: Cli, central: Path) -> None:
    cli("--request", "kits/sites/ulm")
    refused = cli("--sign", "kits/sites/ulm", "--out", "kits", code=2).stderr
    assert "the keys of this federation are made centrally" in refused


def test_only_sites_make_requests(cli: Cli, kits: Path) -> None:
    refused = cli("--request", "kits/server", code=2).stderr
    assert "is a kit of server server; only sites make their own keys" in refused
    (kits / "sites/berlin/key.pem").chmod(0o644)
    assert "chmod 600" in cli("--request", "kits/sites/berlin", code=2).stderr


def test_numbers_are_kept_over_additions_and_revocations(cli: Cli, kits: Path) -> None:
    cli("--revoke", "berlin", "--out", "kits")
    done = cli("--add-site", "paris", "--out", "kits").stdout
    assert "Added site paris with the number 3" in done
    assert "copy kits/server/roster.json into the server's kit" in done
    expected = {"berlin": 0, "ulm": 1, "lyon": 2, "paris": 3}
    assert numbers(kits) == expected
    again = cli("--add-site", "berlin", "--out", "kits", code=2).stderr
    assert "berlin is a site already, with the number 0" in again
    for name in ("anna", "server", "all", "Rome"):
        cli("--add-site", name, "--out", "kits", code=2)
    assert numbers(kits) == expected
    cli("--request", "kits/sites/paris")
    cli("--sign", "kits/sites/paris", "--out", "kits")
    assert read_kit(kits / "sites/paris").name == "paris"
    assert why_refused(kits, "sites/paris") is None


def test_a_site_is_added_with_a_central_key(cli: Cli, central: Path) -> None:
    cli("--add-site", "paris", "--out", "kits")
    assert read_kit(central / "sites/paris").name == "paris"
    assert numbers(central)["paris"] == 3


def test_renewal_keeps_numbers_and_the_sites_key(cli: Cli, kits: Path) -> None:
    before = {place: content(kits / place) for place in ("sites/berlin", "server")}
    old, of_the_sites = serial(kits / "sites/berlin"), numbers(kits)
    done = cli("--renew", "all", "--out", "kits").stdout
    assert "Renewed the certificate of site berlin for the same key" in done
    assert "Not renewed: site ulm has no certificate yet" in done
    assert numbers(kits) == of_the_sites
    after = {place: content(kits / place) for place in before}
    assert after["sites/berlin"]["key.pem"] == before["sites/berlin"]["key.pem"]
    assert after["server"]["key.pem"] != before["server"]["key.pem"]
    assert read_roster(kits / "server/roster.json").serials["berlin"] == (
        old,
        serial(kits / "sites/berlin"),
    )
    for place in ("sites/berlin", "server", "administrators/anna"):
        read_kit(kits / place)
    cli("--renew", "ulm", "--out", "kits", code=2)
    unknown = cli("--renew", "berlim", "--out", "kits", code=2).stderr
    assert "unknown member of the federation 'berlim'; did you mean 'berlin'?" in unknown


def test_renewal_of_central_keys_makes_new_keys(cli: Cli, central: Path) -> None:
    key = (central / "sites/ulm/key.pem").read_bytes()
    cli("--renew", "ulm", "--renew", "anna", "--out", "kits")
    assert (central / "sites/ulm/key.pem").read_bytes() != key
    assert read_kit(central / "sites/ulm").name == "ulm"
    assert len(read_roster(central / "server/roster.json").serials["anna"]) == 2
    assert len(read_roster(central / "server/roster.json").serials["lyon"]) == 1


def test_a_new_address_is_in_the_servers_certificate_and_in_every_kit(cli: Cli, kits: Path) -> None:
    address = "fed.example.org:99"
    cli("--renew", "server", "--address", address, "--out", "kits")
    cli("--add-site", "paris", "--out", "kits")
    files = list(kits.rglob("kit.toml"))
    assert len(files) == 6
    assert {tomllib.loads(path.read_text())["address"] for path in files} == {address}
    kit = read_kit(kits / "server")
    certificates.check_server(kit.certificate, kit.root, "fed.example.org")
    with pytest.raises(KitError, match="not for the host 'localhost'"):
        certificates.check_server(kit.certificate, kit.root, "localhost")
    assert read_kit(kits / "sites/berlin").address == address
    for words in (["--renew", "berlin"], ["--revoke", "berlin"]):
        refused = cli(*words, "--address", address, "--out", "kits", code=2).stderr
        assert "--renew server" in refused
    bad = cli("--renew", "server", "--address", "nowhere", "--out", "kits", code=2).stderr
    assert "--address = 'nowhere': must be the host and the port that sites dial" in bad


def test_revocation_by_name_and_by_serial(cli: Cli, kits: Path) -> None:
    first = serial(kits / "sites/berlin")
    cli("--renew", "berlin", "--out", "kits")
    colons = ":".join(f"{first:040X}"[i : i + 2] for i in range(0, 40, 2))  # as openssl prints it
    done = cli("--revoke", colons, "--out", "kits").stdout
    assert "berlin still has 1 valid certificate." in done
    assert why_refused(kits, "sites/berlin") is None
    assert read_roster(kits / "server/roster.json").revoked == {first}
    assert "Nothing changed" in cli("--revoke", f"{first:x}", "--out", "kits").stdout
    done = cli("--revoke", "berlin", "--out", "kits").stdout
    assert "berlin has no valid certificate any more." in done
    assert why_refused(kits, "sites/berlin") == (
        f"its certificate (serial {serial(kits / 'sites/berlin'):x}) was revoked"
    )
    for text in ("nobody", "0", f"{first + 1:x}", "lyon", "server"):
        cli("--revoke", text, "--out", "kits", code=2)
    cli("--revoke", "anna", "--out", "kits")
    assert "was revoked" in (why_refused(kits, "administrators/anna") or "")


def test_a_revoked_key_gets_no_new_certificate(cli: Cli, kits: Path) -> None:
    cli("--revoke", "berlin", "--out", "kits")
    for words in (["--renew", "berlin"], ["--sign", "kits/sites/berlin"]):
        refused = cli(*words, "--out", "kits", code=2).stderr
        assert "all certificates of berlin's key are revoked" in refused
    assert "Not renewed: berlin is revoked" in cli("--renew", "all", "--out", "kits").stdout
    (kits / "sites/berlin/key.pem").unlink()
    cli("--request", "kits/sites/berlin")
    cli("--sign", "kits/sites/berlin", "--out", "kits")
    assert read_kit(kits / "sites/berlin").name == "berlin"
    assert why_refused(kits, "sites/berlin") is None
    assert numbers(kits)["berlin"] == 0


def test_options_that_do_not_fit_are_refused(cli: Cli, kits: Path) -> None:
    before = content(kits)
    for words, text in (
        ([], "nothing to do; fedgist provision takes exactly one of federation.toml, --request"),
        (["--renew", "all", "--revoke", "ulm", "--out", "kits"], "--renew and --revoke exclude"),
        (["--revoke", "ulm"], "--revoke needs --out KITS"),
        (["federation.toml"], "federation.toml needs --out KITS"),
        (["--request", "kits/sites/ulm", "--out", "kits"], "takes no --out"),
        (["--renew", "all", "--out", "nowhere"], "nowhere holds no authority of a federation"),
        (["nowhere.toml", "--out", "other"], "nowhere.toml is missing"),
        (["federation.toml", "--out", "federation.toml"], "is a file, not a folder"),
        (["federation.toml", "--out", "federation.toml/kits"], "cannot be made: Not a directory"),
    ):
        assert text in cli(*words, code=2).stderr
    assert content(kits) == before
    assert not (kits.parent / "other").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("", "sites is missing"),
        ('sites = ["ulm"]\nsite = []', "site: unknown key; did you mean 'sites'?"),
        ("sites = []", "sites = []: must have at least 1 item"),
        ('sites = ["Ulm"]', "sites.0 = 'Ulm': must be at most 40 lower-case letters, digits"),
        ('sites = ["ulm", "all"]', "sites.1: must not be 'server' or 'all', which"),
        ('sites = ["ulm", "ulm"]', "sites = ['ulm', 'ulm']: must not hold a name twice: ulm"),
        ('sites = ["anna"]', "administrators: anna is also a site's name"),
        ('sites = ["../ulm"]', "sites.0 = '../ulm': must be"),
        ('sites = ["ulm"]\nkeys = "none"', "keys = 'none': must be 'site' or 'central'"),
        ('sites = ["ulm"]\ndays = 0', "days = 0: must be at least 1"),
        ('sites = ["ulm"]\ndays = "9"', "days = '9': must be a whole number"),
        ("sites =", "federation.toml: "),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_key(
    cli: Cli, tmp_path: Path, change: str, says: str
) -> None:
    text = 'name = "sepsis"\nserver = "localhost:8443"\nadministrators = ["anna"]\n'
    (tmp_path / "federation.toml").write_text(text + change)
    assert says in cli("federation.toml", "--out", "kits", code=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["federation.toml"]


def test_damaged_files_of_the_authority(cli: Cli, kits: Path) -> None:
    for name, text in (
        ("authority/settings.toml", "settings.toml: "),
        ("server/roster.json", "roster.json is damaged"),
        ("authority/root-key.pem", "the private key is damaged"),
        ("authority/root.pem", "the certificate is damaged"),
    ):
        before = (kits / name).read_bytes()
        (kits / name).write_bytes(before[:30])
        assert text in cli("--renew", "server", "--out", "kits", code=2).stderr
        (kits / name).write_bytes(before)
    (kits / "authority/root-key.pem").chmod(0o644)
    assert "chmod 600" in cli("--renew", "server", "--out", "kits", code=2).stderr


def test_two_commands_do_not_change_a_federation_at_once(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "PATIENCE_S", 0.0)
    with (
        FileLock(kits / "authority/lock"),
        pytest.raises(KitError, match="another fedgist provision is changing"),
    ):
        provision.add_site("paris", kits)
    provision.add_site("paris", kits)


MOMENTS = [*(("central", "ulm", n) for n in range(5)), *(("kits", "berlin", n) for n in range(4))]


@pytest.mark.parametrize(("federation", "site", "moment"), MOMENTS)
def test_a_failure_between_two_files_leaves_a_federation_that_goes_on(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    federation: str,
    site: str,
    moment: int,
) -> None:
    # the disk fails at each file of a renewal: no certificate may exist that the roster lacks
    kits: Path = request.getfixturevalue(federation)
    writes, real = [], atomic_files.write

    def failing(path: Path, text: bytes | str, *, private: bool = False) -> None:
        writes.append(path)
        if len(writes) == moment + 1:
            raise OSError("the disk failed")
        real(path, text, private=private)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "write", failing)
        with pytest.raises(OSError, match="the disk failed"):
            provision.renew([site], kits)
    assert [path.name for path in writes].index("roster.json") == 0
    assert serial(kits / "sites" / site) in read_roster(kits / "server/roster.json").serials[site]
    provision.renew([site], kits)
    assert read_kit(kits / "sites" / site).name == site


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_garbage_in_a_federation_file_is_a_kit_error(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.toml"
    path.write_bytes(garbage)
    with pytest.raises(KitError):
        provision.read_federation(path)


def test_without_cryptography_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    monkeypatch.setattr(sys, "argv", ["fedgist", "provision", "--renew", "all"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert "needs cryptography: pip install 'fedgist[federation]'" in capsys.readouterr().err


LOADED = """
import json, sys
from fedgist.cli.main import main
sys.argv = ["fedgist", *sys.argv[1:]]
try:
    main()
finally:
    print(json.dumps(sorted({"torch", "grpc", "cryptography"} & set(sys.modules))))
"""


def test_help_teaches_and_loads_nothing_heavy(tmp_path: Path) -> None:
    def loaded(*words: str) -> tuple[str, list[str]]:
        *lines, last = commands.call([sys.executable, "-c", LOADED, *words], tmp_path).stdout.split(
            "\n"
        )[:-1]
        return "\n".join(lines), json.loads(last)

    text, modules = loaded("provision", "--help")
    assert modules == []
    assert "fedgist provision federation.toml --out kits" in text
    for option in ("--request", "--sign", "--add-site", "--renew", "--address", "--revoke"):
        assert option in text
    (tmp_path / "federation.toml").write_text(SEPSIS)
    text, modules = loaded("provision", "federation.toml", "--out", "kits")
    assert modules == ["cryptography"]  # provisioning needs neither torch nor gRPC
    assert "Next: give each kit's folder to its owner" in text
