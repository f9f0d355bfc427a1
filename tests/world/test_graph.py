"""Who hears whom among peers: what graphs there are, and that nothing else is heard."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedgist
from fedgist.core import random
from fedgist.core.method import Order
from fedgist.errors import CheckpointError, RecipeError
from fedgist.runs.files.record import Record, read_lines
from fedgist.runs.finished.trained_models import client_model
from fedgist.testing import laws
from fedgist.testing.small_worlds import ALONE, PAIRS, SIZES, federation, loopback, trace, world
from fedgist.world.graph import Neighbors, _by_chance, _regular
from fedgist.world.world import World

COUNT = len(SIZES)


def peers(graph: dict[str, Any], **options: Any) -> World:
    return world("repshare", options=options, clients={"graph": graph})


def neighbors(graph: dict[str, Any], number: int = 1) -> Neighbors:
    by_round = peers(graph).server.neighbors
    assert by_round is not None
    return by_round(number)


def test_a_ring_and_a_full_graph() -> None:
    assert neighbors({"name": "ring"}) == ((1, 4), (0, 2), (1, 3), (2, 4), (0, 3))
    everyone = set(range(COUNT))
    assert [set(of) for of in neighbors({"name": "full"})] == [everyone - {c} for c in everyone]
    assert peers({"name": "relay"}).server.neighbors is None


@given(st.integers(1, 6), st.integers(2, 24), st.integers(0, 50))
def test_in_a_regular_graph_all_have_as_many_neighbors(degree: int, count: int, seed: int) -> None:
    if degree >= count or degree * count % 2:
        with pytest.raises(RecipeError, match=f"degree = {degree}"):
            _regular(degree, count, random.key(seed))
        return
    graph = _regular(degree, count, random.key(seed))
    assert {len(of) for of in graph} == {degree}
    check_undirected(graph)


def check_undirected(graph: Neighbors) -> None:
    for client, heard in enumerate(graph):
        assert client not in heard
        assert len(set(heard)) == len(heard)
        assert all(client in graph[other] for other in heard)


@pytest.mark.slow
def test_regular_graphs_are_drawn_alike() -> None:
    # each of the 4 other clients is a neighbor in half of all 2-regular graphs of 5: 200, +- 10
    counts: Counter[int] = Counter()
    for seed in range(400):
        counts.update(_regular(2, 5, random.key(seed))[0])
    assert all(abs(counts[other] - 200) < 5 * 10 for other in range(1, 5))


def test_pairs_are_drawn_by_chance() -> None:
    graph = _by_chance(0.3, 200, random.key(2))
    check_undirected(graph)
    edges = sum(map(len, graph)) / 2
    pairs = 200 * 199 / 2
    assert abs(edges / pairs - 0.3) < 5 * (0.3 * 0.7 / pairs) ** 0.5


@pytest.mark.slow
def test_a_graph_may_change_with_the_round() -> None:
    still, moving = ({"name": "random_regular", "degree": 2, "changes": c} for c in (False, True))
    assert len({neighbors(still, n) for n in range(8)}) == 1
    assert len({neighbors(moving, n) for n in range(8)}) > 2
    assert neighbors(moving, 3) == neighbors(moving, 3)


def test_a_graph_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.csv"
    ring = [f"{c},{(c + 1) % COUNT}" for c in range(COUNT)]
    path.write_text("client,hears\n" + "\n".join(ring))
    graph = {"name": "file", "path": str(path)}
    assert neighbors(graph) == ((1,), (2,), (3,), (4,), (0,))  # it may have directions
    back = [f"2,{(c + 1) % COUNT},{c}" for c in range(COUNT)]
    path.write_text("round,client,hears\n" + "\n".join([*(f"0,{line}" for line in ring), *back]))
    assert [neighbors(graph, n)[1] for n in (0, 1, 2, 3)] == [(2,), (2,), (0,), (0,)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client,hears\n0,1\n", "client 1 hears nobody"),
        ("client,hears\n0,9\n", "names client 9"),
        ("client,hears\n0,0\n", "lets client 0 hear itself"),
        ("client\n0\n", "is not a file of 'client,hears' lines"),
        ("client,hears\n0,x\n", "is not a file of 'client,hears' lines"),
        ("", "client 0 hears nobody"),
        (None, "does not exist"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "graph.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecipeError, match=words):
        peers({"name": "file", "path": str(path)})


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        ({"name": "random_regular", "degree": 5}, "degree = 5: it must be fewer than the clients"),
        ({"name": "random_regular", "degree": 3}, "degree = 3: it must be even"),
        ({"name": "random_regular"}, "needs degree"),
        ({"name": "ring", "degree": 2}, "degree is of 'random_regular'"),
        ({"name": "ring", "changes": True}, "changes is of random graphs"),
        ({"name": "erdos_renyi", "chance": 1e-9}, "client 0 hears nobody"),
        ({"name": "torus"}, "clients.graph.name"),
    ],
)
def test_impossible_graphs_are_refused(graph: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        peers(graph)


def test_methods_that_need_a_server_are_refused() -> None:
    with pytest.raises(RecipeError, match="FedAvg does not work among peers"):
        world("fedavg", clients={"graph": {"name": "ring"}})


# what is heard


@pytest.mark.parametrize("make_engine", [None, loopback])
def test_a_client_hears_its_neighbors_alone(make_engine: Any) -> None:
    small_world = peers({"name": "ring"}, m_down=4, m_up=2)
    fed = federation(small_world, PAIRS, make_engine) if make_engine else federation(small_world)
    fed.advance()
    orders, downs, _ = fed.downloads(fed.round)  # as for evaluation and export
    released = fed.server.released
    means = released.total / released.rows.clamp(min=1).unsqueeze(3)
    for order, down in zip(orders, downs, strict=True):
        heard = {(order.client - 1) % COUNT, (order.client + 1) % COUNT}
        assert set(order.hears or ()) == heard
        assert not down.known.any()
        allowed = torch.cat([means[peer, 1:].flatten(0, 1) for peer in heard])
        for seen in down.seen[down.there > 0]:
            assert (seen == allowed).all(1).any()
        # the mean of what it heard stands in for the global one
        target, known = down.targets()
        for label in known.nonzero().flatten():
            parts = down.seen[down.there[:, label] > 0, label]
            assert torch.allclose(target[label], parts.mean(0))
    fed.engine.close()


def test_an_exported_model_has_heard_its_neighbors_alone() -> None:
    asked = {
        "method": {"name": "repshare", "m_down": 4},
        "clients": {"num_clients": 5, "graph": {"name": "ring"}},
        "data": {"train_rows": 100},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1, "cohort_size": 5},
    }
    result = fedgist.run(asked)
    held = client_model(result.server_run, result.world, 1)
    _, downs, _ = result.server_run.downloads(1)
    arrays = {name: held.get_buffer(slot) for slot, name in held.names.items()}
    assert torch.equal(arrays["down/seen"], downs[1].seen)
    assert not arrays["down/known"].any()


def test_all_neighbors_together_are_the_relay() -> None:
    def heard(graph: str) -> Any:
        fed = federation(peers({"name": graph}, m_down=4))
        fed.advance()
        down = fed.method.download(
            fed.server, fed._with_neighbors([Order(1, "mlp")], 2)[0], fed.context("train", 2)
        )
        fed.engine.close()
        return down

    full, relay = heard("full"), heard("relay")
    assert torch.equal(full.seen, relay.seen)
    assert torch.equal(full.there, relay.there)


@pytest.mark.slow
def test_an_edge_costs_what_its_sender_released(tmp_path: Path) -> None:
    recipe = {
        "method": {"name": "repshare"},
        "clients": {
            "num_clients": 4,
            "graph": {"name": "ring"},
            "settings": {"silent": {"clients": [2], "classes": [0]}},
        },
        "data": {"train_rows": 120},
        "train": {"num_rounds": 3},
        "engine": {"workers": 1},
    }
    result = fedgist.run(recipe, out=tmp_path / "run")
    edges = read_lines(tmp_path / "run" / "edges.jsonl")
    assert {line["round"] for line in edges} == {2, 3}  # before, nobody had released anything
    pairs = Counter((line["from"], line["to"]) for line in edges)
    assert set(pairs.values()) == {2}
    assert set(pairs) == {(c, (c + step) % 4) for c in range(4) for step in (1, 3)}
    by_sender: dict[int, set[int]] = {}
    for line in edges:
        by_sender.setdefault(line["from"], set()).add(line["bytes"])
    assert max(by_sender[2]) < min(by_sender[0])
    for line in result.rounds:
        total = sum(edge["bytes"] for edge in edges if edge["round"] == line["round"])
        assert line["comm/edge_bytes"] == total


def test_a_run_does_not_go_on_with_another_graph(tmp_path: Path) -> None:
    path = tmp_path / "graph.csv"
    path.write_text("client,hears\n" + "\n".join(f"{c},{(c + 1) % 4}" for c in range(4)))
    recipe = {
        "method": {"name": "repshare"},
        "clients": {"num_clients": 4, "graph": {"name": "file", "path": str(path)}},
        "data": {"train_rows": 120},
        "train": {"num_rounds": 2},
        "engine": {"workers": 1},
    }
    fedgist.run(recipe, out=tmp_path / "run")
    same = path.read_text()
    path.write_text("client,hears\n" + "\n".join(f"{c},{(c + 2) % 4}" for c in range(4)))
    with pytest.raises(RecipeError, match="whom clients hear changed"):
        fedgist.run(recipe, out=tmp_path / "run", resume=True, rounds=3)
    path.write_text(same)
    assert len(fedgist.run(recipe, out=tmp_path / "run", resume=True, rounds=3).rounds) == 3


def test_a_run_does_not_go_on_with_other_clients_online_in_its_rounds(tmp_path: Path) -> None:
    # seen: the file was changed, and the run went on in silence
    path, out = tmp_path / "online.csv", tmp_path / "run"
    begun, later, other = "1,0\n1,1\n2,2\n", "3,0\n3,1\n3,2\n4,3\n", "1,0\n2,2\n"
    recipe = {
        "method": {"name": "fedavg"},
        "clients": {"num_clients": 4, "availability": str(path)},
        "data": {"train_rows": 120},
        "train": {"num_rounds": 2},
        "engine": {"workers": 1},
    }
    path.write_text("round,client\n" + begun)
    fedgist.run(recipe, out=out)
    path.write_text("round,client\n" + other + later)
    with pytest.raises(RecipeError, match="who is online changed since the run was begun"):
        fedgist.run(recipe, out=out, resume=True, rounds=4)
    path.write_text("round,client\n" + begun + later)
    lines = fedgist.run(recipe, out=out, resume=True, rounds=4).rounds
    assert [line["clients/replied"] for line in lines] == [2, 1, 3, 1]


def test_a_run_does_not_go_on_with_other_steps_of_a_federation(tmp_path: Path) -> None:
    fed, out = tmp_path / "fed", tmp_path / "run"
    fed.mkdir()
    recipe = {
        "method": {"name": "fedavg"},
        "clients": {"num_clients": 2},
        "data": {"train_rows": 60},
        "train": {"num_rounds": 1, "round_seconds": 1.0, "steps_of": str(fed)},
        "engine": {"workers": 1},
    }

    def write(*steps: int) -> None:
        lines = [
            {
                "round": number,
                "steps": [{"stage": "train", "client": c, "steps": [taken]} for c in (0, 1)],
            }
            for number, taken in enumerate(steps, 1)
        ]
        (fed / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(2)
    fedgist.run(recipe, out=out)
    write(1, 2)
    with pytest.raises(RecipeError, match="how many steps are repeated changed"):
        fedgist.run(recipe, out=out, resume=True, rounds=2)
    write(2, 1)
    assert len(fedgist.run(recipe, out=out, resume=True, rounds=2).rounds) == 2


def test_edges_are_cut_back_with_the_rounds(tmp_path: Path) -> None:
    record, digests = Record(tmp_path), {}
    for number in (1, 2, 3):
        record.add({"round": number}, edges=[{"round": number, "from": 0, "to": 1, "bytes": 8}] * 2)
        digests[number] = record.seal()
    again = Record(tmp_path, 2, digests[2])
    assert [line["round"] for line in again.edges] == [1, 1, 2, 2]
    assert again.edges == read_lines(tmp_path / "edges.jsonl")
    (tmp_path / "edges.jsonl").write_text("")
    with pytest.raises(CheckpointError, match=r"edges\.jsonl"):
        Record(tmp_path, 2, digests[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "random_regular"])
def test_graphs_obey_the_laws(name: str) -> None:
    graph = {"name": name} | ({"degree": 2, "changes": True} if name != "ring" else {})
    one, two = (trace(peers(graph), plan) for plan in (PAIRS, ALONE))
    assert laws.close(one.state, two.state)
    wired = trace(peers(graph), make_engine=loopback)
    mine, theirs = (
        {name: array for name, array in t.state.items() if name.startswith("server/")}
        for t in (one, wired)
    )
    assert laws.close(mine, theirs)
