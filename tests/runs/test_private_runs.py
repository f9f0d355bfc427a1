"""Privacy in whole runs: what is refused, released, recorded, and charged when done again."""

from __future__ import annotations

import json
import math
import tomllib
import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedgist
from fedgist.core import privacy as privacy_of_records
from fedgist.core.method import ClientInfo, Context, Order
from fedgist.core.privacy import Privacy
from fedgist.core.replies import gather
from fedgist.core.tree import leaves, named
from fedgist.data.client_rows import Rows
from fedgist.data.lazy_rows import held
from fedgist.engines.engine import EVALUATE
from fedgist.engines.local_engine import LocalEngine
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError
from fedgist.methods import METHODS
from fedgist.methods.fedlog import FedLog
from fedgist.methods.fedrep import FedRep
from fedgist.recipe.reading import make
from fedgist.report.tables import run_tables
from fedgist.runs import run_rounds
from fedgist.runs.files.checkpoint import Binding, Checkpoint, load
from fedgist.runs.files.record import RELEASES, read_lines
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.run_reader import read_run
from fedgist.runs.prepare import hosting_of
from fedgist.runs.round import Observer, add_central_noise
from fedgist.runs.run_rounds import Place, run_server
from fedgist.testing.laws import EPSILON, ROUNDINGS, close
from fedgist.testing.small_worlds import (
    ALONE,
    PAIRS,
    SIZES,
    blobs,
    federation,
    local_engine,
    loopback,
    rows,
    trace,
    world,
    world_of,
)
from fedgist.wire.envelope import Header, seal
from fedgist.wire.loopback_engine import RUN
from fedgist.wire.site import Site, population_of_one
from fedgist.world.privacy_budget import _private_steps, check_rows
from fedgist.world.world import World
from interrupted import StopAfter, bare

# in Python, what is promised and on which condition is a warning
pytestmark = pytest.mark.filterwarnings(
    "ignore:privacy:UserWarning", "ignore:losses:UserWarning", "ignore:simulated:UserWarning"
)

RECORD = {"unit": "record", "epsilon": 2.0, "delta": 0.01, "clip": 3.0}
CLIENT = RECORD | {"unit": "client"}
STEPS = {"bodies": "dp_sgd", "sampling_rate": 0.5, "gradient_clip": 1.0}
IN_POOLS = ("periodic_codist", "merged_codist")  # these have several models
# what these send cannot carry noise
UNFIT = ("cs_fl", "flesd", "fednova", "fedgh", "fedtgp", "feddf", "fedkd")
POISSON = {"sampling": "poisson", "fraction_train": 0.3}
LOCAL = RECORD | {"where": "local"}
EVERY = [RECORD, LOCAL, CLIENT, RECORD | STEPS]
# noise at the server, of a round, and at clients, of each step; the others have no more than these
REPEATED = [CLIENT, RECORD | STEPS] + [
    pytest.param(section, marks=pytest.mark.environment) for section in (RECORD, LOCAL)
]


@pytest.mark.slow
@pytest.mark.parametrize("section", EVERY)
def test_stacked_and_alone_and_over_a_wire_release_the_same(section: dict[str, Any]) -> None:
    alone = trace(world("fedlog", privacy=section), ALONE)
    stacked = trace(world("fedlog", privacy=section), Plan(3))
    wire = trace(world("fedlog", privacy=section), PAIRS, make_engine=loopback)
    assert close(alone.state, stacked.state)
    server = {k: v for k, v in alone.state.items() if k.startswith("server/")}
    assert close(server, {k: v for k, v in wire.state.items() if k.startswith("server/")})
    quiet = trace(world("fedlog"), ALONE)
    without_noise = {k: v for k, v in quiet.state.items() if k.startswith("server/")}
    assert not close(server, without_noise, 0.1 / EPSILON)


