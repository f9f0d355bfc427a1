"""False servers and hostile plans: a site refuses them before it imports, opens or trains."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fedgist.errors import FedgistError, MessageError, OwnerError, RecipeError, SiteError
from fedgist.federation.keys.certificates import Role, sign
from fedgist.federation.keys.kits import Kit, read_kit
from fedgist.federation.network.frames import (
    ID_BYTES,
    LARGEST_FRAME,
    NOTE,
    PIECE,
    TO_SERVER,
    TO_SITE,
    Begin,
    Note,
    note,
    pieces,
    read_note,
    signed_bytes,
)
from fedgist.federation.network.grpc_site import Connection
from fedgist.federation.network.invitation import digest_of_recipe, recipe_text
from fedgist.federation.site import agent as site_agent
from fedgist.federation.site.agent import SiteAgent
from fedgist.federation.site.file import SiteFile, SiteTable
from fedgist.recipe.reading import recorded
from fedgist.recipe.schema import EngineSection
from fedgist.wire.envelope import Header, seal
from intruders import HUNG_S, MODEL, Script, fake_server, issued, make_kits, site_kit
from three_sites import NAMES, parsed, recipe, write_rows

IDENT = bytes(range(ID_BYTES))
LIMIT = 10_000  # bytes of the largest request


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kits(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kits(tmp_path_factory.mktemp("others"))


@dataclass
class Careful:
    """An agent that writes down what it is asked for, and stops at the first problem."""

    stop: threading.Event = field(default_factory=threading.Event)
    plans: list[Note] = field(default_factory=list)
    answered: list[bytes] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def prepare(self, plan: Note) -> Note:
        self.plans.append(plan)
        return {}

    def largest(self) -> int:
        return LIMIT

    def answer(self, envelope: bytes) -> bytes:
        self.answered.append(envelope)
        return envelope

    def saw(self, text: str) -> None:
        self.texts.append(text)
        if text != "ready":
            self.stop.set()


def visit(port: int, kit: Kit) -> Careful:
    """Let a site connect to a server once; return what it saw."""
    agent = Careful()
    dialing = replace(kit, address=f"localhost:{port}")
    visitor = threading.Thread(target=Connection(dialing, agent, agent.stop).run, daemon=True)
    visitor.start()
    visitor.join(HUNG_S)
    assert not visitor.is_alive()
    return agent


# ---------------------------------------------------------------- who the server is


def silent(frames: Iterator[bytes]) -> Iterator[bytes]:
    """No site comes so far."""
    raise AssertionError("a site greeted a false server")


def test_a_server_of_another_root_is_refused(
    kits: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the machine trusts the other root, as behind a proxy that inspects TLS
    for variable in ("SSL_CERT_FILE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"):
        monkeypatch.setenv(variable, str(foreign / "server/root.pem"))
    root = (kits / "server/root.pem").read_bytes()
    with fake_server(read_kit(foreign / "server"), root, silent) as port:
        agent = visit(port, site_kit(kits, "berlin"))
    assert "cannot be reached" in agent.texts[0]
    assert agent.plans == []


PRETENDERS: dict[str, tuple[Role, str, dict[str, Any]]] = {
    "a peer": ("site", "lyon", {}),
    "an administrator": ("administrator", "anna", {}),
    "another host's server": ("server", "server", {"host": "elsewhere.example"}),
}


@pytest.mark.parametrize("name", PRETENDERS)
def test_nobody_else_of_this_root_can_pose_as_the_server(kits: Path, name: str) -> None:
    role, common, how = PRETENDERS[name]
    pretender = issued(kits, role, common, **how)
    with fake_server(pretender, pretender.root, silent) as port:
        agent = visit(port, site_kit(kits, "berlin"))
    assert "cannot be reached" in agent.texts[0]
    assert agent.plans == []


# ---------------------------------------------------------------- what the server sends


def plan_with(certificate: bytes | str, **more: object) -> bytes:
    text = certificate if isinstance(certificate, str) else certificate.decode()
    return note({"certificate": text, **more})


def sending(*frames: bytes, after_hello: Sequence[bytes] = ()) -> Script:
    """Return a server's script: frames after the greeting, and frames after the hello."""

    def script(received: Iterator[bytes]) -> Iterator[bytes]:
        next(received)
        yield from frames
        if after_hello:
            next(received)
            yield note({"ready": True})
            yield from after_hello
        for _ in received:
            pass

    return script


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (NOTE + b"\xff\xfe{", "the note cannot be read"),
        (NOTE + b'{"a":' * 100_000, "the note cannot be read"),
        (NOTE + b"[]", "the note is not an object"),
        (PIECE + b"x", "it is not a note of this version of fedgist"),
        (b"", "it is not a note of this version of fedgist"),
        (NOTE + bytes(LARGEST_FRAME), "refuses: "),  # gRPC itself
        (note({}), "the certificate is damaged"),
        (NOTE + b'{"certificate": "\\ud800"}', "certificate"),
        (NOTE + b'{"certificate": NaN, "run": NaN, "digest": 1e999}', "certificate"),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused(kits: Path, first: bytes, says: str) -> None:
    kit = read_kit(kits / "server")
    with fake_server(kit, kit.root, sending(first)) as port:
        agent = visit(port, site_kit(kits, "berlin"))
    assert says in agent.texts[0]
    assert agent.plans == []


