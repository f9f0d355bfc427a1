"""A server and its sites over a wire: what is refused, absent, late or asked again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fedgist
from changed_wires import ANY_SIZE, only, resealed, with_wire
from fedgist.core import random
from fedgist.core.message import Form, why_refused
from fedgist.core.method import Context, Nothing, Order
from fedgist.core.tree import map_leaves, named
from fedgist.engines.engine import Engine, Simulation, TrainingLoss
from fedgist.engines.message_form import download_form, upload_form
from fedgist.errors import FederationError, RecipeError
from fedgist.methods import METHODS
from fedgist.methods.fedavg import FedAvg
from fedgist.runs.files.record import read_lines
from fedgist.runs.round import Observer, ServerRun, start_server
from fedgist.runs.run_rounds import Place, run_server
from fedgist.testing.example_methods import EXAMPLES, Relay
from fedgist.testing.small_worlds import (
    ALONE,
    SIZES,
    blobs,
    federation,
    law_world,
    loopback,
    rows,
    state_of,
    two_architectures,
    world,
)
from fedgist.wire.envelope import Header, seal, unseal
from fedgist.wire.loopback_engine import RUN, LoopbackEngine, outlined
from fedgist.wire.outline import Outline
from fedgist.wire.remote_engine import Patience, RemoteEngine
from fedgist.wire.wire import LoopbackWire, Parts
from method_objects import METHOD_OBJECTS, each

SILENT = ("local", "centralized")  # these send nothing


BAD: list[tuple[Callable[[bytes], list[bytes]], str]] = [
    (lambda b: [b[:-5]], "not what its digest says"),
    (lambda b: [resealed(b, lambda a: a * float("nan"))], "is not finite"),
    # five such numbers overflow in the sum
    (lambda b: [resealed(b, lambda a: torch.full_like(a, 3e38))], "the sum over 5 clients would n"),
    (lambda b: [resealed(b, lambda a: torch.full_like(a, -8e37))], "the sum over 5 clients would"),
    (lambda b: [resealed(b, lambda a: a.double())], "is float64, not float32"),
    (lambda b: [resealed(b, lambda a: a.unsqueeze(0))], "has shape"),
    (lambda b: [b + b"x" * (2 << 20)], "bytes; at most"),
    (lambda b: [resealed(b, run="another")], "it is of run 'another', not 'loopback'"),
    (lambda b: [resealed(b, client=4)], "names client 4, but came from client 2"),
    (lambda b: [seal(unseal(b, ANY_SIZE)[0], {})], "it holds no upload"),
    (lambda b: [seal(unseal(b, ANY_SIZE)[0], {"upload": Nothing()})], "it is a Nothing, not a"),
    (lambda b: [b"hello"], "not an envelope"),
]


@pytest.mark.parametrize(("change", "says"), BAD)
def test_a_bad_reply_is_refused_by_name_and_the_round_goes_on(
    change: Callable[[bytes], list[bytes]], says: str
) -> None:
    small_world = world("fedavg")
    fed = with_wire(small_world, only(2, change))
    line, _ = fed.advance()
    (entry,) = line["refused"]
    assert entry["client"] == 2
    assert says in entry["reason"]
    assert line["clients/replied"] == len(SIZES) - 1
    assert "absent" not in line
    # only the replies of the other four count
    without = federation(small_world, ALONE, loopback)
    orders, downs, ctx = without.downloads(0)
    ctx = replace(ctx, round=1, stage="train")
    others = [i for i in range(5) if i != 2]
    answer = without.engine.ask(ctx, [orders[i] for i in others], [downs[i] for i in others])
    assert line["comm/up_bytes"] == sum(answer.upload_bytes.values())


COUNTED = {"fedavg": "rows", "fedadam": "rows", "fedlog": "total", "fedproto": "weight"}
LOCAL = {"unit": "record", "epsilon": 50.0, "delta": 0.01, "clip": 1.0, "where": "local"}


def counting(field: str, count: float) -> Callable[[bytes], list[bytes]]:
    """Return a change of a reply: the first count of its upload is another one."""

    def change(blob: bytes) -> list[bytes]:
        header, messages = unseal(blob, ANY_SIZE)
        if "upload" not in messages:
            return [blob]
        array = getattr(messages["upload"], field).clone()
        array.view(-1)[0] = count
        messages["upload"] = replace(messages["upload"], **{field: array})
        return [seal(header, messages)]

    return change


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("count", [-3.0, 2.0**32])
def test_an_impossible_count_is_refused_by_name_and_the_round_goes_on(
    name: str, count: float
) -> None:
    fed = with_wire(world(name), only(2, counting(COUNTED[name], count)))
    line, _ = fed.advance()
    (entry,) = line["refused"]
    assert entry["client"] == 2
    words = f"{COUNTED[name]} holds the count {count:g}; a count is at least 0 and at most 214748"
    assert words in entry["reason"]
    assert line["clients/replied"] == len(SIZES) - 1


@pytest.mark.parametrize("name", ["fedlog", "fedproto"])
def test_counts_with_a_clients_own_noise_may_be_negative_but_not_anything(name: str) -> None:
    small_world = world(name, privacy=LOCAL)
    privacy = small_world.server.task.privacy
    assert privacy is not None
    for far, taken in ((-5.0, True), (-20.0, False)):
        fed = with_wire(small_world, only(2, counting(COUNTED[name], far * privacy.deviation)))
        assert ("refused" not in fed.advance()[0]) == taken


SUMMED = [name for name in METHOD_OBJECTS if name in METHODS and name not in SILENT]


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMED)
def test_sites_that_send_the_largest_numbers_spoil_no_servers_state(name: str) -> None:
    # seen: in nine of twelve methods the state was infinite, and all sites refused it for good
    small_world = law_world(METHOD_OBJECTS[name])

    def largest(array: torch.Tensor) -> torch.Tensor:
        return torch.full_like(array, 3.4e38) if array.is_floating_point() else array

    def change(client: int, blob: bytes) -> list[bytes]:
        return [resealed(blob, largest) if client < 2 else blob]

    fed = with_wire(small_world, change)
    for number in range(3):
        fed.do_round(number)
        fed.round = number
        for array in named(fed.server).values():
            assert not array.is_floating_point() or bool(torch.isfinite(array).all())


def test_a_state_that_is_not_finite_is_not_taken_and_the_record_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_world, learnt = world("fedavg"), FedAvg.server_update

    def server_update(self: Any, server: Any, replies: Any, ctx: Context) -> Any:
        new = learnt(self, server, replies, ctx)
        return map_leaves(lambda leaf: leaf / 0.0, new) if ctx.round == 2 else new

    monkeypatch.setattr(FedAvg, "server_update", server_update)
    fed = federation(small_world, ALONE)
    fed.advance()
    before = named(fed.server)
    line, _ = fed.advance()
    (event,) = line["events"]
    assert "was not finite after round 2 in stage 'train': its previous state is kept" in event
    assert all(torch.equal(array, before[name]) for name, array in named(fed.server).items())
    assert "events" not in fed.advance()[0]


def test_silence_is_absence_and_repetition_counts_once() -> None:
    small_world = world("fedavg")
    silent = with_wire(small_world, only(2, lambda b: []))
    line, _ = silent.advance()
    assert line["absent"] == [{"client": 2, "reason": "no reply in time"}]
    assert line["clients/replied"] == 4
    twice, once = (
        with_wire(small_world, lambda c, b: [b, b]),
        federation(small_world, ALONE, loopback),
    )
    first, second = twice.advance()[0], once.advance()[0]
    assert first["comm/up_bytes"] == second["comm/up_bytes"]
    name = "weights/mlp/arrays/1.weight"
    assert torch.equal(named(twice.server)[name], named(once.server)[name])


def test_a_loss_that_is_not_finite_is_not_recorded() -> None:
    def change(client: int, blob: bytes) -> list[bytes]:
        header, messages = unseal(blob, ANY_SIZE)
        if client == 1 and "loss" in messages:
            messages["loss"] = TrainingLoss(torch.tensor(float("nan")))
            return [seal(header, messages)]
        return [blob]

    line, _ = with_wire(world("fedavg"), change).advance()
    assert line["clients/replied"] == len(SIZES)
    assert 0 < line["train/loss"] < 10


@pytest.mark.parametrize(
    "loss",
    [
        TrainingLoss(torch.tensor(1 + 1j)),  # seen: it ended the server
        TrainingLoss(torch.tensor(-(2**62))),
        TrainingLoss(torch.tensor([1.0, 2.0])),
        TrainingLoss(torch.tensor(1.0, dtype=torch.float64)),
        Nothing(),
    ],
)
def test_a_loss_that_is_none_refuses_its_reply(loss: Any) -> None:
    def change(client: int, blob: bytes) -> list[bytes]:
        header, messages = unseal(blob, ANY_SIZE)
        if client == 1 and "loss" in messages:
            return [seal(header.model_copy(update={"messages": {}}), messages | {"loss": loss})]
        return [blob]

    line, _ = with_wire(world("fedavg"), change).advance()
    (entry,) = line["refused"]
    assert entry == {"client": 1, "reason": "its training loss is not one number of 32 bits"}


class SlowTraining(LoopbackWire):
    """A wire on which client 2's reply of round 1 arrives while the models are evaluated."""

    held: ClassVar[list[tuple[int, bytes]]] = []

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        replies = list(super().exchange(envelopes, deadline_s, largest))
        header, _ = unseal(replies[0][1], ANY_SIZE)
        if header.stage == "evaluate":
            delivered, self.held[:] = [*self.held, *replies], []
            return iter(delivered)
        self.held[:] = [pair for pair in replies if pair[0] == 2 and header.round == 1]
        return iter([pair for pair in replies if pair not in self.held])


