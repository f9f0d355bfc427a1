"""Runs in which models diverge: who, since when, and that a lost model has no score."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import fedgist
from fedgist.api.result import Result
from fedgist.cli.main import app
from fedgist.core.objectives.metrics import Metric
from fedgist.errors import RecipeError
from fedgist.report.tables.client_scores import scores_of
from fedgist.report.tables.comparison import study
from fedgist.report.tables.mean_counts import part_of_run
from fedgist.report.tables.run_tables import overview
from fedgist.runs.files.columns import ACCURACY, of_all
from fedgist.runs.finished.run_reader import read_run
from fedgist.runs.lost_models import NOT_FINITE
from fedgist.studies.tune import Tuner

CLIENTS, ROWS = 4, 6
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Breaks(nn.Module):
    """A model whose logits are a number that is not finite for rows with a flag."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.last, self.number = nn.Linear(3, 2), number

    def forward(self, x: Tensor) -> Tensor:
        z = torch.where(x[:, 2:] > 2, self.number, x)
        out: Tensor = self.last(z)
        return out


def run(lost: set[int], number: float = torch.nan, **more: Any) -> Result:
    """Return a run in which the clients in ``lost`` have training rows with the flag."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS * ROWS + 20, 3)).astype(np.float32)
    x[:, 2] = 0.0
    for client in lost:
        x[client * ROWS, 2] = 3.0
    y = (x[:, 0] > 0).astype(int)
    end = CLIENTS * ROWS
    how = {key: more.pop(key) for key in ("out",) if key in more}
    recipe: dict[str, Any] = {
        "method": {"name": "local"},
        "data": {"normalize": "none"},
        "train": {"num_rounds": 2, "lr": 0.1, "batch_size": 3},
        "engine": {"workers": 1},
    } | more
    clients = [range(c * ROWS, (c + 1) * ROWS) for c in range(CLIENTS)]
    data = x[:end], y[:end], x[end:], y[end:]
    return fedgist.run(recipe, data=data, clients=clients, model=Breaks(number), **how)


@settings(max_examples=12)
@given(
    st.sets(st.integers(0, CLIENTS - 1)),
    st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    st.sampled_from(["local", "loopback"]),
    st.sampled_from([1, 3]),
)
def test_lost_clients_are_named_and_in_no_mean(
    lost: set[int], number: float, engine: str, size: int
) -> None:
    about = {"name": engine, "workers": 1} | ({"cohort_size": size} if engine == "local" else {})
    result, healthy = run(lost, number, engine=about), run(set(), engine=about)
    there = [client for client in range(CLIENTS) if client not in lost]
    for line, plain in zip(result.rounds, healthy.rounds, strict=True):
        assert [entry["client"] for entry in line.get("diverged", [])] == sorted(lost)
        unscored = [(e["client"], e["reason"]) for e in line.get("unscored", [])]
        assert unscored == [(client, NOT_FINITE) for client in sorted(lost)]
        assert line["eval/client/count"] == len(there)
        assert line.get("eval/client/missing", 0) == len(lost)
        own = [e for e in healthy.clients if e["round"] == line["round"] and e["client"] in there]
        # rejects lost models that count as the accuracy of class 0, and losses without them
        for metric in ("accuracy", "auroc", "loss"):
            column = f"eval/client/{metric}_mean"
            mean = statistics.fmean(entry[metric] for entry in own) if own else None
            assert line.get(column) == (pytest.approx(mean, rel=1e-5) if own else None)
        if not lost:
            timed = {key for key in line if key.startswith("time/")}
            assert {k: v for k, v in line.items() if k not in timed} == {
                k: v for k, v in plain.items() if k not in timed
            }
    notes = [note for note in result.summary["notes"] if note.startswith("not finite: ")]
    assert len(notes) == bool(lost)
    for client in lost:
        assert f"client {client}" in notes[0]
        assert notes[0].count("from round 1 (training loss nan)") == 1
        with pytest.raises(RecipeError, match=r"the model is not finite, in 'last\.weight'"):
            result.model(client).predict(np.zeros((2, 3), np.float32))
    for client in there:
        assert len(result.model(client).predict(np.zeros((2, 3), np.float32))) == 2
    assert (ACCURACY in result.summary) == bool(there)


class Bounded(nn.Module):
    """A model without finite outputs as soon as a weight is larger than 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        out: Tensor = self.last(torch.where(self.first.weight.abs().max() > 1.0, torch.nan, z))
        return out