@pytest.mark.parametrize("place", ["sites/lyon", "administrators/anna", "foreign"])
def test_a_plan_with_the_certificate_of_another_is_refused(
    kits: Path, foreign: Path, place: str
) -> None:
    kit = read_kit(kits / "server")
    other = read_kit(foreign / "server" if place == "foreign" else kits / place)
    with fake_server(kit, kit.root, sending(plan_with(other.certificate))) as port:
        agent = visit(port, site_kit(kits, "berlin"))
    assert "the server sent something that cannot be used" in agent.texts[0]
    assert agent.plans == []


def request_of(kit: Kit, signature: bytes, size: int | None = None) -> list[bytes]:
    envelope = request_envelope()
    begin = Begin(IDENT, len(envelope) if size is None else size, signature)
    return [begin.frame(), *pieces((envelope,))]


def request_envelope() -> bytes:
    return seal(
        Header(purpose="train", run="ab" * 8, round=1, stage="s", client=0, architecture="shared"),
        {},
    )


def signed_as(kit: Kit, direction: bytes = TO_SITE, ident: bytes = IDENT) -> bytes:
    return sign(kit.key, signed_bytes(direction, ident, request_envelope()))


REQUESTS: dict[str, tuple[Callable[[Kit, Kit], list[bytes]], str]] = {
    "unsigned": (lambda server, _: request_of(server, b""), "is not signed by the server"),
    "a peer's": (
        lambda server, lyon: request_of(server, signed_as(lyon)),
        "is not signed by the server",
    ),
    "another id's": (
        lambda server, _: request_of(server, signed_as(server, ident=bytes(ID_BYTES))),
        "is not signed by the server",
    ),
    "a reply": (
        lambda server, _: request_of(server, signed_as(server, TO_SERVER)),
        "is not signed by the server",
    ),
    "too large": (
        lambda server, _: request_of(server, signed_as(server), 1 << 30),
        f"a request of {1 << 30} bytes; at most {LIMIT} are accepted",
    ),
    "larger than announced": (
        lambda server, _: request_of(server, signed_as(server), 10),
        "the pieces are larger than was announced",
    ),
    "no envelope": (
        lambda server, _: [Begin(IDENT, 4, b"").frame(), PIECE + b"four"],
        "it is not an envelope",
    ),
    "interrupted": (
        lambda server, _: [Begin(IDENT, 4, b"").frame(), note({"end": "over"})],
        "it is not a piece of an envelope",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_is_not_the_servers_is_not_answered(kits: Path, name: str) -> None:
    make, says = REQUESTS[name]
    kit = read_kit(kits / "server")
    frames = make(kit, site_kit(kits, "lyon"))
    script = sending(plan_with(kit.certificate), after_hello=frames)
    with fake_server(kit, kit.root, script) as port:
        agent = visit(port, site_kit(kits, "berlin"))
    assert agent.texts[0] == "ready"
    assert says in agent.texts[1]
    assert agent.answered == []


def test_the_servers_own_request_is_answered(kits: Path) -> None:
    kit = read_kit(kits / "server")
    frames = [*request_of(kit, signed_as(kit)), note({"end": "over"})]
    script = sending(plan_with(kit.certificate), after_hello=frames)
    with fake_server(kit, kit.root, script) as port:
        agent = visit(port, site_kit(kits, "berlin"))
    assert agent.answered == [request_envelope()]


def test_what_rows_decide_ends_the_site_and_is_not_told(kits: Path) -> None:
    # seen: twelve plans with other clients.max_rows told the number of training rows
    kit, heard = read_kit(kits / "server"), list[bytes]()

    def script(received: Iterator[bytes]) -> Iterator[bytes]:
        next(received)
        yield plan_with(kit.certificate, run="ab" * 8, digest="cd" * 32, number=0)
        heard.extend(itertools.islice(received, 1))

    with fake_server(kit, kit.root, script) as port:
        dialing = replace(site_kit(kits, "berlin"), address=f"localhost:{port}")
        with pytest.raises(OwnerError):
            Connection(dialing, Failing(error=OwnerError("365 rows"))).run()
    assert heard == []


@dataclass
class Failing(Careful):
    """An agent that cannot prepare."""

    error: Exception = field(default_factory=lambda: IndexError("row 17 of patient Smith"))

    def prepare(self, plan: Note) -> Note:
        raise self.error


def test_any_failure_to_prepare_is_a_refusal_without_its_text(kits: Path) -> None:
    kit, heard = read_kit(kits / "server"), []

    def script(received: Iterator[bytes]) -> Iterator[bytes]:
        next(received)
        yield plan_with(kit.certificate, run="ab" * 8, digest="cd" * 32, number=0)
        heard.append(read_note(next(received)))

    with fake_server(kit, kit.root, script) as port:
        dialing = replace(site_kit(kits, "berlin"), address=f"localhost:{port}")
        with pytest.raises(IndexError):
            Connection(dialing, Failing()).run()
    plan = {"run": "ab" * 8, "digest": "cd" * 32, "number": 0}
    assert heard == [{**plan, "refused": "work", "about": ""}]


# ---------------------------------------------------------------- what the server asks for


def site(folder: Path, **table: Any) -> SiteAgent:
    given = {"data": {"name": "npz", "path": "berlin.npz"}, **table}
    return SiteAgent(SiteFile(folder / "site.toml", SiteTable.model_validate(given)))


def plan_of(raw: dict[str, Any] | str, **changed: object) -> dict[str, object]:
    """Return a plan with a recipe, whose digest is right."""
    text = raw if isinstance(raw, str) else recipe_text(parsed(raw))
    plan: dict[str, object] = {
        "run": "ab" * 8,
        "recipe": text,
        "digest": "cd" * 32 if isinstance(raw, str) else digest_of_recipe(parsed(raw)),
        "number": 0,
        "names": list(NAMES),
        "certificate": "",
        "last": None,
        "state_lost": "refuse",
    }
    return plan | changed


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing that a recipe names may be imported or opened in this test."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the recipe was used before it was checked")

    monkeypatch.setattr(site_agent, "setup_at_site", forbidden)
    monkeypatch.setattr(site_agent, "site_part", forbidden)
    write_rows(tmp_path)


PLAIN = recipe("fedavg", model=MODEL)
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a method": (recipe("os:system"), "policy.methods accepts .*, not 'os:system'"),
    "a variant": (recipe("os:system@x"), "policy.methods accepts .*, not 'os:system"),
    "a model": (recipe("fedavg", model={"name": "os:system"}), "code of its own, 'os:system'"),
    "an architecture": (
        recipe("fedlog", clients={"architectures": {"a": {"model": "os:system"}}}),
        "code of its own, 'os:system'",
    ),
    "a pool": (
        recipe("merged_codist", clients={"pools": {"a": {"model": "os:system"}}}),
        "code of its own, 'os:system'",
    ),
    "a metric": (
        recipe("fedavg", model=MODEL, objective={"metrics": ["os:system"]}),
        "code of its own, 'os:system'",
    ),
    "weights": (
        recipe("fedavg", model=MODEL | {"weights": "/etc/shadow"}),
        "model.weights names a file, which a server may not do",
    ),
    "an architecture's weights": (
        recipe(
            "fedlog",
            clients={"architectures": {"a": {"model": "mlp", "weights": "/etc/shadow"}}},
        ),
        "model.weights names a file, which a server may not do",
    ),
    "a graph": (
        recipe("fedavg", model=MODEL, clients={"graph": {"name": "file", "path": "/etc/shadow"}}),
        "clients.graph.path names a file, which a server may not do",
    ),
    "public rows": (
        recipe("fedavg", model=MODEL, data={"public": {"name": "npz", "path": "/etc/shadow"}}),
        "data.public.path names a file, which a server may not do",
    ),
    "5,000 layers": (
        recipe("fedavg", model={"name": "mlp", "hidden": [1] * 5000}),
        "model has a list of 5000 numbers; a site accepts 200",
    ),
    "5,000 layers of an architecture": (
        recipe("fedlog", clients={"architectures": {"a": {"model": "mlp", "hidden": [1] * 5000}}}),
        "clients.architectures has a list of 5000 numbers; a site accepts 200",
    ),
    "20,000 classes": (
        recipe("fedavg", model=MODEL, data={"classes": [f"class {i}" for i in range(20_000)]}),
        "data.classes has 20000 names; a site accepts 10000",
    ),
    "public texts": (
        recipe("fedavg", model=MODEL, data={"public": {"name": "text_file", "file": "/etc/x"}}),
        "data.public.file names a file, which a server may not do",
    ),
}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_refused_before_it_is_used(name: str, tmp_path: Path) -> None:
    raw, says = HOSTILE[name]
    agent = site(tmp_path)
    with pytest.raises(SiteError, match=says):
        agent.prepare(plan_of(raw))
    assert f"run {'ab' * 8}: does not take part: " in (agent.folder / "audit.log").read_text()