def test_a_reply_that_arrives_during_an_evaluation_is_not_lost() -> None:
    small_world = world("fedavg")
    wire = SlowTraining({})
    engine = loopback(small_world, ALONE, wire)
    wire.clients = {client: site.handle for client, site in engine.sites.items()}
    fed = ServerRun(small_world.server, engine, start_server(small_world.server))
    first, second = fed.advance()[0], fed.advance()[0]
    assert first["absent"] == [{"client": 2, "reason": "no reply in time"}]
    assert second["late"] == [{"client": 2, "answers": 1}]
    assert second["comm/up_bytes"] == first["comm/up_bytes"] * 6 // 4
    assert "eval/client/accuracy_mean" in first


@pytest.mark.parametrize(
    "spoil",
    [
        {"values": {"accuracy": torch.tensor(float("inf"))}},
        {"values": {"[red]": torch.tensor(1.0)}},
        {"values": {"accuracy": torch.ones(3)}},
        {"values": {"accuracy": torch.tensor(1e30)}},
        {"values": {"accuracy": torch.tensor(-0.1)}},
        {"rows": torch.tensor(2**62)},
        {"confusion": torch.full((3, 3), 2**62)},
        {"rows": torch.tensor(-5)},
        {"confusion": torch.ones(2, 2)},
        {"confusion": torch.full((3, 3), float("nan"))},
        {"confusion": torch.full((3, 3), -1)},
        {"rows": torch.tensor(float("inf"))},
    ],
)
def test_a_score_that_is_none_is_missing_and_the_others_count(spoil: dict[str, Any]) -> None:
    def change(client: int, blob: bytes) -> list[bytes]:
        header, messages = unseal(blob, ANY_SIZE)
        if client == 1 and "score-" in messages:
            return [seal(header, {"score-": replace(messages["score-"], **spoil)})]
        return [blob]

    line, details = with_wire(world("local"), change).advance()
    assert [entry["client"] for entry in details] == [0, 2, 3, 4]
    assert not [column for column in line if "[red]" in column]
    assert (line["eval/client/count"], line["eval/client/missing"]) == (4, 1)
    (entry,) = line["unscored"]
    assert entry["client"] == 1
    assert entry["reason"].startswith("its score is not valid: ")