def diverging(folder: Path, **more: Any) -> Result:
    """Return a run whose global model is finite, with outputs that are not."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    train = {"num_rounds": 2, "lr": 100.0, "batch_size": 40, "optimizer": "sgd"}
    recipe = {"method": {"name": "fedavg"}, "train": train, "engine": {"workers": 1}}
    recipe |= {"clients": {"num_clients": 3}, **more}
    data = x[:40], y[:40], x[40:], y[40:]
    return fedgist.run(recipe, data=data, model=Bounded(), out=folder)


def test_a_run_that_diverged_has_no_result_and_tables_mark_it(tmp_path: Path) -> None:
    result = run({0, 1, 2, 3}, out=tmp_path / "lost")
    run(set(), out=tmp_path / "good")
    lost, good = (read_run(tmp_path / name) for name in ("lost", "good"))
    assert ACCURACY not in result.summary
    assert lost.last(ACCURACY) is None
    assert part_of_run(lost, ACCURACY) == "diverged in round 1"
    assert part_of_run(good, ACCURACY) == ""
    cells = [line[1] for line in overview([lost, good]).rows]
    assert "diverged in round 1" in cells[0]
    assert "diverged" not in cells[1]
    notes = " ".join(study([lost, good], metric=ACCURACY).notes)
    assert "lost: not finite: client 0, client 1, client 2, client 3 from round 1" in notes


def test_what_a_run_had_before_it_diverged_is_not_its_result(tmp_path: Path) -> None:
    lines = [json.loads(t) for t in (_lines(tmp_path)).splitlines()]
    later = [*lines, {"round": 3, "eval/client/count": 0, "diverged": [_entry(0), _entry(1)]}]
    (tmp_path / "good" / "rounds.jsonl").write_text("".join(json.dumps(e) + "\n" for e in later))
    run_after = read_run(tmp_path / "good")
    # rejects the score of round 2, the last one that there is
    assert run_after.last(ACCURACY) is None
    assert part_of_run(run_after, ACCURACY) == "diverged in round 3"
    # seen: tables by client had the scores of round 2
    assert scores_of(run_after, "accuracy") == {}
    # and a row whose first seed diverged had no score of the others
    other = replace(run_after, rounds=lines, recipe=run_after.recipe | {"seed": 1})
    (cells,) = overview([run_after, other]).rows
    assert cells[1].startswith(f"{100 * lines[-1][ACCURACY]:.2f}")


def _lines(folder: Path) -> str:
    run(set(), out=folder / "good")
    return (folder / "good" / "rounds.jsonl").read_text()


def _entry(client: int) -> dict[str, object]:
    return {"client": client, "reason": NOT_FINITE}


@pytest.mark.parametrize("on", ["client", "global"])
def test_a_global_model_that_diverges_has_no_metrics(tmp_path: Path, on: str) -> None:
    result = diverging(tmp_path / "run", evaluate={"on": on})
    last = result.rounds[-1]
    assert of_all("accuracy") not in last
    if on == "global":
        entry = {"model": "model", "reason": NOT_FINITE}
        assert entry in last["diverged"]
        assert any("the server's model model from round" in n for n in result.summary["notes"])
    else:
        assert last["eval/client/count"] == 0
    read = read_run(tmp_path / "run")
    assert not read.problems
    assert read.rounds[-1]["diverged"] == last["diverged"]


def test_the_first_round_is_said_while_the_run_goes_on() -> None:
    with pytest.warns(UserWarning, match="not finite: client 2 from round 1 .training loss nan.; "):
        run({2})


def test_commands_refuse_or_mark_lost_models(tmp_path: Path) -> None:
    def call(*words: str) -> Any:
        return CliRunner().invoke(app, list(words))

    def said(result: Any) -> str:
        return " ".join((result.output + (result.stderr or "")).split())

    settings_of = ("method.name=local", "train.lr=1e9", "train.optimizer=sgd", "train.num_rounds=1")
    sets = [word for text in (*settings_of, "engine.workers=1") for word in ("--set", text)]
    folder = str(tmp_path / "demo")
    assert "not finite: client" in said(call("run", "demo", *sets, "--out", folder))
    line = json.loads((tmp_path / "demo" / "rounds.jsonl").read_text())
    lost = [entry["client"] for entry in line["unscored"]]
    healthy = next(client for client in range(20) if client not in lost)
    path = str(tmp_path / "new.npz")
    x = np.random.default_rng(0).integers(0, 17, size=(12, 1, 8, 8)).astype(np.float32)
    np.savez(path, x=x, y=np.arange(12) % 10)
    refused = call("predict", folder, path, "--client", str(lost[0]))
    assert isinstance(refused.exception, RecipeError)
    assert "not finite" in str(refused.exception)
    assert "row,label" not in refused.output
    assert call("predict", folder, path, "--client", str(healthy)).exit_code == 0
    marked = call("evaluate", folder, path, "--json")
    table = json.loads(marked.output[marked.output.index("{") : marked.output.rindex("}") + 1])
    scores = {int(entry["client"]): entry["accuracy"] for entry in table["clients"]}
    assert "not finite, so without a score" in said(marked)
    assert [client for client, score in scores.items() if score is None] == lost
    mean = statistics.fmean(score for score in scores.values() if score is not None)
    assert table["mean"]["accuracy"] == pytest.approx(mean)
    alone = call("evaluate", folder, path, "--client", str(lost[0]))
    assert "no model has a score" in str(alone.exception)


@pytest.mark.parametrize(("better", "least", "worst"), [("higher", 0.0, 0.0), ("lower", 0.0, 1e30)])
def test_a_search_takes_a_trial_that_diverged_for_the_worst(
    tmp_path: Path, better: Any, least: float, worst: float
) -> None:
    scores = {"round": 1, "eval/validation/cost_mean": 0.9, "eval/validation/count": 2}
    lost = {"round": 2, "eval/validation/count": 0, "diverged": [_entry(0), _entry(1)]}
    column, metric = "eval/validation/cost_mean", Metric("cost", "Cost", "", better, least=least)
    search: Any = SimpleNamespace(column=column, metric=metric)
    for lines, score in (([scores], 0.9), ([scores, lost], worst)):
        (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
        # rejects the score of before, which would be the best of all
        assert Tuner._score(search, tmp_path) == score