@pytest.mark.usefixtures("untouched")
def test_public_test_rows_of_a_server_are_refused(tmp_path: Path) -> None:
    """The site names a file for its public rows; the server adds another one."""
    public = {"name": "table", "path": "p.csv", "label": "y", "test": "/etc/shadow"}
    raw = recipe("fedavg", model=MODEL, data={"public": public})
    agent = site(tmp_path, public={"path": "p.csv"})
    with pytest.raises(SiteError, match=r"data.public.test names a file"):
        agent.prepare(plan_of(raw))


PLANS: dict[str, tuple[dict[str, object], str]] = {
    "a folder as run": ({"run": "../../../../etc"}, "Invitation: run"),
    "a run with a new line": ({"run": "ab" * 8 + "\n"}, "Invitation: run"),
    "an empty run": ({"run": ""}, "Invitation: run"),
    "a long run": ({"run": "ab" * 1000}, "Invitation: run"),
    "a negative number": ({"number": -1}, "Invitation: number"),
    "a number out of range": ({"number": 3}, "number 3 of 3"),
    "a huge number": ({"number": 10**30}, "Invitation: number"),
    "a fraction": ({"number": 0.5}, "Invitation: number"),
    "huge names": ({"names": ["n" * 201]}, "Invitation: names"),
    "names that are none": ({"names": [3]}, "Invitation: names"),
    "a key too many": ({"more": 1}, "Invitation: more"),
    "no recipe": ({"recipe": None}, "Invitation: recipe"),
    "a recipe that is not TOML": ({"recipe": "[[["}, "the recipe is not TOML"),
    "a deep recipe": ({"recipe": "a = " + "[" * 100_000}, "recipe"),
    "another recipe": ({"digest": "ab" * 32}, "the recipe's digest is .*; the server's is abab"),
    "a last stage that is none": ({"last": [1]}, "Invitation: last"),
    "a state that is none": ({"state_lost": "destroy"}, "Invitation: state_lost"),
}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", PLANS)
def test_a_hostile_plan_is_refused(name: str, tmp_path: Path) -> None:
    changed, says = PLANS[name]
    agent = site(tmp_path)
    with pytest.raises(FedgistError, match=says):
        agent.prepare(plan_of(PLAIN, **changed))
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".npz") in (
        [],
        ["state"],
    )
    assert not (agent.folder / "runs").exists()