def test_a_client_that_is_gone_is_not_connected() -> None:
    small_world = world("fedavg")
    fed = federation(small_world, ALONE, loopback)
    assert isinstance(fed.engine, LoopbackEngine)
    wire = fed.engine.remote.wire
    assert isinstance(wire, LoopbackWire)
    del wire.clients[3]
    line, _ = fed.advance()
    assert line["absent"] == [{"client": 3, "reason": "not connected"}]


def test_a_site_refuses_a_download_that_is_not_valid() -> None:
    # seen: a NaN head trained silently at a site
    small_world = world("fedlog")
    fed = federation(small_world, ALONE, loopback)
    fed.server = map_leaves(lambda a: a * float("nan"), fed.server)
    before = state_of(fed)
    line, _ = fed.do_round(1)
    assert [e["client"] for e in line["refused"]] == list(range(5))
    assert all(
        "the download is not valid: eta is not finite" in e["reason"] for e in line["refused"]
    )
    after = state_of(fed)
    assert all(torch.equal(before[k], after[k]) for k in before if k.startswith("clients/"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"run": "x"}, "this site is in run 'loopback', not 'x'"),
        ({"client": 1}, "this site has no client 1"),
        ({"architecture": "x"}, "this site has no model 'x'"),
        ({"stage": "x"}, "no stage 'x' in round 1"),
        ({"purpose": "reply"}, "a reply cannot be answered"),
        ({"purpose": "score", "split": "test"}, "no rows of the split 'test'"),
    ],
)
def test_a_site_answers_nothing_that_it_was_not_made_for(fields: dict[str, Any], says: str) -> None:
    small_world = world("local")
    engine = loopback(small_world)
    header = Header(purpose="train", run=RUN, round=1, stage="train", client=0, architecture="mlp")
    asked = seal(header.model_copy(update=fields), {"download": Nothing()})
    answer, messages = unseal(engine.sites[0].handle(asked), ANY_SIZE)
    assert (answer.purpose, messages) == ("refusal", {})
    assert says in answer.reason