@pytest.mark.slow
@pytest.mark.parametrize("section", EVERY)
def test_each_line_says_what_was_spent_and_the_result_how(
    section: dict[str, Any], tmp_path: Path
) -> None:
    recipe = {
        "method": {"name": "fedlog", "head_start": "exchange"},
        "clients": {"num_clients": len(SIZES)},
        "train": {"num_rounds": 4},
        "privacy": section,
        "engine": {"workers": 1, "cohort_size": 2},
    }
    result = fedgist.run(recipe, data=blobs(), clients=rows(), out=tmp_path / "run")
    spent = [line["privacy/epsilon"] for line in result.rounds]
    assert len(spent) == 5, "the exchange is a release as well"
    assert 0 < spent[0] < spent[-1]
    assert spent == sorted(spent)
    assert 0.99 * 2.0 < spent[-1] <= 2.0 + 1e-9
    end = json.loads((tmp_path / "run" / "result.json").read_text())
    assert end["privacy"]["unit"] == section["unit"]
    assert end["privacy"]["releases"] == 5
    conditional = section["unit"] == "record" and "bodies" not in section
    assert any("do not depend on the record" in note for note in end["notes"]) == conditional
    assert any("not covered by epsilon" in note for note in end["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("section", REPEATED)
def test_a_run_that_goes_on_is_as_if_it_had_not_stopped(
    section: dict[str, Any], tmp_path: Path
) -> None:
    recipe = {
        "method": {"name": "fedlog"},
        "clients": {"num_clients": len(SIZES)},
        "train": {"num_rounds": 5, **POISSON},
        "privacy": section,
        "engine": {"workers": 1, "cohort_size": 2, "checkpoint_every": 2},
    }
    given: dict[str, Any] = {"data": blobs(), "clients": rows()}
    with pytest.raises(KeyboardInterrupt):
        fedgist.run(recipe, out=tmp_path / "cut", observer=StopAfter(3), **given)
    fedgist.run(recipe, out=tmp_path / "cut", resume=True, **given)
    fedgist.run(recipe, out=tmp_path / "whole", **given)

    cut, whole = (bare(read_lines(tmp_path / n / "rounds.jsonl")) for n in ("cut", "whole"))
    assert cut == whole


SILENT = ("centralized", "local")
RELAYED: dict[str, dict[str, Any]] = {"fd": {"declare_classes": False}, "repshare": {}}


@pytest.mark.slow
@pytest.mark.parametrize("name", RELAYED)
def test_messages_that_are_relayed_are_protected_at_the_client(name: str) -> None:
    section, options = CLIENT | {"epsilon": 5.0, "clip": 0.5}, RELAYED[name]
    with pytest.raises(RecipeError, match=r"not summed: use privacy\.where = 'local'"):
        world(name, options=options, privacy=section)
    local = {"options": options, "privacy": section | {"where": "local"}}
    alone, stacked = (trace(world(name, **deepcopy(local)), plan) for plan in (ALONE, Plan(3)))
    assert close(alone.state, stacked.state, 10 * ROUNDINGS)
    assert alone.rounds[-1]["privacy/epsilon"] == pytest.approx(5.0)
    fed = federation(world(name, **deepcopy(local)))
    fed.advance()
    sent = fed.server.newest.arrays["total" if name == "repshare" else "mean"]
    assert (sent != 0).all()  # noise is on every number, whoever has a class
    fed.engine.close()


def test_each_observation_is_a_release() -> None:
    def noise(m_up: int) -> float:
        section = {"unit": "record", "epsilon": 1.0, "delta": 0.01, "clip": 1.0, "where": "local"}
        options = {"m_up": m_up, "pick_rate": 0.5}
        spending = world("repshare", options=options, privacy=section).server.spending
        assert spending is not None
        assert spending.described()["releases"] == 3 * (1 + m_up)
        return spending.noise

    # composed Gaussian mechanisms: the root of how many there are
    assert noise(3) == pytest.approx(2 * noise(0), rel=1e-6)


def test_exactly_so_many_rows_depend_on_each_other() -> None:
    section = {"unit": "record", "epsilon": 1.0, "delta": 0.01, "clip": 1.0, "where": "local"}
    with pytest.raises(RecipeError, match="not sums of one term a row"):
        world("repshare", privacy=section)
    with pytest.raises(RecipeError, match="single bits"):
        world("repshare", options={"wishes": True, "pick_rate": 0.1}, privacy=section)
    with pytest.raises(RecipeError, match="single bits"):
        world("fd", privacy=section | {"unit": "client"})


def test_counts_that_noise_alone_makes_are_not_heard() -> None:
    section = {"unit": "record", "epsilon": 50.0, "delta": 0.01, "clip": 1.0, "where": "local"}
    options = {"pick_rate": 1.0, "m_down": 4}
    fed = federation(world("repshare", options=options, privacy=section))
    fed.advance()
    counts = fed.server.newest.arrays["rows"][:, 1:]
    floor = 2 * fed.task.privacy.deviation  # type: ignore[union-attr]
    down = fed.method.download(fed.server, Order(0, "mlp"), fed.context("train", 2))
    assert down.there.sum() == (counts[1:] > floor).sum()
    assert (counts[1:] > 0).sum() > down.there.sum() > 0
    fed.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in {*SILENT, *RELAYED}])
def test_clients_of_every_method_that_sums_numbers_are_protected(name: str) -> None:
    section = CLIENT | {"epsilon": 5.0, "clip": 0.5}
    if name in UNFIT:
        with pytest.raises(RecipeError, match=f"method {name} sends"):
            world(name, privacy=section)
        return
    deep: dict[str, Any] = {"privacy": section, "model": {"hidden": [7, 5]}}
    if name in IN_POOLS:
        models = {n: {"model": "mlp", "hidden": [7, 5], "share": 1} for n in ("few", "many")}
        deep = {"privacy": section, "architectures": models}
    alone = trace(world(name, **deep), ALONE)
    stacked = trace(world(name, **deep), Plan(3))
    assert close(alone.state, stacked.state, 10 * ROUNDINGS)
    assert alone.rounds[-1]["privacy/epsilon"] == pytest.approx(5.0)
    fed = federation(world(name, **deep))
    number = 0 if fed.method.stages(fed.context("", 0)) else 1
    for stage in fed.method.stages(fed.context("", number)):
        ctx = fed.context(stage, number)
        if fed.method.orders(fed.server, [], ctx) is None:
            continue  # the server's own work
        orders = fed.method.select(fed.server, fed.side.online(1), ctx)
        downs = [fed.method.download(fed.server, order, ctx) for order in orders]
        squares = []
        for order, down in zip(orders, downs, strict=True):
            (part,) = fed.engine.ask(ctx, [order], [down]).subtotals
            sums = [float(leaf.double().square().sum()) for leaf in leaves(part.message)]
            squares.append(sum(sums))
        # one client has one row, of which a balanced loss learns nothing
        assert all(0 < square <= 0.5**2 for square in squares if square or name != "fedrod")
        assert any(squares)


