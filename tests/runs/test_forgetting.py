"""A server that keeps what single clients sent forgets one of them, and the record says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedgist
from fedgist.cli.main import app
from fedgist.core.method import Context
from fedgist.errors import MethodError
from fedgist.methods.common.latest_messages import NEVER
from fedgist.methods.fd import FD
from fedgist.runs.files.checkpoint import load
from fedgist.runs.files.record import read_lines
from fedgist.testing import MethodUnderTest
from fedgist.testing.small_worlds import federation


def recipe(method: str, rounds: int, **sections: Any) -> dict[str, Any]:
    return {
        "method": {"name": method},
        "clients": {"num_clients": 4},
        "data": {"train_rows": 120, "validation": 0.2},
        "train": {"num_rounds": rounds},
        "engine": {"workers": 1, "cohort_size": 2},
        **sections,
    }


def forget(folder: Path, client: str) -> Any:
    return CliRunner().invoke(app, ["forget", str(folder), "--client", client])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["repshare", "fd"])
def test_what_is_kept_of_a_client_is_dropped(tmp_path: Path, method: str) -> None:
    folder = tmp_path / "run"
    keeping = {"evaluate": {"keep": "best_validation"}}
    fedgist.run(recipe(method, 2, **keeping), out=folder)
    before = load(folder)
    done = forget(folder, "3")
    assert done.exit_code == 0, done.output
    assert "keeps nothing of client 3" in " ".join(done.output.split())
    after = load(folder)
    assert before is not None
    assert after is not None
    assert after.best is not None
    for state in (after, after.best):
        assert state.server["newest/round"][3] == NEVER
        arrays = [a for name, a in state.server.items() if name.startswith("newest/arrays")]
        assert not any(array[3].any() for array in arrays)
    assert all(torch.equal(after.clients[name], array) for name, array in before.clients.items())
    result = fedgist.run(recipe(method, 4, **keeping), out=folder, resume=True, rounds=4)
    told = read_lines(folder / "rounds.jsonl")[2]["events"]
    assert "the server forgot client 3" in told
    assert result.rounds[-1]["clients/replied"] == 4  # it may take part again


@pytest.mark.slow
def test_a_reply_under_way_is_forgotten_too(tmp_path: Path) -> None:
    folder, trace = tmp_path / "run", tmp_path / "online.csv"
    online = [(r, c) for r in (1, 2) for c in range(6)] + [(3, 5)]
    trace.write_text("round,client\n" + "".join(f"{r},{c}\n" for r, c in online))
    late = {"num_clients": 6, "delay": 0.9, "availability": str(trace)}
    fedgist.run(recipe("repshare", 2, clients=late), out=folder)
    saved = load(folder)
    assert saved is not None
    heard = saved.server["newest/round"].tolist()
    late_twice = [client for client in range(5) if heard[client] == 1]  # and again in round 2
    first, second = late_twice[:2]
    assert forget(folder, str(first)).exit_code == 0
    result = fedgist.run(recipe("repshare", 3, clients=late), out=folder, resume=True, rounds=3)
    heard = result.server_run.server.newest.round.tolist()
    assert (heard[first], heard[second]) == (NEVER, 2)


@pytest.mark.slow
def test_a_client_that_has_not_been_heard_but_will_be_can_be_forgotten(tmp_path: Path) -> None:
    late = {"num_clients": 4, "delay": 1.0}
    with pytest.warns(UserWarning, match="nothing was learned: no reply of a client was used"):
        fedgist.run(recipe("repshare", 1, clients=late), out=tmp_path / "run")
    assert forget(tmp_path / "run", "2").exit_code == 0
    more = recipe("repshare", 2, clients=late)
    result = fedgist.run(more, out=tmp_path / "run", resume=True, rounds=2)
    assert result.server_run.server.newest.round.tolist() == [1, 1, NEVER, 1]


@pytest.mark.slow
def test_a_client_that_the_best_round_has_not_heard_is_forgotten(tmp_path: Path) -> None:
    folder, trace = tmp_path / "run", tmp_path / "online.csv"
    trace.write_text("round,client\n" + "".join(f"1,{c}\n" for c in range(5)) + "2,5\n", "utf-8")
    clients = {"num_clients": 6, "availability": str(trace)}
    keeping = {"evaluate": {"keep": "best_validation", "every": 1}, "clients": clients}
    fedgist.run(recipe("repshare", 2, **keeping, train={"lr": 1e-30}), out=folder)
    state = load(folder)
    assert state is not None
    assert state.best is not None
    assert state.best.round == 1
    assert state.server["newest/round"][5] == 2
    assert forget(folder, "5").exit_code == 0
    state = load(folder)
    assert state is not None
    assert state.server["newest/round"][5] == NEVER


@pytest.mark.slow
def test_what_cannot_be_forgotten_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    for method, client, words in (
        ("fedavg", "1", "keeps nothing of client 1"),
        ("repshare", "9", "there is no client 9"),
    ):
        folder = tmp_path / method
        fedgist.run(recipe(method, 1), out=folder)
        state = (folder / "checkpoint" / "state.safetensors").read_bytes()
        refused = forget(folder, client)
        assert refused.exit_code == 1
        assert words in str(refused.exception)
        assert (folder / "checkpoint" / "state.safetensors").read_bytes() == state
    assert forget(tmp_path / "nowhere", "1").exit_code == 1
    assert forget(tmp_path / "repshare", "2").exit_code == 0
    again = forget(tmp_path / "repshare", "2")
    assert "keeps nothing of client 2 that it could forget" in str(again.exception)


@dataclass(frozen=True)
class ForgetsByLot(FD):
    """FD, but what is forgotten hangs on a draw that no seed decides."""

    def forget(self, server: Any, client: int, ctx: Context) -> Any:
        torch.rand(())
        return super().forget(server, client, ctx)


def test_forgetting_is_watched_like_every_function_of_the_server() -> None:
    fed = federation(MethodUnderTest(ForgetsByLot()).world())
    with pytest.raises(MethodError, match=r"ForgetsByLot.forget draws from torch's generator"):
        fed.forget(0)