def test_a_site_goes_back_as_far_as_it_remembers() -> None:
    small_world = world("local", train={"num_rounds": 9})
    site = loopback(small_world).sites[0]  # remembers four rounds

    def ask(number: int) -> Header:
        header = Header(
            purpose="train", run=RUN, round=number, stage="train", client=0, architecture="mlp"
        )
        return unseal(site.handle(seal(header, {"download": Nothing()})), ANY_SIZE)[0]

    states = {}
    for number in range(1, 7):
        assert ask(number).purpose == "reply"
        states[number] = {k: v.clone() for k, v in site.host.state().items()}
    assert ask(4).purpose == "reply"  # the stored reply: nothing is undone
    assert all(torch.equal(states[6][k], v) for k, v in site.host.state().items())
    assert "lies too far back" in ask(2).reason


@pytest.mark.slow
def test_a_server_without_data_writes_a_complete_run_directory(tmp_path: Path) -> None:
    small_world = world("fedlog", architectures=two_architectures(METHODS["fedlog"]()))
    sites = loopback(small_world).sites
    side = replace(
        small_world.server, task=outlined(replace(small_world.server.task, test_sets={}))
    )
    wire = LoopbackWire({client: site.handle for client, site in sites.items()})
    engine: Engine = RemoteEngine(side.method, wire, run=RUN)
    assert not isinstance(engine, Simulation)

    run_server(side, engine, Place(tmp_path), Observer())
    names = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert names == {
        "recipe.toml",
        "metrics.json",
        "rounds.jsonl",
        "clients.jsonl",
        "result.json",
        "checkpoint/state.safetensors",
    }
    lines = read_lines(tmp_path / "rounds.jsonl")
    local = federation(small_world, ALONE)
    for line in lines:
        column = "eval/client/accuracy_mean"
        assert line[column] == local.advance()[0][column]
    fedgist_run = json.loads((tmp_path / "result.json").read_text())
    assert fedgist_run["status"] == "finished"