@pytest.mark.parametrize("name", ["fedavg", "lg_fedavg"])
def test_private_averages_move_by_the_mean_of_the_differences(name: str) -> None:
    # rejects weighing by rows, which are not released, and dividing by those that answered
    section = CLIENT | {"clip": 10.0}
    small = world(name, privacy=section, train={"lr": 0.1})
    task = small.server.task
    assert task.privacy is not None
    quiet = replace(task, privacy=replace(task.privacy, deviation=0.0))
    small = replace(small, server=replace(small.server, task=quiet))
    fed = federation(small)
    before = {k: v.clone() for k, v in named(fed.server).items()}
    ctx = fed.context("train", 1)
    orders = fed.method.select(fed.server, fed.side.online(1), ctx)
    downs = [fed.method.download(fed.server, order, ctx) for order in orders]
    answer = fed.engine.ask(ctx, orders[:4], downs[:4])  # one of five does not answer
    replies = gather(answer.subtotals, answer.each)
    replies = add_central_noise(small.server, fed.server, replies, orders, ctx)
    after = named(fed.method.server_update(fed.server, replies, ctx))
    total = gather(answer.subtotals, ()).total()
    for key, array in before.items():
        step = named(total)["arrays/" + key.rpartition("/")[2]] / 5
        assert torch.allclose(after[key], array + step, atol=1e-6)
        assert not torch.allclose(after[key], array + step * 5 / 4, atol=1e-6), key


def drawn_one_by_one(privacy: Privacy | None, **sections: Any) -> World:
    """A world that draws clients one by one, with just this privacy: nothing is calibrated."""
    small = world("fedlog", train=POISSON, **sections)
    task = replace(small.server.task, privacy=privacy)
    return replace(small, server=replace(small.server, task=task))


TWO = {
    "few": {"model": "mlp", "hidden": [5], "share": 0.4},
    "many": {"model": "mlp", "hidden": [4, 5], "share": 0.6},
}


def test_an_architecture_without_a_drawn_client_has_a_total_of_noise_beside_the_others() -> None:
    # rejects totals of the drawn architectures alone, which tell that the other one was empty
    privacy = Privacy("client", "central", 1.0, 3.0)
    small = world("fedavg", train=POISSON, architectures=TWO)
    task = replace(small.server.task, privacy=privacy)
    fed = federation(replace(small, server=replace(small.server, task=task)))
    ctx = fed.context("train", 1)
    names = {client.id: client.architectures[0] for client in fed.side.clients}
    drawn = next(client for client, name in names.items() if name == "few")
    order = Order(drawn, "few")
    answer = fed.engine.ask(ctx, [order], [fed.method.download(fed.server, order, ctx)])
    replies = gather(answer.subtotals, answer.each)
    assert [total.architecture for total in replies.totals] == ["few"]
    noisy = add_central_noise(fed.side, fed.server, replies, [order], ctx)
    assert [total.architecture for total in noisy.totals] == ["few", "many"]


def test_steps_of_every_phase_are_accounted_for() -> None:
    task = world("fedlog", privacy=RECORD | STEPS).server.task
    assert task.privacy is not None
    assert task.privacy.steps is not None
    counts = _private_steps(FedRep(head_epochs=3), task)
    epochs = 3 + task.training.local_epochs
    rate = task.privacy.steps.rate
    assert set(counts[1:]) == {math.ceil(3 / rate) + math.ceil((epochs - 3) / rate)}


def test_totals_without_a_client_are_noise_over_as_many_as_are_drawn_on_average() -> None:
    # rejects a group that is silent where nobody was drawn, and means over all clients
    privacy = Privacy("record", "central", 1.0, 3.0)
    small = drawn_one_by_one(privacy, architectures=TWO)
    fed = federation(small)
    ctx = fed.context("train", 1)
    replies = add_central_noise(small.server, fed.server, gather((), ()), [], ctx)
    (total,) = replies.totals  # one of all architectures
    assert total.architecture == "all"
    assert total.clients == ()
    assert all((leaf != 0).all() for leaf in leaves(total.message))
    assert replies.expected == pytest.approx({"few": 0.6, "many": 0.9, "all": 1.5})


@pytest.mark.parametrize("grid", [0.0, 2.0**-12])
def test_clients_are_drawn_by_the_seed_or_by_the_system(grid: float) -> None:
    # rejects a server of the system that draws from the seed, which anyone can repeat
    clients = [ClientInfo(number, ("mlp",)) for number in range(200)]
    small = drawn_one_by_one(Privacy("record", "central", 1.0, 3.0, grid=grid))
    task, fed = replace(small.server.task, num_clients=200), federation(small)
    ctx = replace(fed.context("train", 1), task=task)
    first, second = (
        {order.client for order in fed.method.select(fed.server, clients, ctx)} for _ in range(2)
    )
    assert 0 < len(first) < 200
    assert (first == second) == (not grid)


@pytest.mark.slow
def test_an_empty_draw_releases_noise_like_any_other() -> None:
    small = world("fedlog", privacy=RECORD, train={"sampling": "poisson", "fraction_train": 1e-9})
    fed = federation(small)
    before = named(fed.server)["eta"].clone()
    line, _ = fed.advance()
    assert line["clients/asked"] == 0
    assert not torch.equal(before, named(fed.server)["eta"])
    plain = federation(world("fedlog", train={"sampling": "poisson", "fraction_train": 1e-9}))
    before = named(plain.server)["eta"].clone()
    plain.advance()
    assert torch.equal(before, named(plain.server)["eta"]), "without privacy nothing happens"


