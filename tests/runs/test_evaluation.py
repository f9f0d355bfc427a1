"""What is evaluated, and what it is called: clients, the server's models, their metrics."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fedgist
from fedgist.core.method import Context, Method, Net, Order, Phase
from fedgist.engines.engine import Scores, ScoreTable
from fedgist.errors import RecipeError, ReportError
from fedgist.methods.fedavg import FedAvg
from fedgist.report.tables.comparison import study
from fedgist.runs.evaluation import columns, server_columns
from fedgist.runs.files.columns import measured, over_clients, read_described
from fedgist.runs.finished import run_reader
from fedgist.testing.example_methods import TwoStages
from fedgist.testing.small_worlds import (
    CLASSES,
    SIZES,
    blobs,
    federation,
    rows,
    trace,
    two_architectures,
    world,
)
from fedgist.training import inference

TWO = two_architectures(FedAvg())
BY_HAND = (blobs().x_test - 0.5) / 2.0


def accuracy_by_hand(net: Net, chosen: torch.Tensor) -> float:
    right = net(BY_HAND[chosen]).argmax(1) == blobs().y_test[chosen]
    return float(right.double().mean())


def test_the_servers_models_are_scored_on_each_of_its_test_sets() -> None:
    small_world = world(
        "fedavg",
        architectures=TWO,
        evaluate={"on": "global", "sets": {"rare": {"classes": [2]}}},
        given={"test_sets": {"mine": (blobs().x_test[:4], blobs().y_test[:4])}},
    )
    fed = federation(small_world)
    line, details = fed.advance()
    assert details == []
    assert not [c for c in line if c.startswith("eval/client")]
    sets = {
        "all": torch.arange(30),
        "rare": (blobs().y_test == 2).nonzero().flatten(),
        "mine": torch.arange(4),
    }
    for name, net in fed.method.models(fed.server, fed.context("evaluate")).items():
        for set_name, chosen in sets.items():
            column = f"eval/global/{name}/{set_name}/accuracy"
            assert line[column] == pytest.approx(accuracy_by_hand(net, chosen))
    assert "eval/global/accuracy" not in line  # there are two models


def test_a_row_that_is_in_several_sets_is_predicted_once() -> None:
    sets = {"rare": {"classes": [2]}, "others": {"classes": [0, 1]}, "some": {"classes": [0, 2]}}
    fed = federation(world("fedavg", evaluate={"on": "global", "sets": sets}))
    ctx, seen = fed.context("evaluate"), []
    ((name, net),) = fed.method.models(fed.server, ctx).items()

    def looks(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return net(x)

    models: Any = {name: looks}
    line, _ = server_columns(models, ctx)
    assert sum(seen) == 30  # all test rows
    assert len([column for column in line if column.endswith("/loss")]) == 1 + 1 + len(sets)


def test_named_sets_are_scored_beside_the_clients() -> None:
    mine = {"mine": (blobs().x_test[:4], blobs().y_test[:4])}
    line, details = federation(world("fedavg", given={"test_sets": mine})).advance()
    assert len(details) == len(SIZES)
    assert "eval/global/mlp/mine/accuracy" in line
    with pytest.raises(RecipeError, match=r"evaluate\.sets: the server's own models are scored"):
        world("local", given={"test_sets": mine})
    line, _ = federation(world("fedavg")).advance()
    assert not [column for column in line if column.startswith("eval/global/mlp")]


def test_mean_and_spread_are_over_the_clients_that_are_scored() -> None:
    # rejects the sample's deviation, weights by rows, and clients without a score as zeros
    values = {"accuracy": torch.tensor([0.2, 0.5, torch.nan, 0.8])}
    table = ScoreTable((0, 1, 2, 3), torch.tensor([10, 1, 0, 5]), values)
    assert columns(Scores({"": table}), "client") == pytest.approx(
        {
            "eval/client/count": 3,
            "eval/client/missing": 1,
            "eval/client/accuracy_mean": 0.5,
            "eval/client/accuracy_std": math.sqrt(0.06),
        }
    )


def test_held_out_rows_are_a_set_of_the_servers() -> None:
    recipe = {
        "clients": {"num_clients": 4},
        "data": {"train_rows": 200, "validation": 0.2},
        "evaluate": {"on": "global"},
        "method": {"name": "fedavg"},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1, "cohort_size": 4},
    }
    result = fedgist.run(recipe)
    held_out = result.world.server.task.test_sets["validation"]
    assert len(held_out) == len(result.world.partition.validation.rows) > 0
    assert 0 <= result.rounds[0]["eval/global/mlp/validation/accuracy"] <= 1


def test_one_model_of_the_server_is_the_global_one() -> None:
    small_world = world("fedavg", evaluate={"on": "global"})
    line, _ = federation(small_world).advance()
    assert line["eval/global/accuracy"] == line["eval/global/mlp/all/accuracy"]
    scored = trace(world("fedavg", evaluate={"on": "test"}), rounds=1).rounds[0]
    assert scored["eval/global/accuracy"] == pytest.approx(line["eval/global/accuracy"])


@pytest.mark.parametrize(
    ("evaluate", "says"),
    [
        ({"on": "global"}, "method local has none; clients' are, with evaluate.on = 'client'"),
        ({"sets": {"x": {"classes": [7]}}}, "classes names class 7; the data have classes 0..2"),
        ({"sets": {"x": {"classes": []}}}, "evaluate.sets.x.classes"),
    ],
)
def test_what_cannot_be_evaluated_is_said(evaluate: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        world("local", evaluate=evaluate)


def test_stateless_clients_of_several_architectures_are_predicted_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # seen: two architectures cost sixty times what one does
    predicted = []
    predict = inference.predict

    def counting(cohort: Any, clients: Any, table: torch.Tensor, examples: Any) -> Any:
        predicted.append(int((table >= 0).sum()))
        return predict(cohort, clients, table, examples)

    small_world = world("fedavg", architectures=TWO)
    fed = federation(small_world)
    monkeypatch.setattr(inference, "predict", counting)
    line, details = fed.advance()
    assert sum(predicted) == 30  # every test row once, by its owner's model
    monkeypatch.undo()
    # an oracle: each client's own rows under its architecture's weights
    nets = fed.method.models(fed.server, fed.context("evaluate"))
    for entry in details:
        client = small_world.population.clients[entry["client"]]
        chosen = small_world.population.test[entry["client"]]
        oracle = accuracy_by_hand(nets[client.architectures[0]], chosen)
        assert entry["accuracy"] == pytest.approx(oracle)
    mean = sum(entry["accuracy"] for entry in details) / len(SIZES)
    assert line["eval/client/accuracy_mean"] == pytest.approx(mean)


def test_rows_of_many_numbers_are_evaluated_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # seen: 13 GB to score five clients' ResNet18, 1024 images at once
    together: list[int] = []

    @dataclass(frozen=True)
    class Looks(Method):
        def predict(
            self, net: Net, own: Any, down: Any, x: torch.Tensor, ctx: Context
        ) -> torch.Tensor:
            together.append(len(x))
            return net(x)

    whole = trace(world(Looks(), evaluate={"on": "test"}), rounds=1).clients
    the_same = [pytest.approx(line) for line in whole]  # but for last bits of losses
    assert max(together) == 30  # all test rows, of each client of a stack
    together.clear()
    monkeypatch.setattr(inference, "INPUTS_AT_ONCE", 60)  # ten rows of six, for two clients
    assert trace(world(Looks(), evaluate={"on": "test"}), rounds=1).clients == the_same
    assert max(together) <= 10
    monkeypatch.setattr(inference, "INPUTS_AT_ONCE", 1)  # less than a row has
    assert trace(world(Looks(), evaluate={"on": "test"}), rounds=1).clients == the_same


def test_a_client_with_one_class_is_left_out_of_the_area_only() -> None:
    tests = [torch.tensor([0, 3, 6]), *(torch.arange(i, 30, 5) for i in range(1, 5))]
    result = trace(world("local", given={"clients_test": tests}), rounds=1)
    first = next(line for line in result.clients if line["client"] == 0)
    assert first["auroc"] is None
    assert first["accuracy"] is not None
    others = [line["auroc"] for line in result.clients if line["client"] > 0]
    mean = result.rounds[0]["eval/client/auroc_mean"]
    assert mean == pytest.approx(sum(others) / len(others))


def test_the_last_round_has_a_confusion_matrix_over_all_clients() -> None:
    lines = trace(world("local")).rounds
    assert "eval/client/confusion" not in lines[0]
    counts = torch.tensor(lines[-1]["eval/client/confusion"])
    assert counts.shape == (CLASSES, CLASSES)
    assert counts.sum(1).tolist() == blobs().y_test.bincount().tolist()


@dataclass(frozen=True)
class TunesAtTheEnd(Method):
    """Fine-tunes in the last round alone; keeps nothing."""

    keeps: ClassVar = "none"

    def before_test(self, ctx: Context) -> tuple[Phase, ...]:
        last = ctx.round == ctx.task.training.num_rounds
        return (Phase(("all",), steps=5),) if last else ()


def test_fine_tuning_in_the_last_round_alone_is_not_skipped() -> None:
    # seen: a stateless method was asked for round 0, and never fine-tuned
    lines = trace(world(TunesAtTheEnd())).rounds
    column = over_clients("client", "accuracy", "finetuned")
    assert [column in line for line in lines] == [False, False, True]


@dataclass(frozen=True)
class Watched(Method):
    """Two stages; it writes down which clients each stage could ask."""

    seen: ClassVar[dict[tuple[int, str], list[int]]] = {}

    def stages(self, ctx: Context) -> tuple[str, ...]:
        return ("one", "two") if ctx.round else ()

    def orders(self, server: Any, selected: Any, ctx: Context) -> list[Order]:
        self.seen[ctx.round, ctx.stage] = [order.client for order in selected]
        return list(selected)


def test_one_draw_serves_all_stages_of_a_round_but_not_who_failed() -> None:
    Watched.seen.clear()
    small_world = world(Watched(), train={"fraction_train": 0.6})
    fed = federation(small_world)
    for _ in range(3):
        fed.advance()
    draws = [Watched.seen[number, "one"] for number in (1, 2, 3)]
    assert [Watched.seen[number, "two"] for number in (1, 2, 3)] == draws
    assert len({tuple(draw) for draw in draws}) > 1


def test_a_methods_own_numbers_are_in_the_record() -> None:
    lines = trace(world(TwoStages(), architectures=TWO)).rounds
    assert all(line["server/scale"] > 0 for line in lines)
    assert len({line["server/scale"] for line in lines}) == 3


def test_reports_take_direction_and_unit_from_the_run(tmp_path: Path) -> None:
    recipe = {
        "train": {"num_rounds": 1},
        "clients": {"num_clients": 5},
        "objective": {"metrics": ["macro_f1"]},
        "engine": {"workers": 1, "cohort_size": 5},
    }
    tests = list(torch.split(torch.arange(30), 6))
    given: dict[str, Any] = {"data": blobs(), "clients": rows(), "clients_test": tests}
    fedgist.run(recipe, out=tmp_path / "run", **given)
    path = tmp_path / "run" / "metrics.json"
    described = json.loads(path.read_text())
    assert set(described) == {"macro_f1", "loss"}
    # a metric that this version has never heard of, better when lower
    described["macro_f1"]["better"] = "lower"
    path.write_text(json.dumps(described))
    runs = run_reader.find([tmp_path / "run"], trust=True)  # it was edited
    comparison = study(runs)  # by the first metric of the objective
    assert comparison.metric == "eval/client/macro_f1_mean"
    assert (comparison.measure.better, comparison.measure.unit) == ("lower", "fraction")
    with pytest.raises(ReportError, match="which is no share"):
        study(runs, metric="eval/client/loss_mean", target_accuracy=0.9)
    assert read_described({"x": 3}) == read_described({})
    assert measured("server/scale").better == "higher"