RECIPE: dict[str, Any] = {
    "clients": {"num_clients": 5},
    "model": {"name": "mlp", "hidden": [5]},
    "train": {"num_rounds": 4, "lr": 0.05, "optimizer": "sgd", "batch_size": 4},
    "engine": {"name": "loopback", "checkpoint_every": 1},
}
TESTS = list(torch.split(torch.arange(30), 6))
GIVEN: dict[str, Any] = {"data": blobs(), "clients": rows(), "clients_test": TESTS}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedlog", "fedavg", "local"])
def test_the_loopback_runs_resumes_and_gives_models_like_the_local_engine(
    method: str, tmp_path: Path
) -> None:
    recipe = RECIPE | {"method": {"name": method}}
    short = recipe | {"train": RECIPE["train"] | {"num_rounds": 2}}
    whole = fedgist.run(recipe, out=tmp_path / "whole", **GIVEN)
    local = fedgist.run(recipe | {"engine": {"workers": 1, "cohort_size": 5}}, **GIVEN)
    x = torch.linspace(-2, 2, 12).view(2, 6)
    torch.testing.assert_close(whole.model(3)(x), local.model(3)(x), atol=1e-4, rtol=1e-4)
    assert [r["comm/up_bytes"] for r in whole.rounds] == [r["comm/up_bytes"] for r in local.rounds]
    folder = tmp_path / "resumed"
    fedgist.run(short, out=folder, **GIVEN)
    resumed = fedgist.run(recipe, out=folder, resume=True, rounds=4, **GIVEN)
    assert torch.equal(resumed.model(3)(x), whole.model(3)(x))
    assert [list(line) for line in whole.clients] == [list(line) for line in local.clients]
    accuracy = "eval/client/accuracy_mean"
    assert [r[accuracy] for r in resumed.rounds] == [r[accuracy] for r in whole.rounds]


def test_the_loopback_refuses_by_name_what_sites_cannot_do() -> None:
    with pytest.raises(
        RecipeError, match=r"evaluate.on = 'test' needs the whole test set at every"
    ):
        fedgist.run(RECIPE | {"evaluate": {"on": "test"}}, **GIVEN)
    with pytest.raises(RecipeError, match=r"engine.name = 'loopback': method centralized merges"):
        fedgist.run(RECIPE | {"method": {"name": "centralized"}}, **GIVEN)


def test_scores_and_losses_stay_home_where_they_are_not_shared() -> None:
    for engine in ({"name": "loopback"}, {"workers": 1, "cohort_size": 5}):
        recipe = RECIPE | {"engine": engine, "privacy": {"share_measurements": False}}
        result = fedgist.run(recipe | {"method": {"name": "fedavg"}}, **GIVEN)
        columns = {column for line in result.rounds for column in line}
        assert not [c for c in columns if c.startswith(("eval/client", "train/loss"))]
        assert result.clients == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"name": "loopback"}, {"workers": 2, "cohort_size": 2}])