def test_clients_are_drawn_one_by_one() -> None:
    fed = federation(world("fedavg", train=POISSON))
    counts = []
    for number in range(1, 401):
        ctx = fed.context("train", number)
        counts.append(len(fed.method.select(fed.server, fed.side.online(number), ctx)))
    draws = torch.tensor(counts, dtype=torch.float64)
    assert abs(float(draws.mean()) - 0.3 * 5) < 0.15
    assert abs(float(draws.var()) - 5 * 0.3 * 0.7) < 0.25
    assert min(counts) == 0


@pytest.mark.parametrize(
    ("privacy", "others", "says"),
    [
        ({"epsilon": 0.0}, {}, "privacy.epsilon = 0.0: must be greater than 0"),
        ({"delta": 1.0}, {}, "privacy.delta = 1.0: must be less than 1"),
        # seen: an overflow in the sensitivity, and an epsilon that was NaN
        ({"clip": 1e300}, {}, "privacy.clip = 1e+300: must be at most 1000000"),
        ({"epsilon": 1e300}, {}, "privacy.epsilon = 1e+300: must be at most 10000"),
        ({"delta": 0.0}, {}, "privacy.delta = 0.0: must be at least 1e-15"),
        ({"clip": None}, {}, "unit = 'record' needs privacy.clip"),
        ({"clip": 0.0}, {}, "privacy.clip = 0.0: must be greater than 0"),
        ({"unit": "rows"}, {}, "must be 'none', 'record' or 'client'"),
        ({"unit": "none"}, {}, "nothing reads it: privacy.unit is 'none'"),
        ({"bodies": "dp_sgd"}, {}, "bodies = 'dp_sgd' needs privacy.sampling_rate"),
        ({"sampling_rate": 0.5}, {}, "nothing reads it: privacy.bodies is 'fixed'"),
        (STEPS | {"accounting": "paper"}, {}, "use 'tight'"),
        ({"unit": "client"} | STEPS, {}, "it is for privacy.unit = 'record'"),
        ({}, {"method": {"name": "fedavg"}}, "not sums of one term a row"),
        ({}, {"method": {"name": "local"}}, "method local sends nothing to protect"),
        ({}, {"data": {"normalize": "client"}}, "state data.mean"),
        ({}, {"evaluate": {"patience": 3}, "data": {"validation": 0.2}}, "does not cover choosing"),
        (STEPS, {"train": {"class_weights": "balanced"}}, "depend on all rows"),
        (STEPS, {"train": {"clip_norm": 1.0}}, "privacy.gradient_clip"),
        (STEPS, {"model": {"name": "resnet18"}, "data": {"name": "given"}}, "batch norm"),
        ({}, {"clients": {"num_clients": len(SIZES), "max_norm": 9.0}}, "because of one"),
        ({"delta": 1e-300}, {}, "privacy.delta = 1e-300: must be at least 1e-15"),
        (
            {"min_replies": 2},
            {"train": POISSON},
            "privacy.min_replies = 2 tells how many clients were drawn",
        ),
    ],
)
def test_what_privacy_cannot_promise_is_refused_in_one_line(
    privacy: dict[str, Any], others: dict[str, Any], says: str
) -> None:
    section = {k: v for k, v in (RECORD | privacy).items() if v is not None}
    images = "resnet18" in json.dumps(others)
    raw = {
        "method": {"name": "fedlog"},
        "clients": {"num_clients": len(SIZES)},
        "engine": {"workers": 1, "cohort_size": 2},
        "privacy": section,
        **{k: v for k, v in others.items() if not (k == "data" and images)},
    }
    given: dict[str, Any] = {"data": blobs(), "clients": rows()}
    if images:
        flat = blobs()
        grey = replace(flat, x=flat.x.new_zeros(len(flat.y), 1, 32, 32), mean=(0.0,), std=(1.0,))
        test = flat.x.new_zeros(len(flat.y_test), 1, 32, 32)
        given["data"] = replace(grey, x_test=test)
    with pytest.raises(RecipeError, match=r".") as caught:
        fedgist.run(raw, **given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_of_several_clients_is_no_record_of_one() -> None:
    # seen: a row in five clients moved the total by 4.5 deviations; epsilon 19.65 where 2 was said
    shared = rows()
    shared[2] = torch.cat([shared[2], shared[0][:1]])
    raw = {
        "method": {"name": "fedlog"},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1, "cohort_size": 2},
    }
    says = "row 0 is in 2 clients, and each would release it: give each row to one client"
    with pytest.raises(RecipeError, match=says):
        fedgist.run(raw | {"privacy": RECORD}, data=blobs(), clients=shared)
    # rows that clients hold out are theirs as well: by counts of them a search may choose
    section = make({"privacy": RECORD}).privacy
    train, held = Rows.of([torch.tensor([0, 3])]), Rows.of([torch.tensor([3])])
    with pytest.raises(RecipeError, match="row 3 is in 2 clients"):
        check_rows(section, blobs(), train, held)
    # a client's presence hides all of its rows, wherever else they are
    fedgist.run(raw | {"privacy": CLIENT}, data=blobs(), clients=shared)


