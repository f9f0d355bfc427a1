"""Probes: what linear layers and neighbours tell from features, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedgist
from fedgist.cli.main import app
from fedgist.core import random
from fedgist.errors import InputError
from fedgist.report.tables.run_tables import overview
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.probes import PROBES, Encoded
from fedgist.runs.runner import load_run

COLUMNS = "eval/client/probe_mean", "eval/global/probe"
RECIPE: dict[str, Any] = {
    "clients": {"num_clients": 3},
    "data": {"train_rows": 300},
    "method": {"name": "fedavg"},
    "train": {"num_rounds": 2},
    "engine": {"workers": 1, "cohort_size": 3},
}


def encoded(rows: int, apart: float, seed: int = 0) -> Encoded:
    """Return two features of three classes, whose means are so far apart."""
    draw = np.random.default_rng(seed)
    means = apart * np.array([[0, 1], [1, -1], [-1, -1]])

    def part(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = draw.integers(0, 3, count)
        x = means[y] + draw.standard_normal((count, 2))
        return torch.tensor(x, dtype=torch.float32), torch.tensor(y)

    return Encoded(*part(rows), *part(400), 3)


@pytest.mark.parametrize("kind", PROBES)
def test_probes_tell_what_can_be_told(kind: str) -> None:
    assert PROBES[kind](encoded(300, 6.0), 0) == 1.0
    assert 0.2 < PROBES[kind](encoded(300, 0.0), 0) < 0.45  # of three classes
    middle = PROBES[kind](encoded(300, 1.0), 0)
    assert 0.6 < middle < 0.95
    assert PROBES[kind](encoded(300, 1.0), 0) == middle


def test_probes_do_not_see_the_scale_of_features(tmp_path: Path) -> None:
    # seen: a random encoder scored 13.8 % by SGD, 40.0 % by logistic regression
    class Scaled(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale, self.body = scale, torch.nn.Linear(64, 8)
            self.head = torch.nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.scale * self.body(x.flatten(1)))
            return out

    found = []
    for scale in (1.0, 2.0**10):  # a power of two: the same digits
        recipe = {
            "method": {"name": "local"},
            "train": {"num_rounds": 1, "lr": 1e-30, "optimizer": "sgd"},
            "data": {"train_rows": 60},
            "clients": {"num_clients": 1},
            "partition": {"name": "iid"},
            "engine": {"workers": 1, "cohort_size": 1},
            "evaluate": {"probe": "sgd"},
        }
        result = fedgist.run(
            recipe, model=lambda scale=scale: Scaled(scale), out=tmp_path / f"{scale}"
        )
        found.append({k: v for k, v in result.rounds[-1].items() if "probe" in k})
    assert found[0]
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_the_linear_layer_learns_by_the_papers_steps() -> None:
    data = encoded(300, 1.0)
    w, v = np.zeros((3, 3)), np.zeros((3, 3))  # bias in the last column
    x = np.hstack([data.train.numpy(), np.ones((300, 1))])
    for epoch in range(60):
        rate = 0.03 * (0.1 if epoch >= 30 else 1.0) * (0.1 if epoch >= 50 else 1.0)
        order = random.permutation(random.key(5, "probe", epoch), 300).numpy()
        for rows in (order[:256], order[256:]):
            z = x[rows] @ w.T
            p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            grad = (p - np.eye(3)[data.y.numpy()[rows]]).T @ x[rows] / len(rows)
            v = 0.9 * v + grad
            w = w - rate * v
    test = np.hstack([data.test.numpy(), np.ones((400, 1))])
    right = (test @ w.T).argmax(1) == data.y_test.numpy()
    assert PROBES["sgd"](data, 5) == pytest.approx(right.mean(), abs=0.005)


@pytest.mark.slow
def test_every_body_of_a_run_is_probed(tmp_path: Path) -> None:
    fedgist.run(RECIPE, out=tmp_path / "run")
    asked = ["probe", str(tmp_path / "run"), "--by", "sgd,knn"]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout)["probes"]
    assert [line["model"] for line in lines] == ["0", "1", "2", "server/mlp"]
    assert all(0.3 < line[kind] <= 1.0 for line in lines for kind in ("sgd", "knn"))
    federation, world = load_run(tmp_path / "run")
    net = federation.method.models(federation.server, federation.context("evaluate"))["mlp"]
    train, test = (
        examples.batch(torch.arange(len(examples)).unsqueeze(0))
        for examples in (world.population.examples, world.population.test_examples)
    )
    own = Encoded(net.features(train.x[0]), train.y[0], net.features(test.x[0]), test.y[0], 10)
    assert lines[-1]["knn"] == pytest.approx(PROBES["knn"](own, 0), abs=0.01)
    starts = CliRunner().invoke(app, [*asked, "--client", "1", "--starts", "--json"])
    last = json.loads(starts.stdout)["probes"][-1]
    assert last["model"] == "start/mlp"
    assert last["sgd"] < lines[1]["sgd"]
    shown = CliRunner().invoke(app, [*asked, "--client", "1"])
    assert "300 training rows, scored on 355 test rows" in shown.output


def test_other_probes_stand_beside_the_main_one(tmp_path: Path) -> None:
    # rejects a kind that is asked for and not run, and columns that are mixed up
    beside = {"evaluate": {"probe": "logistic", "probes_beside": ["sgd", "knn"]}}
    result = fedgist.run(RECIPE | beside, out=tmp_path / "run")
    command = ["probe", str(tmp_path / "run"), "--by", "logistic,sgd,knn", "--json"]
    *own, of_server = json.loads(CliRunner().invoke(app, command).stdout)["probes"]
    titles = {"logistic": "probe", "sgd": "probe_sgd", "knn": "probe_knn"}
    for kind, title in titles.items():
        mean = np.mean([line[kind] for line in own])
        assert result.rounds[-1][f"eval/client/{title}_mean"] == pytest.approx(mean)
        assert result.rounds[-1][f"eval/global/{title}"] == pytest.approx(of_server[kind])
    assert len({result.rounds[-1][f"eval/global/{title}"] for title in titles.values()}) == 3


def test_tables_show_the_probe_of_the_one_model(tmp_path: Path) -> None:
    asked = RECIPE | {
        "data": RECIPE["data"] | {"augment": ["resized_crop"]},
        "model": {"name": "mlp"},
        "objective": {"name": "simclr"},
        "evaluate": {"probe": "knn"},
    }
    line = fedgist.run(asked, out=tmp_path / "run").rounds[-1]
    (row,) = overview(run_reader.find([tmp_path / "run"])).rows
    over_clients, one_model = (f"{100 * line[name]:.2f} %" for name in COLUMNS)
    assert (row[1], row[3]) == (over_clients, one_model)


@pytest.mark.filterwarnings("ignore::UserWarning")  # that the models diverged
def test_features_that_are_not_finite_have_no_probe(tmp_path: Path) -> None:
    asked = RECIPE | {
        "method": {"name": "local"},
        "train": {"num_rounds": 1, "optimizer": "sgd", "lr": 1e30},
        "evaluate": {"probe": "knn"},
    }
    line = fedgist.run(asked, out=tmp_path / "run").rounds[-1]
    assert line.get("eval/client/probe_mean") is None
    done = CliRunner().invoke(app, ["probe", str(tmp_path / "run"), "--by", "knn,logistic"])
    assert done.exit_code == 0, done.output
    assert "-" in done.output.splitlines()[-1]


def test_what_cannot_be_probed_is_said(tmp_path: Path) -> None:
    fedgist.run(RECIPE, out=tmp_path / "run")
    for words, says in (
        (["--by", "svm"], "unknown probe 'svm'.*known: sgd, logistic, knn"),
        (["--client", "9"], "there is no client 9"),
    ):
        refused = CliRunner().invoke(app, ["probe", str(tmp_path / "run"), *words])
        assert isinstance(refused.exception, InputError)
        assert refused.exception is not None
        with pytest.raises(InputError, match=says):
            raise refused.exception


def test_rows_that_are_nobodys_are_not_seen_by_anothers_moments(tmp_path: Path) -> None:
    own = {
        "data": {"train_rows": 300, "normalize": "client"},
        "partition": {"name": "pathological"},
    }
    fedgist.run(RECIPE | own, out=tmp_path / "run")
    refused = CliRunner().invoke(app, ["probe", str(tmp_path / "run")])
    assert "some rows are nobody's" in str(refused.exception)