def test_late_replies_are_recorded_dropped_or_used_and_resumed(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    recipe = RECIPE | {"engine": {**engine, "checkpoint_every": 1}, "clients": {"delay": 0.4}}
    fedavg = recipe | {"method": {"name": "fedavg"}, "seed": 3}
    whole = fedgist.run(fedavg, out=tmp_path / "whole", **GIVEN)
    for line, before in zip(whole.rounds[1:], whole.rounds, strict=False):
        delayed = [e["client"] for e in before.get("absent", ())]
        assert [e["client"] for e in line.get("late", ())] == delayed
        assert line["clients/replied"] + len(line.get("absent", ())) == line["clients/asked"]
    assert any("late" in line for line in whole.rounds)
    folder = tmp_path / "resumed"
    fedgist.run(fedavg | {"train": RECIPE["train"] | {"num_rounds": 2}}, out=folder, **GIVEN)
    resumed = fedgist.run(fedavg, out=folder, resume=True, rounds=4, **GIVEN)
    assert resumed.rounds[-1].get("late") == whole.rounds[-1].get("late")
    x = torch.ones(2, 6)
    assert torch.equal(resumed.model(0)(x), whole.model(0)(x))
    used = fedgist.run(recipe | {"seed": 3}, method=Relay(), **GIVEN)
    assert not any("late" in line for line in used.rounds)  # it accepts them


@pytest.mark.parametrize("name", each())
def test_forms_by_fake_tensors_are_those_of_real_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = METHOD_OBJECTS[name]
    small_world = law_world(method)
    fed = federation(small_world, ALONE)
    ctx: Context = fed.context(
        "train" if "train" in method.stages(fed.context("", 1)) else "scale", 1
    )
    forms: list[Form] = []
    for fails in (False, True):
        if fails:
            monkeypatch.setattr("fedgist.engines.message_form.FAKE", "no device")
        for order in fed.downloads(1)[0]:
            down = method.download(fed.server, order, ctx)
            forms += [upload_form(method, ctx, order.architecture, down)]
            forms += [download_form(method, ctx, order)]
            assert why_refused(down, forms[-1]) is None
    half = len(forms) // 2
    assert forms[:half] == forms[half:]


def test_an_outline_knows_the_shapes_of_what_a_method_shares_and_no_more() -> None:
    # a server that averages bodies may know their shapes without the module that uses them
    method = EXAMPLES["shared_bodies"]
    task = world(method).server.task
    arch = task.architectures["mlp"]
    body = {name: tuple(a.shape) for name, a in task.starts["mlp"].state("body").items()}
    known = replace(Outline.of(arch), shared=body).architecture()
    assert not list(known.module.parameters())
    less = replace(task, architectures={"mlp": known}, starts={"mlp": known.start(0)})
    forms = []
    for knows in (task, less):
        ctx = Context(random.key(0), knows, 1, "train")
        down = method.download(method.init_server(ctx), Order(0, "mlp"), ctx)
        forms.append(upload_form(method, ctx, "mlp", down))
    assert forms[0] == forms[1]
    assert set(forms[1].arrays) == {"rows", *(f"arrays/{name}" for name in body)}


class Unsteady(LoopbackWire):
    """A wire that loses the replies of some clients in the first attempts of a stage."""

    def __init__(self, lost: dict[int, set[int]]) -> None:
        super().__init__({})
        self.lost = lost  # clients by attempt
        self.requests: list[tuple[int, int, str]] = []  # client, attempt, digest of the download

    def exchange(
        self, envelopes: Sequence[tuple[int, Parts]], deadline_s: float | None, largest: int
    ) -> Iterator[tuple[int, bytes]]:
        attempt = 1
        for client, parts in envelopes:
            header, _ = unseal(b"".join(parts), ANY_SIZE)
            if header.purpose == "train":
                attempt = header.attempt
                self.requests.append((client, attempt, header.messages["download"].digest))
        for client, blob in super().exchange(envelopes, deadline_s, largest):
            if client not in self.lost.get(attempt, ()):
                yield client, blob


def patient(lost: dict[int, set[int]], patience: Patience) -> tuple[ServerRun, Unsteady]:
    small_world, wire = world("fedavg"), Unsteady(lost)
    engine = loopback(small_world, ALONE, wire)
    wire.clients = {client: site.handle for client, site in engine.sites.items()}
    engine.remote.patience = patience
    return ServerRun(small_world.server, engine, start_server(small_world.server)), wire


def test_a_round_with_too_few_replies_is_asked_again_and_counts_once() -> None:
    fed, wire = patient({1: {1, 2, 3}, 2: {3}}, Patience(least_replies=4, most_attempts=3))
    line, _ = fed.advance()
    steady, _ = patient({1: {3}}, Patience())
    expected, _ = steady.advance()
    assert line["clients/replied"] == 4
    assert [entry["client"] for entry in line["absent"]] == [3]
    assert line["comm/up_bytes"] == expected["comm/up_bytes"]
    ours, theirs = named(fed.server), named(steady.server)
    for name, array in theirs.items():  # added in the order of the attempts
        torch.testing.assert_close(ours[name], array, atol=1e-6, rtol=1e-6)
    # those that replied are not asked again; the others get the same download
    assert [(client, attempt) for client, attempt, _ in wire.requests] == [
        *((client, 1) for client in range(5)),
        *((client, 2) for client in (1, 2, 3)),
    ]
    assert len({digest for *_, digest in wire.requests}) == 1
    (event,) = line["events"]
    assert event.startswith("round 1, stage train was asked again (attempt 2): 2 of 5 clients rep")


def test_a_run_stops_if_too_few_answer_in_every_attempt() -> None:
    waits: list[str] = []
    fed, _ = patient({1: {0, 1}, 2: {0, 1}}, Patience(least_replies=4, most_attempts=2))
    assert isinstance(fed.engine, LoopbackEngine)
    fed.engine.remote.before_repeating = waits.append
    with pytest.raises(FederationError, match=r"was asked 2 times; 3 of 5 .*client 0: no reply"):
        fed.advance()
    assert len(waits) == 1


def test_answers_that_nobody_asked_for_are_counted() -> None:
    fed = with_wire(world("fedavg"), only(2, lambda blob: [blob, blob, blob]))
    first, second = fed.advance()[0], fed.advance()[0]
    assert first["events"] == second["events"]
    assert first["events"] == ["2 unexpected answers of client 2 dropped"]
