"""Clients that never train: who they are, what they are given, and where their scores are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgist
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError
from fedgist.federation.agreement.recipe_check import check_setup
from fedgist.recipe.reading import make
from fedgist.recipe.resolve import resolve
from fedgist.runs.evaluation import score_rows
from fedgist.runs.files.record import read_lines
from fedgist.runs.finished.trained_models import trained_model
from fedgist.runs.runner import load_run
from fedgist.testing.small_worlds import SIZES, federation, trace, world, world_of
from three_sites import SAME, parsed, recipe

# in Python, what a user should know is a warning
pytestmark = pytest.mark.filterwarnings("ignore:2 of 5 clients never train:UserWarning")
OUT = (1, 3)
VARIATES = "clients/mlp/own/variate/"
HELD_OUT = {"clients": {"held_out": list(OUT)}}


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_the_others_train_as_if_newcomers_were_never_online(method: str, tmp_path: Path) -> None:
    lines = [f"{r},{c}" for r in (1, 2, 3) for c in range(len(SIZES)) if c not in OUT]
    path = tmp_path / "online.csv"
    path.write_text("round,client\n" + "\n".join(lines) + "\n")
    ours = trace(world(method, **HELD_OUT), Plan(5), rounds=3)
    away = trace(world(method, clients={"availability": str(path)}), Plan(5), rounds=3)
    assert ours.state.keys() == away.state.keys()
    for name, array in away.state.items():
        assert torch.equal(ours.state[name], array), name
    for line in ours.rounds:
        assert line["clients/replied"] == len(SIZES) - len(OUT)
        assert "clients/expected" not in line  # nobody is missed


@pytest.mark.parametrize("method", ["fedlog", "fedlog_c"])
def test_sums_are_not_remembered_where_all_others_answer(method: str) -> None:
    # rejects a memory that takes newcomers for clients that are away
    ours, paper = (
        trace(world(method, options=memory, **HELD_OUT), Plan(5), rounds=3)
        for memory in (dict[str, Any](), {"memory": 0.0})
    )
    for name, array in paper.state.items():
        assert torch.equal(ours.state[name], array), name


def test_the_control_variate_is_the_mean_of_the_others() -> None:
    # SCAFFOLD's c is the mean of all c_i where all clients answer
    state = trace(world("scaffold", **HELD_OUT), Plan(5), rounds=3).state
    others = [client for client in range(len(SIZES)) if client not in OUT]
    found = {n: a for n, a in state.items() if n.startswith(VARIATES)}
    assert len(found) == 4
    for name, variates in found.items():
        control = state[name.replace(VARIATES, "server/by_architecture/mlp/control/")]
        torch.testing.assert_close(control, variates[others].mean(0), rtol=1e-5, atol=1e-7)


def run(method: dict[str, Any], folder: Path, **evaluate: Any) -> fedgist.Result:
    about = {
        "method": method,
        "clients": {"num_clients": 5, "held_out": [1, 3]},
        "partition": {"name": "iid"},
        "data": {"train_rows": 200},
        "train": {"num_rounds": 2, "lr": 0.01},
        "evaluate": evaluate,
        "engine": {"workers": 1, "plans": {"mlp": {"cohort_size": 5}}},
    }
    return fedgist.run(about, out=folder)


def test_scores_of_newcomers_are_apart_and_those_of_the_shared_model(tmp_path: Path) -> None:
    # rejects newcomers in the mean over clients, and scores of what they began with
    done = run({"name": "fedavg"}, tmp_path / "run")
    lines = read_lines(tmp_path / "run/clients.jsonl")
    last = {line["client"]: line for line in lines if line["round"] == 2}
    assert {c for c, line in last.items() if line["split"] == "newcomer"} == set(OUT)
    assert {c for c, line in last.items() if line["split"] == "client"} == {0, 2, 4}
    federation_run, own = load_run(tmp_path / "run")
    shared = trained_model(federation_run, own, 0)  # a client that trained
    parts, data, objective = own.partition, own.data, own.server.task.objective
    for client, line in last.items():
        rows = parts.test[client]
        scores = score_rows(shared, data.x_test[rows], data.y_test[rows], objective)
        assert line["accuracy"] == pytest.approx(scores["accuracy"])
    columns = done.rounds[-1]
    for split, members in (("client", (0, 2, 4)), ("newcomer", OUT)):
        mean = sum(last[c]["accuracy"] for c in members) / len(members)
        assert columns[f"eval/{split}/accuracy_mean"] == pytest.approx(mean)
        assert columns[f"eval/{split}/count"] == len(members)


def test_fine_tuned_copies_of_newcomers_are_scored_too(tmp_path: Path) -> None:
    done = run({"name": "fedbabu"}, tmp_path / "run", trained_every=1)
    last = done.rounds[-1]
    for copy in ("finetuned", "trained"):
        new, old = (last[f"eval/{split}/{copy}_accuracy_mean"] for split in ("newcomer", "client"))
        assert 0 <= new <= 1
        assert new != old


def test_probes_of_newcomers_are_apart(tmp_path: Path) -> None:
    # seen: probes of nets that never trained were in the mean over clients, and the least of it
    last = run({"name": "local"}, tmp_path / "run", probe="knn").rounds[-1]
    lines = [line for line in read_lines(tmp_path / "run/clients.jsonl") if line["round"] == 2]
    for split, members in (("client", {0, 2, 4}), ("newcomer", {*OUT})):
        own = {line["client"]: line["probe"] for line in lines if line["split"] == split}
        assert own.keys() == members
        mean, least = (last[f"eval/{split}/probe_{name}"] for name in ("mean", "min"))
        assert (mean, least) == pytest.approx((sum(own.values()) / len(own), min(own.values())))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(0, 50))
def test_a_share_is_drawn_from_the_seed(count: int, seed: int) -> None:
    held_out = world("fedavg", clients={"held_out": count / 5}, seed=seed).server.task.newcomers
    again = world("fedlog", clients={"held_out": count / 5}, seed=seed).server.task.newcomers
    assert held_out == again
    assert len(held_out) == count
    assert held_out <= set(range(len(SIZES)))


def test_a_fraction_is_of_the_clients_that_train() -> None:
    train = {"fraction_train": 0.75}
    fed = federation(world("fedavg", clients={"held_out": [0]}, train=train))
    line, _ = fed.advance()
    fed.engine.close()
    assert line["clients/asked"] == 3


@pytest.mark.parametrize(("out", "asked"), [([3, 4], 1), ([4], 2), ([], 2)])
def test_a_fraction_of_a_pool_is_of_its_clients_that_train(out: list[int], asked: int) -> None:
    clients = {"pools": {"all": {"model": "mlp"}}, "num_clients": 5, "held_out": out}
    about = {"clients": clients, "method": {"name": "fedavg"}, "train": {"fraction_train": 0.4}}
    small = world_of(make(about | {"data": {"name": "digits", "train_rows": 50}}))
    assert small.server.task.pools["all"].per_round == asked


def test_it_is_said() -> None:
    (note,) = (n for n in world("fedavg", **HELD_OUT).server.notes if "newcomers" in n)
    assert "2 of 5 clients never train" in note


@pytest.mark.parametrize(
    ("method", "sections", "words"),
    [
        ("fedavg", {"clients": {"held_out": 0.05}}, "held_out = 0.05 holds out 0 of 5 clients"),
        ("fedavg", {"clients": {"held_out": 0.95}}, "held_out = 0.95 holds out 5 of 5 clients"),
        ("fedavg", {"clients": {"held_out": 1.0}}, "clients.held_out"),
        ("fedavg", {"clients": {"held_out": [5]}}, "client 5 does not exist, there are 5"),
        ("fedavg", {"clients": {"held_out": ["ulm"]}}, "no client is called 'ulm'"),
        ("fedavg", {"clients": {"held_out": [0, 1, 2, 3, 4]}}, "nobody would train"),
        ("centralized", {"clients": {"held_out": [0]}}, "rows of all clients together"),
        (
            "fedavg",
            {
                "clients": {"held_out": [0]},
                "privacy": {"unit": "client", "epsilon": 2.0, "delta": 0.01, "clip": 3.0},
            },
            "privacy divides by the expected number of all clients",
        ),
    ],
)
def test_impossible_newcomers_are_refused(
    method: str, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        world(method, **sections)


def test_a_federation_holds_out_nobody() -> None:
    with pytest.raises(RecipeError, match="a site that does not connect is held out"):
        check_setup(resolve(parsed(recipe("fedavg", **SAME, clients={"held_out": [0]}))))