def test_the_server_does_not_say_where_code_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An approved name is imported from the site's own code, whatever [engine] says."""
    write_rows(tmp_path)
    code = "from fedgist.models.dense import mlp\n\ndef make(shape, classes):\n"
    code += "    return mlp(shape, classes, hidden=[8])\n"
    for folder, more in (("own", ""), ("hostile", "raise SystemExit\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "approved_model_code.py").write_text(more + code)
    monkeypatch.syspath_prepend(tmp_path / "own")
    raw = recipe("fedavg", model={"name": "approved_model_code:make"})
    hostile = EngineSection(code_folder=str(tmp_path / "hostile"), workers=64)
    plan = plan_of(raw) | {"recipe": parsed(raw).changed({"engine": hostile}).to_toml()}
    sys.modules.pop("approved_model_code", None)
    agent = site(tmp_path, policy={"code": ["approved_model_code:make"]})
    try:
        hello = agent.prepare(plan)
        assert hello["digest"] == plan["digest"]
        file = sys.modules["approved_model_code"].__file__
        assert file == str(tmp_path / "own" / "approved_model_code.py")
    finally:
        sys.modules.pop("approved_model_code", None)


POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "method": ({"methods": ["fedlog"]}, PLAIN, "policy.methods accepts fedlog, not 'fedavg'"),
    "rounds": ({"most_rounds": 2}, PLAIN, "policy.most_rounds = 2; the run has 3 rounds"),
    "epsilon": ({"epsilon": 1.0}, PLAIN, "policy.epsilon = 1, and the run has no differential"),
    "upload": ({"largest_upload": 100}, PLAIN, r"policy.largest_upload = 100; an upload of stage"),
    "classes": ({"least_rows": 10_000}, PLAIN, "policy leaves no training rows"),
    "steps": ({}, recipe("fedavg", model=MODEL, train={"local_epochs": 10**9}), "most_local_steps"),
    "steps of a method": (
        {"most_local_steps": 60},
        recipe("fedrep", model=MODEL, method={"name": "fedrep", "head_epochs": 50}),
        r"policy.most_local_steps = 60; a round has \d\d+",
    ),
    "parameters": (
        {"most_parameters": 1000},
        recipe("fedavg", model={"name": "mlp", "hidden": [1000]}),
        r"policy.most_parameters = 1000; the recipe's models have 75010",
    ),
}


@pytest.mark.parametrize("key", ["root", "seed", "classes"])
def test_a_key_that_a_source_fills_itself_is_unknown(key: str, tmp_path: Path) -> None:
    # seen: a TypeError, "load_data() got multiple values for keyword argument 'root'"
    write_rows(tmp_path)
    public = parsed(recipe("fedavg", model=MODEL, data={"public": {"name": "mnist"}}))
    text = recipe_text(public).replace('name = "mnist"', f'name = "mnist"\n{key} = "/etc"')
    plan = plan_of(text, digest=digest_of_recipe(recorded(text)))
    with pytest.raises(FedgistError, match=f"data.public.{key}: unknown key of mnist"):
        site(tmp_path).prepare(plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_run_outside_the_policy_is_refused_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(site_agent, "try_training", forbidden)
    write_rows(tmp_path)
    policy, raw, says = POLICIES[name]
    agent = site(tmp_path, policy=policy)
    with pytest.raises(FedgistError, match=says):
        agent.prepare(plan_of(raw))
    assert "does not take part" in (agent.folder / "audit.log").read_text()
    assert not (agent.folder / "ledger.json").exists()


def test_a_request_before_the_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MessageError, match="a request came before the invitation"):
        site(tmp_path).answer(request_envelope())


SECURE = {"federation": {"sums": "secure"}}


@pytest.mark.parametrize(
    ("raw", "changed", "says"),
    [
        (recipe("repshare", model=MODEL), {}, "reads each Released by itself"),
        (recipe("fedlog", model=MODEL | {"frozen": True}), {}, "the same sums in each round"),
        (PLAIN, {"names": ["berlin", "lyon", "lyon"]}, "the server names a site twice"),
        (PLAIN, {"names": ["berlin", "lyon"]}, "a total that nobody can open needs 3"),
        (PLAIN, {}, "secure sums need the keys of a kit"),
    ],
)
def test_a_server_that_checked_no_secure_sums_is_refused_before_training(
    raw: dict[str, Any],
    changed: dict[str, object],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("it trained")

    monkeypatch.setattr(site_agent, "try_training", forbidden)
    write_rows(tmp_path)
    with pytest.raises(FedgistError, match=says):
        site(tmp_path).prepare(plan_of(raw | SECURE, **changed))


def test_a_site_asks_for_as_many_as_its_policy_says(tmp_path: Path) -> None:
    write_rows(tmp_path)
    with pytest.raises(FedgistError, match=r"policy.least_sites = 5; 3 sites have mlp"):
        site(tmp_path, policy={"least_sites": 5}).prepare(plan_of(PLAIN | SECURE))


@pytest.mark.parametrize(
    "key",
    [
        "a." * 30_000 + "a",
        '"b" . ' * 30_000 + "a",
        "'='." * 20_000 + "a",
        '"\\"".' + "a." * 9_999 + "a",
    ],
)
def test_a_recipe_whose_key_has_many_parts_is_refused_before_it_is_parsed(key: str) -> None:
    # seen: 60 kB took 3.7 GB and 16 s, before any policy was asked
    with pytest.raises(RecipeError, match="a key has more than 32 parts"):
        recorded(f"seed = 1\n{key} = 1\n")


def test_dots_in_texts_are_no_parts_of_keys() -> None:
    text = recipe_text(parsed(recipe("fedavg", model=MODEL)))
    assert recorded(f"{text}\n# {'a.' * 99}\n") == recorded(text)
    with pytest.raises(RecipeError, match="unknown key"):
        recorded(f'{text}\n[x]\n"y" = "{"a." * 99}"\n')