TABLE = "age,town,y\n" + "".join(f"{20 + i},{'ABC'[i % 3]},{i % 2}\n" for i in range(40)) + ",A,0\n"
TEXTS = "".join(f'{{"text": "a word of {name}"}}\n' for name in ("Bonn", "Ulm", "Kiel") * 5)
ON_TABLES = {"name": "table", "path": "t.csv", "label": "y", "missing": "mean"}
STATED = {"mean": [40.0], "std": [12.0]}
NUMBERS = {"name": "table", "path": "t.csv", "label": "y", "ignore": ["age"]}
ON_TEXTS = {"name": "text_file", "file": "t.jsonl", "test_fraction": 0.2}


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (ON_TABLES, "t.csv: means and deviations of the inputs are measured on the training rows"),
        (ON_TABLES | {"normalize": "none"}, "missing numbers are replaced by means of the train"),
        (ON_TABLES | STATED, "missing numbers are replaced by means of the training rows"),
        (NUMBERS, "the categories of columns are those of the training rows: list them in data.c"),
        ({**ON_TABLES, "missing": "refuse", "columns": {"town": ["A", "B", "C"]}}, ""),
        (ON_TEXTS, "the vocabulary is made of the training texts: name a file of words in data.wo"),
        (ON_TEXTS | {"words": {"file": "words.txt"}}, ""),
        ({"name": "digits"}, ""),  # its moments are public
    ],
)
def test_what_is_measured_on_the_rows_is_stated_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], says: str, unit: str
) -> None:
    # seen: one row moved the moments, and all inputs; one release of 8.96 where 1.0 was said
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(TABLE)
    Path("t.jsonl").write_text(TEXTS)
    Path("words.txt").write_text("a\nword\nand\n")
    text = "name" in data and data["name"] == "text_file"
    raw = {
        "method": {"name": "fedavg" if text or unit == "client" else "fedlog"},
        "data": data,
        "clients": {"num_clients": 2},
        "partition": {"name": "iid"},
        "train": {"num_rounds": 1},
        "privacy": (RECORD | STEPS) if unit == "record" else CLIENT,
        **({"objective": {"name": "next_word"}, "model": {"name": "word_lstm"}} if text else {}),
    }
    if text and unit == "record":  # texts are refused before, whatever their vocabulary
        return
    if says:
        with pytest.raises(RecipeError, match=f"privacy.unit = '{unit}': .*{says}"):
            world_of(make(raw))
    else:
        world_of(make(raw))


@pytest.mark.parametrize("stated", [{}, {"normalize": "none"}, {"mean": [0.0], "std": [1.0]}])
def test_moments_of_arrays_are_stated_under_privacy(stated: dict[str, Any]) -> None:
    data = blobs()
    arrays = tuple(part.numpy() for part in (data.x, data.y, data.x_test, data.y_test))
    raw = {
        "method": {"name": "fedlog"},
        "data": stated,
        "clients": {"num_clients": 2},
        "partition": {"name": "iid"},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1, "cohort_size": 2},
        "privacy": RECORD | STEPS,
    }
    if stated:
        fedgist.run(raw, data=arrays)
        return
    with pytest.raises(RecipeError, match=r"your data: means and deviations .* state data.mean"):
        fedgist.run(raw, data=arrays)


def test_a_recorded_recipe_without_privacy_reads_back() -> None:
    recipe = make({})
    assert make(tomllib.loads(recipe.to_toml())).privacy == recipe.privacy


def test_rounds_among_which_a_budget_was_divided_cannot_be_raised(tmp_path: Path) -> None:
    recipe = {
        "method": {"name": "fedlog"},
        "clients": {"num_clients": len(SIZES)},
        "train": {"num_rounds": 2},
        "privacy": RECORD,
        "engine": {"workers": 1, "cohort_size": 2},
    }
    given: dict[str, Any] = {"data": blobs(), "clients": rows(), "out": tmp_path / "run"}
    fedgist.run(recipe, **given)
    for number in (3, 5):
        with pytest.raises(RecipeError, match=r"privacy.epsilon was divided among 2 rounds"):
            fedgist.run(recipe, resume=True, rounds=number, **given)


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "classes"), [(1, 3), (5, 3), (5, 7)])
def test_one_client_and_classes_that_nobody_has_run(clients: int, classes: int) -> None:
    data = replace(blobs(), num_classes=classes)
    mine = rows() if clients > 1 else [torch.arange(sum(SIZES))]
    for section in (*EVERY, CLIENT | {"where": "local"}):
        recipe = {
            "method": {"name": "fedlog"},
            "clients": {"num_clients": clients},
            "train": {"num_rounds": 2},
            "privacy": section,
            "engine": {"workers": 1, "cohort_size": 2},
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "classes that no row has")
            last = fedgist.run(recipe, data=data, clients=mine).rounds[-1]
        assert last["eval/client/accuracy_mean"] >= 0


FROZEN = {"name": "mlp", "hidden": [5], "frozen": True}
OVERFLOWS = [
    (name, value, section)
    for name in ("fedlog", "fedlog_c", "fedproto", "repshare")
    for value in (torch.nan, torch.inf, 3e38)
    for section in ({}, {"noise": "system"})
]


