"""Pools of clients: who is in them, who is asked, and what the record says of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgist
from fedgist.core import random
from fedgist.core.message import payload_bytes
from fedgist.core.method import Context
from fedgist.core.replies import Asked, ClientInfo, Order
from fedgist.core.sampling import drawn_clients
from fedgist.core.training import Pool
from fedgist.core.tree import Tree
from fedgist.engines.engine import Answer
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError
from fedgist.recipe.model_factories import PoolTable, whole_model
from fedgist.recipe.reading import make
from fedgist.recipe.schema import ModelSection
from fedgist.report.formatting import percent
from fedgist.report.tables.run_tables import by_round, overview
from fedgist.runs.finished import run_reader
from fedgist.testing.small_worlds import SIZES, Trace, federation, loopback, trace, world
from fedgist.world.models import architectures_by_client, members_of_pools

SMALL = {"model": "mlp", "hidden": [4]}
LARGE = {"model": "mlp", "hidden": [8, 6], "clients": [1, 3, 4], "per_round": 2}
POOLS = {"small": SMALL, "large": LARGE}
ONE_BY_ONE = {"workers": 1, "cohort_size": 1}


def pooled(method: str = "fedavg", pools: Mapping[str, Any] = POOLS, **sections: Any) -> Any:
    clients = {"num_clients": len(SIZES), "pools": dict(pools)} | sections.pop("clients", {})
    return world(method, clients=clients, model=None, **sections)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    online=st.sets(st.integers(0, 11)),
    seed=st.integers(0, 99),
)
def test_each_pool_is_drawn_from_alone(sizes: list[int], online: set[int], seed: int) -> None:
    tables = {
        f"p{i}": PoolTable(whole_model(ModelSection()).model, size) for i, size in enumerate(sizes)
    }
    tables["all"] = PoolTable(whole_model(ModelSection()).model)
    members = members_of_pools(tables, 12, random.key(seed))
    assert [len(set(of)) for of in members.values()] == [*sizes, 12]
    names = architectures_by_client(members, 12)
    clients = [ClientInfo(i, names[i]) for i in sorted(online)]
    pools = {name: Pool(len(of), max(1, len(of) // 2)) for name, of in members.items()}
    task = replace(world("fedavg").server.task, pools=pools, num_clients=12)
    orders = drawn_clients(clients, task, random.key(seed, "round"))
    assert len({order.asked for order in orders}) == len(orders)
    for name, pool in pools.items():
        asked = {order.client for order in orders if order.architecture == name}
        there = online & set(members[name])
        assert asked <= there
        assert len(asked) == min(pool.per_round, len(there))


def test_by_chance_each_pool_has_its_own() -> None:
    # rejects a chance by the number of all clients: "few" has ten of the forty
    clients = [ClientInfo(i, ("few", "many") if i < 10 else ("many",)) for i in range(40)]
    pools = {"few": Pool(10, 4), "many": Pool(40, 20)}
    task = world("fedavg").server.task
    poisson = task.training.model_copy(update={"sampling": "poisson"})
    task = replace(task, training=poisson, pools=pools, num_clients=40)
    asked = [
        order.architecture
        for number in range(200)
        for order in drawn_clients(clients, task, random.key(number))
    ]
    assert asked.count("few") / 200 == pytest.approx(4, abs=0.5)
    assert asked.count("many") / 200 == pytest.approx(20, abs=1.0)


def test_a_client_of_two_pools_trains_both_models_and_pools_average_alone() -> None:
    # the large pool alone is a federation of its three clients
    seen = trace(pooled(train={"num_rounds": 1}), Plan(2), rounds=1)
    line = seen.rounds[0]
    assert line["clients/asked/small"] == 5
    assert line["clients/asked/large"] == 2
    assert line["clients/asked"] == line["clients/replied"] == 7
    for name in ("clients/replied", "comm/up_bytes", "comm/down_bytes"):
        assert line[name] == line[f"{name}/small"] + line[f"{name}/large"]
    assert line["clients/replied/large"] == 2
    starts = pooled().server.task.starts
    sizes = {name: payload_bytes(net.state()) for name, net in starts.items()}
    assert line["comm/up_bytes/large"] == 2 * (sizes["large"] + 4)  # and a count of rows
    assert line["comm/down_bytes/small"] == 5 * sizes["small"]
    mean = (5 * line["train/loss/small"] + 2 * line["train/loss/large"]) / 7
    assert line["train/loss"] == pytest.approx(mean)
    small = trace(pooled(pools={"small": SMALL}), Plan(2), rounds=1)
    for name, array in small.state.items():
        assert torch.equal(array, seen.state[name])


def far(one: Trace, other: Trace) -> float:
    names = [name for name in one.state if name.startswith("server/")]
    return max(float((one.state[n] - other.state[n]).abs().max()) for n in names)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedadam"])
def test_stacks_and_wires_and_workers_agree(method: str) -> None:
    alone = trace(pooled(method), Plan(1, stack=False))
    assert far(alone, trace(pooled(method), Plan(5))) < 1e-5
    on_wire = trace(pooled(method), Plan(1), make_engine=loopback)
    assert far(alone, on_wire) < 1e-5
    assert alone.rounds[-1]["train/loss/large"] == pytest.approx(
        on_wire.rounds[-1]["train/loss/large"], abs=1e-5
    )


def test_a_pool_whose_clients_are_all_offline_keeps_its_model() -> None:
    fed = federation(pooled(pools=POOLS | {"large": LARGE | {"clients": [4]} | {"per_round": 1}}))
    before = {n: a.clone() for n, a in fed.checkpoint().server.items()}
    fed.side = replace(fed.side, online=lambda number: list(fed.side.clients[:4]))
    line, _ = fed.advance()
    fed.engine.close()
    assert line["clients/asked/large"] == 0
    assert "train/loss/large" not in line
    for name, array in fed.checkpoint().server.items():
        assert torch.equal(array, before[name]) == ("/large/" in name)


def test_who_fails_in_one_pool_answers_in_the_other() -> None:
    small_world = pooled(clients={"pools": POOLS | {"large": LARGE | {"per_round": 3}}})
    fed = federation(small_world)
    ask = fed.engine.ask

    def without_one(ctx: Context, orders: Sequence[Order], downs: Sequence[Tree]) -> Answer:
        there = [i for i, order in enumerate(orders) if order.asked != (3, "large")]
        answer = ask(ctx, [orders[i] for i in there], [downs[i] for i in there])
        return replace(answer, absent=((Asked(3, "large"), "not connected"),))

    fed.engine.ask = without_one  # type: ignore[method-assign]
    line, _ = fed.advance()
    fed.engine.close()
    assert line["absent"] == [{"client": 3, "pool": "large", "reason": "not connected"}]
    assert line["clients/replied"] == 7


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ({"large": {"clients": [0, 1]}}, r"clients\.pools: client 2 is in no pool"),
        (
            {"small": SMALL, "large": {"clients": []}},
            r"clients\.pools\.large\.clients = \[\]: must have ",
        ),
        ({"small": SMALL, "large": {"clients": 0}}, r"clients\.pools\.large\.clients = 0"),
        ({"small": SMALL, "large": {"clients": 9}}, r"clients = 9: there are 5 clients"),
        ({"small": SMALL, "large": {"clients": [7]}}, r"client 7 does not exist, there are 5"),
        ({"small": SMALL, "large": {"clients": 2, "per_round": 3}}, r"per_round = 3: the pool has"),
        ({"small": SMALL, "large": {"model": "mpl"}}, r"clients\.pools\.large\.model.*'mlp'"),
        ({"small": SMALL | {"hiden": [3]}}, r"clients\.pools\.small\.hiden: unknown key"),
        ({"small": SMALL | {"per_round": "all"}}, r"clients\.pools\.small\.per_round = 'all'"),
    ],
)
def test_what_is_wrong_is_named(pools: Mapping[str, Any], says: str) -> None:
    filled = {name: {"model": "mlp", **pool} for name, pool in pools.items()}
    with pytest.raises(RecipeError, match=says) as caught:
        pooled(pools=filled)
    assert "\n" not in str(caught.value)


def test_pools_go_without_privacy_and_without_architectures() -> None:
    private = {"unit": "client", "epsilon": 1.0, "delta": 0.1, "clip": 1.0}
    with pytest.raises(RecipeError, match=r"privacy\.unit = 'client': not with clients\.pools"):
        pooled(privacy=private)
    with pytest.raises(RecipeError, match="both say the clients' models; give one"):
        make({"clients": {"pools": POOLS, "architectures": {"mlp": 1.0}}})
    with pytest.raises(RecipeError, match=r"model\.hidden is given, and nothing reads it"):
        make({"clients": {"pools": POOLS}, "model": {"hidden": [3]}})


ONE_MESSAGE: dict[str, dict[str, Any]] = {
    "fd": {},
    "repshare": {},
    "fedkd": {},
    "fedlog": {"memory": "newest"},
    "fedlog_c": {"memory": "newest"},
}


@pytest.mark.parametrize("method", ONE_MESSAGE)
def test_one_message_of_each_client_is_for_pools_without_a_common_client(method: str) -> None:
    # seen: of two uploads of a client the server kept one, without a word
    alike = {name: {"model": "mlp", "hidden": [4]} for name in ("first", "second")}
    apart = {
        n: t | {"clients": c} for (n, t), c in zip(alike.items(), ([0, 2], [1, 3, 4]), strict=True)
    }
    trace(pooled(method, apart, options=ONE_MESSAGE[method]), Plan(2), rounds=2)
    with pytest.raises(RecipeError, match=rf"method {method}.* no client may be in several of"):
        pooled(method, alike, options=ONE_MESSAGE[method])


@pytest.mark.slow
def test_thousands_of_clients_that_keep_nothing_leave_nothing_behind(tmp_path: Path) -> None:
    x = torch.randn(34_000, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    recipe: dict[str, Any] = {
        "clients": {
            "num_clients": len(x),
            "pools": {
                "small": SMALL | {"per_round": 5},
                "large": LARGE | {"clients": 3000, "per_round": 5},
            },
        },
        "partition": {"name": "iid"},
        "method": {"name": "fedadam"},
        "train": {"num_rounds": 2, "optimizer": "sgd", "lr": 0.1},
        "evaluate": {"on": "global"},
        "engine": {"workers": 1, "plans": {n: {"cohort_size": 5} for n in POOLS}},
    }
    data = (x.numpy(), y.numpy(), x[:20].numpy(), y[:20].numpy())
    result = fedgist.run(recipe, data=data, out=tmp_path / "run")
    assert result.clients == []
    assert not result.server_run.checkpoint().clients
    assert not (tmp_path / "run" / "clients.jsonl").read_bytes()
    saved = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoint").iterdir())
    assert saved < len(x)  # bytes: less than one for each client


@pytest.mark.slow
def test_what_is_shown_of_a_run_has_the_score_of_each_pools_model(tmp_path: Path) -> None:
    clients = {"num_clients": len(SIZES), "pools": POOLS}
    recipe = {"clients": clients, "train": {"num_rounds": 2}, "evaluate": {"on": "global"}}
    x, y = torch.randn(60, 6), torch.arange(60) % 3
    data = (x.numpy(), y.numpy(), x.numpy(), y.numpy())
    with_method = {"method": {"name": "fedavg"}, "partition": {"name": "iid"}, "engine": ONE_BY_ONE}
    result = fedgist.run(recipe | with_method, data=data, out=tmp_path / "pools")
    last = result.rounds[-1]
    scores = [last[f"eval/global/{end}accuracy"] for end in ("small/all/", "large/all/")]
    (run,) = run_reader.find([tmp_path / "pools"])
    table = overview([run])
    assert table.columns[:4] == ("method", "accuracy", "small", "large")
    assert table.rows[0][1:4] == tuple(map(percent, (sum(scores) / 2, *scores)))
    assert (
        table.caption
        == "accuracy: mean of the server's models; small, large: the server's models, all test rows"
    )
    assert by_round(run).rows[-1][1:4] == table.rows[0][1:4]
    alone = {"clients": {"num_clients": len(SIZES)}, "train": {"num_rounds": 1}}
    fedgist.run(alone | with_method, data=data, out=tmp_path / "one")
    both = overview(run_reader.find([tmp_path / "pools", tmp_path / "one"]))
    assert both.columns[1:6] == ("accuracy", "spread", "one model", "small", "large")
    assert both.rows[1][4:6] == ("-", "-")
    assert both.rows[1][2] != "-"
