"""Metrics of a user's own reach the record, the pages, the choice of a round and a search."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import fbeta_score
from torch import Tensor

import commands
import fedgist
from fedgist.core.objectives.own_metric import OwnMetric, own_metric
from fedgist.errors import RecipeError
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import blobs, rows

RECIPE: dict[str, Any] = {
    "train": {"num_rounds": 2, "batch_size": 5},
    "method": {"name": "local"},
    "engine": {"workers": 1},
}


def f_two(probabilities: Tensor, labels: Tensor) -> float:
    """Return scikit-learn's F2, which weighs recall more."""
    guess = probabilities.argmax(1)
    return float(fbeta_score(labels, guess, beta=2, average="macro", zero_division=0))


@fedgist.metric(better="lower", unit="fraction", title="Misses")
def miss_rate(probabilities: Tensor, labels: Tensor) -> Tensor:
    return (probabilities.argmax(1) != labels).double().mean()


def run(metrics: list[Any], **changes: Any) -> Any:
    return fedgist.run(RECIPE | changes, data=blobs(), clients=rows(), metrics=metrics)


def test_a_function_gets_the_probabilities_and_labels_of_one_client() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(probabilities: Tensor, labels: Tensor) -> float:
        seen.append((probabilities, labels))
        return 0.25

    result = run([watched, "accuracy"])
    assert result.rounds[-1]["eval/client/watched_mean"] == 0.25
    probabilities, labels = seen[-1]
    assert probabilities.shape == (30, 3)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(30))
    assert torch.equal(labels, blobs().y_test)
    model = result.model(4)
    torch.testing.assert_close(probabilities, model.probabilities(blobs().x_test))


def test_it_is_measured_as_by_hand(tmp_path: Path) -> None:
    result = fedgist.run(
        RECIPE, data=blobs(), clients=rows(), metrics=[f_two, miss_rate], out=tmp_path / "run"
    )
    last = result.rounds[-1]
    by_hand = [result.model(k).probabilities(blobs().x_test) for k in range(5)]
    expected = sum(f_two(p, blobs().y_test) for p in by_hand) / 5
    assert last["eval/client/f_two_mean"] == pytest.approx(expected)
    assert "eval/client/accuracy_mean" not in last
    recipe = (tmp_path / "run" / "recipe.toml").read_text()
    assert '"test_own_metrics:f_two"' in recipe or ".test_own_metrics:f_two" in recipe
    described = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert described["miss_rate"] == {
        "name": "miss_rate",
        "title": "Misses",
        "unit": "fraction",
        "better": "lower",
    }
    assert "f two" in repr(result)


def test_the_first_metric_selects_the_round() -> None:
    scores = iter([0.9, 0.2, 0.5, 0.6, 0.7, 0.8])

    @fedgist.metric(better="lower")
    def cost(probabilities: Tensor, labels: Tensor) -> float:
        return next(scores)

    # one score is of the trial, and then two clients are scored on validation rows in a round
    changes: dict[str, Any] = {
        "data": {"validation": 0.5},
        "evaluate": {"keep": "best_validation", "patience": 1, "on": "client"},
        "train": {"num_rounds": 9, "batch_size": 5},
    }
    data = (blobs().x, blobs().y)
    result = fedgist.run(RECIPE | changes, data=data, clients=[range(32)], metrics=[cost])
    assert result.summary["kept_round"] == 1
    assert result.summary["stopped_early"]
    assert result.summary["selection"]["column"] == "eval/validation/cost_mean"
    assert result.summary["selection"]["best"] == 0.2


def test_undefined_for_some_clients() -> None:
    def two_kinds(probabilities: Tensor, labels: Tensor) -> float:
        if len(labels) < 12:
            raise ValueError("too few rows")
        return math.nan

    last = run([two_kinds, "accuracy"]).rounds[-1]
    assert "eval/client/two_kinds_mean" not in last
    assert "eval/client/accuracy_mean" in last