@pytest.mark.filterwarnings("ignore:model mlp. the frozen body:UserWarning")
@pytest.mark.parametrize(("name", "value", "section"), OVERFLOWS)
def test_a_row_that_is_not_finite_adds_nothing_and_refuses_nothing(
    name: str, value: float, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen: one row of 3e38 refused the upload, which tells with certainty that the row is there
    def nothing(values: torch.Tensor, *_: object) -> torch.Tensor:
        return values

    monkeypatch.setattr(privacy_of_records, "noised_array", nothing)
    options = {"options": {"pick_rate": 0.5}} if name == "repshare" else {}
    private = RECORD | {"where": "local"} | section
    small = world(name, privacy=private, model=FROZEN, data={"normalize": "none"}, **options)
    row = int(small.population.train[0][3])
    x = held(small.population.examples.x, "rows").clone()
    x[row] = value
    examples = replace(small.population.examples, x=x)
    spoilt = replace(small, population=replace(small.population, examples=examples))
    rows = [
        part[part != row] for part in map(small.population.train.__getitem__, range(len(SIZES)))
    ]
    without = replace(small, population=replace(small.population, train=Rows.of(rows)))
    fates = [run.population.examples.fates for run in (spoilt, without)]
    assert (fates[0] is None) == (name != "repshare")
    ends = [federation(each) for each in (spoilt, without)]
    lines = [fed.advance()[0] for fed in ends]
    assert "refused" not in lines[0]
    assert lines[0]["clients/replied"] == len(SIZES)
    one, other = (named(fed.server) for fed in ends)
    assert close(one, other)


@pytest.mark.parametrize("engine", [local_engine, loopback])
def test_a_message_of_a_larger_norm_is_refused_and_the_others_count(engine: Any) -> None:
    fed = federation(world("fedlog"))
    ctx = fed.context("train", 1)
    orders = fed.method.select(fed.server, fed.side.online(1), ctx)
    downs = [fed.method.download(fed.server, order, ctx) for order in orders]
    norms = []
    for order, down in zip(orders, downs, strict=True):
        (alone,) = fed.engine.ask(ctx, [order], [down]).subtotals
        norms.append(math.sqrt(sum(float(a.square().sum()) for a in leaves(alone.message))))
    *_, second, largest = sorted(norms)
    most = (second + largest) / 2
    small = world("fedlog", clients={"num_clients": len(SIZES), "max_norm": most})
    line = federation(small, PAIRS, engine).advance()[0]
    (refused,) = line["refused"]
    assert refused["client"] == orders[norms.index(largest)].client
    assert refused["reason"].endswith(f"above clients.max_norm = {most:g}")
    assert line["clients/replied"] == len(SIZES) - 1


@pytest.mark.parametrize("engine", [local_engine, loopback])
def test_more_rows_than_a_client_can_have_are_refused_and_the_others_count(engine: Any) -> None:
    most = sorted(SIZES)[-2]  # rejects a bound that is read and not used: one client has more
    line = federation(
        world("fedavg", clients={"num_clients": len(SIZES), "max_rows": most}), PAIRS, engine
    ).advance()[0]
    (refused,) = line["refused"]
    assert refused["client"] == SIZES.index(max(SIZES))
    assert f"the count {max(SIZES)}; a count is at least 0 and at most {most}" in refused["reason"]
    assert line["clients/replied"] == len(SIZES) - 1


@pytest.mark.parametrize("engine", [local_engine, loopback])
@pytest.mark.parametrize("name", ["fedlog", "fedproto", "fedlog_c"])
def test_no_row_decides_whether_a_client_is_in_a_total_that_gets_noise(
    name: str, engine: Any
) -> None:
    # seen: the 21st row of clients.max_rows = 20 took 20 others out: 20.5 of an accounted 1.4
    few = {"num_clients": len(SIZES), "max_rows": min(SIZES)}
    small = world(name, clients=few, privacy=RECORD)
    line = federation(small, PAIRS, engine).advance()[0]
    assert "refused" not in line
    assert line["clients/replied"] == len(SIZES)


@pytest.mark.filterwarnings("ignore:model resnet18")
def test_one_row_more_lets_no_client_in() -> None:
    # seen: a client with fewer rows than a step needs sent nothing, and with one more all its rows
    sent = []
    for count in (1, 2):
        few = [*rows()[:-1], rows()[-1][:count]]
        flat = blobs()
        grey = replace(flat, x=flat.x.new_zeros(len(flat.y), 1, 8, 8), mean=(0.0,), std=(1.0,))
        test = flat.x.new_zeros(len(flat.y_test), 1, 8, 8)
        raw = {
            "method": {"name": "fedlog"},
            "model": {"name": "resnet18", "width": 1},
            "train": {"num_rounds": 1},
            "engine": {"workers": 1, "cohort_size": 2},
            "privacy": RECORD,
        }
        result = fedgist.run(raw, data=replace(grey, x_test=test), clients=few)
        sent.append((result.rounds[-1]["clients/replied"], result.rounds[-1]["comm/up_bytes"]))
    assert sent[0] == sent[1]


def envelope(fed: Any, number: int, shift: float = 0.0, **asked: Any) -> bytes:
    ctx, order = fed.context("train", number), Order(0, "mlp")
    down = fed.method.download(fed.server, order, ctx)
    down = replace(down, eta=down.eta + shift)
    asked = {"purpose": "train", "stage": "train", **asked}
    header = Header(run=RUN, round=number, client=0, architecture="mlp", **asked)
    return seal(header, {"download": down})


@pytest.mark.parametrize("source", ["seed", "system"])
def test_a_site_does_not_release_twice_what_is_accounted_for_once(source: str) -> None:
    small = world("fedlog", privacy=RECORD | {"where": "local", "noise": source})
    fed, mine = federation(small, ALONE), population_of_one(small.population, 0)
    side, settings = small.server, hosting_of(small)
    site = Site(side.method, side.task, mine, settings, run=RUN, keep=lambda _: None)
    first = site.handle(envelope(fed, 1))
    assert site.handle(envelope(fed, 1)) == first, "the same reply, no other noise"
    assert b"was made" in site.handle(envelope(fed, 1, shift=0.5))
    site.rewind(site.host.state())  # and after a simulation went back
    again = site.handle(envelope(fed, 1))
    assert (b"was made" in again) == (source == "system")
    assert b"was made" not in site.handle(envelope(fed, 2))


def test_real_sites_keep_their_measurements_and_draw_noise_of_their_own() -> None:
    small = world("fedlog", privacy=RECORD | {"where": "local", "noise": "system"})
    replies = []
    for _ in range(2):
        fed = federation(small, ALONE)
        settings = hosting_of(small)
        mine = population_of_one(small.population, 0)
        site = Site(
            small.server.method, small.server.task, mine, settings, run=RUN, keep=lambda _: None
        )
        replies.append(site.handle(envelope(fed, 1)))
        assert b"TrainingLoss" not in replies[-1]
        scored = site.handle(envelope(fed, 1, purpose="score", stage=EVALUATE, split="client"))
        assert b"this site keeps its scores to itself" in scored
    assert replies[0] != replies[1]


# noise of the system


class Killed(BaseException):
    """The process dies."""


class Heard(Observer):
    """An observer that collects notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class RealRun:
    """A private run with noise of the system, which dies where it is told to.

    ``where`` is ``"asked"``, when the clients have answered, or ``"released"``, when the method has
    seen the totals.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
        privacy = RECORD | {"noise": "system"} | sections.pop("privacy", {})
        # the system draws the clients: at 0.95, one round in three million has none
        train = {"num_rounds": 6, "sampling": "poisson", "fraction_train": 0.95}
        engine = sections.pop("engine", {"checkpoint_every": 2})
        self.world = world("fedlog", privacy=privacy, train=train, engine=engine)
        self.folder = folder
        self.seen: list[tuple[int, torch.Tensor]] = []  # every total that a method saw, by round
        self.dies: tuple[int, str] | None = None
        asked = LocalEngine.ask

        def ask(engine: LocalEngine, ctx: Context, *others: Any) -> Any:
            answer = asked(engine, ctx, *others)
            self._die(ctx.round, "asked")
            return answer

        learnt = FedLog.server_update

        def server_update(method: FedLog, server: Any, replies: Any, ctx: Context) -> Any:
            self.seen.append((ctx.round, replies.total().total.clone()))
            self._die(ctx.round, "released")
            return learnt(method, server, replies, ctx)

        monkeypatch.setattr(LocalEngine, "ask", ask)
        monkeypatch.setattr(FedLog, "server_update", server_update)

    def _die(self, number: int, where: str) -> None:
        if self.dies == (number, where):
            raise Killed

    def go(self, dies: tuple[int, str] | None = None) -> tuple[Any, dict[str, Any], Heard]:
        self.dies = dies
        observer = Heard()
        saved = load(self.folder)
        place = Place(self.folder, saved)
        fed, _, end = run_server(self.world.server, local_engine(self.world), place, observer)
        return fed, end, observer

    def kill(self, number: int, where: str) -> None:
        with pytest.raises(Killed):
            self.go((number, where))

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "rounds.jsonl")


def distinct(seen: list[tuple[int, torch.Tensor]], number: int) -> int:
    """How many different totals of a round a method saw."""
    totals = [total for n, total in seen if n == number]
    return len({tuple(total.flatten().tolist()) for total in totals})


def test_a_total_that_was_released_is_seen_again_after_a_kill_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen: 21 kills behind the release of a round gave 21 totals of it; epsilon 2.64 of 1.0
    real = RealRun(tmp_path / "run", monkeypatch)
    for _ in range(5):
        real.kill(3, "released")
    fed, end, observer = real.go()
    assert distinct(real.seen, 3) == 1
    assert len([n for n, _ in real.seen if n == 3]) == 6
    assert fed.repeated_rounds == 0
    assert fed.round == end["rounds"] == 6
    assert real.lines()[-1]["privacy/epsilon"] == pytest.approx(2.0, rel=2e-3)
    assert not [note for note in observer.notes if "is spent" in note]


@pytest.mark.parametrize("bodies", [{}, STEPS])
def test_each_round_that_is_done_again_is_charged_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bodies: dict[str, Any]
) -> None:
    # private steps are taken again also where the total is known
    real = RealRun(tmp_path / "run", monkeypatch, privacy=bodies | {"repeats": 2})
    where = "released" if bodies else "asked"
    for _ in range(3):
        real.kill(3, where)
    assert load(real.folder).round == 2  # type: ignore[union-attr]
    fed, end, observer = real.go()
    assert fed.repeated_rounds == 3  # the second, the third and the last attempt
    assert end["rounds"] == 5
    (files,) = run_reader.find([real.folder])
    assert files.finished  # not a run to go on with: its budget is spent
    (note,) = [note for note in observer.notes if "is spent" in note]
    assert note in end["notes"]
    assert "ends after 5 of 6 rounds: 3 were done again" in note
    spending = fed.side.spending
    assert real.lines()[-1]["privacy/epsilon"] == spending.epsilon(5, 3) <= 2.0 + 1e-6
    assert spending.epsilon(6, 2) == pytest.approx(2.0, rel=2e-3)
    assert not spending.allows(6, 3)


def test_a_budget_that_is_spent_before_a_round_is_finished_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RealRun(tmp_path / "run", monkeypatch)
    for _ in range(6):
        real.kill(1, "asked")  # six releases are paid for
    with pytest.raises(RecipeError, match="no round is finished: 5 were begun again with other no"):
        real.go()


def test_rounds_behind_an_old_checkpoint_are_charged_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RealRun(tmp_path / "run", monkeypatch, engine={"checkpoint_every": 10})
    real.kill(3, "released")
    assert load(real.folder) is None
    assert [line["round"] for line in real.lines()] == [1, 2]
    fed, _, _ = real.go()
    # rounds 1 and 2 were released and not kept; round 3's total is seen again
    assert fed.repeated_rounds == 2
    assert distinct(real.seen, 1) == distinct(real.seen, 2) == 2
    assert distinct(real.seen, 3) == 1