def test_an_infinite_result_of_one_client_is_undefined_and_counted() -> None:
    # seen: the mean was infinite and its spread NaN, without a note
    def cost(probabilities: Tensor, labels: Tensor) -> float:
        return math.inf if len(labels) < 12 else 1.0

    last = run([cost, "accuracy"]).rounds[-1]
    known = [last[key] for key in last if key.startswith("eval/client/cost")]
    assert all(math.isfinite(value) for value in known)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda p, y: 1 / 0, "'<lambda>': the function's name is a column's name"),
        (len, r"metric len failed on 12 rows: TypeError: len\(\) takes exactly one"),
        (torch.nn.Linear, "must be a function of"),
        (3, "must be a function of"),
    ],
)
def test_what_is_no_metric_is_refused_before_round_1(function: Any, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        run([function])


def named(name: str, result: object = 0.5) -> Callable[..., object]:
    def function(probabilities: Tensor, labels: Tensor) -> object:
        return result

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    "name", ["accuracy", "loss", "x_mean", "x_std", "trained_x", "rows", "X", "a/b", "confusion"]
)
def test_names_that_are_no_column(name: str) -> None:
    with pytest.raises(RecipeError, match="the function's name is a column's name"):
        own_metric(named(name))


@pytest.mark.parametrize("result", [None, "0.5", torch.zeros(2), [0.5]])
def test_results_that_are_no_number(result: object) -> None:
    with pytest.raises(RecipeError, match=r"metric mine returned a .*; it must return one number"):
        run([named("mine", result)])


def test_two_of_one_name_and_metrics_given_twice() -> None:
    with pytest.raises(RecipeError, match="two are called 'mine'"):
        make({"objective": {"metrics": ["a:mine", "b:mine"]}})
    with pytest.raises(RecipeError, match=r"objective.metrics is given in the recipe, and metrics"):
        run(["accuracy"], objective={"metrics": ["auroc"]})
    with pytest.raises(RecipeError, match="metrics is 'auroc'; it must be a list"):
        fedgist.run(RECIPE, data=blobs(), metrics="auroc")
    with pytest.raises(RecipeError, match="next_word has no metric 'a:mine'"):
        make({"objective": {"name": "next_word", "metrics": ["a:mine"]}})


def test_options_that_no_metric_reads() -> None:
    recipe = RECIPE | {"objective": {"positive": 1}}
    with pytest.raises(RecipeError, match="positive = 1: with 3 classes only the metric average"):
        fedgist.run(recipe, data=blobs())
    recipe = RECIPE | {"objective": {"metrics": ["average_precision"], "positive": "ill"}}
    with pytest.raises(RecipeError, match="blobs has no such class; it has 0, 1, 2"):
        fedgist.run(recipe, data=blobs())


def test_a_decorated_function_is_still_a_function() -> None:
    assert isinstance(miss_rate, OwnMetric)
    assert miss_rate(torch.eye(2), torch.tensor([0, 0])) == 0.5
    with pytest.raises(ValueError, match="better="):
        fedgist.metric(better="less")  # type: ignore[arg-type]


CODE = """
import fedgist

@fedgist.metric(better="lower")
def cost(probabilities, labels):
    return float((probabilities.argmax(1) != labels).double().mean()) * 100 + 3

def cheap(probabilities, labels):
    return 1.0
"""
TOML = """
[clients]
num_clients = 3
[method]
name = "local"
[objective]
metrics = ["own_costs:cost", "own_costs:cheap", "accuracy"]
[train]
num_rounds = 2
lr = 0.01
[engine]
workers = 1
"""


@pytest.mark.slow
def test_the_command_line_shows_compares_and_tunes_by_it(tmp_path: Path) -> None:
    (tmp_path / "own_costs.py").write_text(CODE)
    (tmp_path / "mine.toml").write_text(TOML)
    (tmp_path / "space.toml").write_text('["train.lr"]\nchoices = [1e-6, 0.05]\n')
    run = commands.fedgist("run", "mine.toml", "--out", "a", cwd=tmp_path)
    assert "  cost " in run.stdout
    assert " %" not in run.stdout.partition("round 1/2")[2].splitlines()[0]
    shown = commands.fedgist("show", "a", "--no-code", cwd=tmp_path).stdout
    assert "cost" in shown
    commands.fedgist("report", "a", "-o", "a.html", "--no-code", cwd=tmp_path)
    assert "Cost" in (tmp_path / "a.html").read_text()
    scored = commands.fedgist("compare", "a", "--format", "json", cwd=tmp_path).stdout
    assert json.loads(scored)["metric"] == "eval/client/cost_mean"
    tuned = commands.fedgist(
        "tune", "mine.toml", "--space", "space.toml", "--trials", "2", "--out", "t", cwd=tmp_path
    ).stdout
    assert "lr = 0.05" in tuned.partition("best of 2 trials")[2]  # the lower cost