def test_a_lost_book_without_a_checkpoint_is_charged_for_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rejects a run that begins anew and has forgotten what it released
    real = RealRun(
        tmp_path / "run", monkeypatch, engine={"checkpoint_every": 9}, privacy={"repeats": 9}
    )
    real.kill(3, "released")
    (real.folder / RELEASES).unlink()
    fed, _, _ = real.go()
    assert fed.repeated_rounds == 3  # rounds 1 and 2, and round 3, which may have been released


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_where_the_book_of_releases_is_lost_what_may_have_been_released_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    real = RealRun(tmp_path / "run", monkeypatch, privacy={"repeats": 5})
    real.kill(4, "released")
    file = real.folder / RELEASES
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    else:
        file.unlink()
    fed, _, _ = real.go()
    assert fed.repeated_rounds == 2  # round 3, whose line is there, and round 4, which may be
    assert distinct(real.seen, 4) == 2


def test_what_earlier_resumes_were_charged_is_not_forgotten_with_the_book(tmp_path: Path) -> None:
    small = world("fedlog")
    task = replace(small.server.task, privacy=Privacy("record", "central", 1.0, 3.0, grid=0.25))
    side = replace(small.server, task=task)
    lines = [json.dumps({"round": number}) + "\n" for number in range(1, 6)]
    (tmp_path / "rounds.jsonl").write_text("".join(lines))
    saved = Checkpoint(3, {}, {}, binding=Binding(again=4))
    found = run_rounds._releases(side, Place(tmp_path, saved))
    assert found is not None
    assert found.again == 4 + 2 + 1  # rounds 4 and 5 have lines, and round 6 may be under way


def test_a_run_of_the_system_is_not_repeated_and_says_that_epsilons_add_up(tmp_path: Path) -> None:
    recipe = {
        "method": {"name": "fedlog"},
        "train": {"num_rounds": 2},
        "privacy": RECORD | {"noise": "system"},
        "engine": {"workers": 1, "cohort_size": 2},
    }
    given: dict[str, Any] = {"data": blobs(), "clients": rows(), "out": tmp_path / "run"}
    first = fedgist.run(recipe, **given)
    assert first.summary["privacy"]["noise"] == "system"
    assert "simulated: noise" not in " ".join(first.summary["notes"])
    with pytest.warns(
        UserWarning, match="released its sums; its epsilon and that of this run add up"
    ):
        second = fedgist.run(recipe, overwrite=True, **given)
    assert first.rounds[-1]["train/loss"] != second.rounds[-1]["train/loss"]
    (tmp_path / "run/checkpoint/state.safetensors").unlink()
    with pytest.raises(RecipeError, match="holds a run"):  # it released something
        fedgist.run(recipe, **given)
    with pytest.raises(RecipeError, match="within one process do not: use 'local'"):
        fedgist.run(recipe | {"engine": {"name": "loopback"}}, data=blobs(), clients=rows())
    simulated = fedgist.run(recipe | {"privacy": RECORD, "seed": 3}, data=blobs(), clients=rows())
    says = "simulated: noise from seed 3, which anyone can subtract"
    assert any(note.startswith(says) for note in simulated.summary["notes"])


@pytest.mark.parametrize("shares", [True, False])
def test_what_the_folder_of_a_private_simulation_holds_is_said(*, shares: bool) -> None:
    # seen: with share_measurements = false the folder kept exact class counts, and nothing said so
    section = RECORD | {"noise": "system", "share_measurements": shares}
    notes = world("fedlog", privacy=section).server.notes
    assert any("epsilon does not cover this folder, whose class counts" in n for n in notes)
    assert any("losses and scores of this record, which" in n for n in notes) == shares


@pytest.mark.parametrize(
    ("section", "count", "subject"),
    [
        (RECORD, sum(SIZES), "the number of rows"),
        (LOCAL, min(SIZES), "the rows of the smallest client"),
        (CLIENT, len(SIZES), "the number of clients"),
    ],
)
def test_a_delta_above_one_over_the_records_is_noted(
    section: dict[str, Any], count: int, subject: str
) -> None:
    for delta, noted in ((0.9 / count, False), (min(1.1 / count, 0.99), True)):
        notes = world("fedlog", privacy=section | {"delta": delta}).server.notes
        if delta * count > 1:
            assert any(f"is above 1 / {count}, {subject}" in note for note in notes)
        assert any("is above 1 / " in note for note in notes) == (noted and delta * count > 1)


def test_what_epsilon_covers_depends_on_whether_bodies_learn(tmp_path: Path) -> None:
    privacy = {"unit": "record", "epsilon": 3.0, "delta": 1e-5, "clip": 1.0}
    said = []
    for frozen in (False, True):
        recipe: dict[str, Any] = {
            "method": {"name": "fedlog"},
            "model": {"name": "mlp", "hidden": [4], "frozen": frozen},
            "privacy": privacy,
            "clients": {"num_clients": 2},
            "data": {"train_rows": 60, "normalize": "none"},
            "train": {"num_rounds": 1},
            "engine": {"workers": 1},
        }
        with pytest.warns(UserWarning, match=r"\w"):
            fedgist.run(recipe, out=tmp_path / str(frozen))
        said.append(run_tables.simulated([read_run(tmp_path / str(frozen))])[0])
    assert said == [run_tables.SUMS_ALONE, run_tables.FROZEN]
