"""Which method serves which task: every combination runs, or is refused by name before round 1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedgist
from fedgist.core.objectives.metrics import METRICS_OF, OBJECTIVES
from fedgist.core.objectives.target import LABELS_OF
from fedgist.errors import InputError
from fedgist.methods import METHODS
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import world_of
from method_objects import TRAINS
from small_tasks import TASKS, labels, numbers, pixels, recipe_of, text_classes

NEEDS: dict[str, dict[str, Any]] = {  # beside a recipe's own settings
    "flesd": {"distillation": {"epochs": 2, "batch_size": 4}},
    "fedproto": {"inference": "logits"},
    "feddf": {"distillation": {"steps": 30, "batch_size": 4}},
}
COMBINATIONS = [(method, objective) for method in METHODS for objective in TASKS]


def asked(method: str, objective: str) -> dict[str, Any]:
    found = recipe_of(objective, method={"name": method, **NEEDS.get(method, {})})
    if method in {"flesd", "merged_codist", "periodic_codist", "fedmd", "feddf"}:
        found["data"] = {"public": {"rows": 8}}
    found["train"] |= TRAINS.get(method, {})
    if "codist" in method:
        model = found.pop("model")
        found.pop("engine")
        name = model.pop("name")
        found["clients"] = {"pools": {p: {"model": name, **model} for p in ("a", "b")}}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("method", "objective"), COMBINATIONS)
def test_every_method_serves_a_task_or_refuses_it_by_name(method: str, objective: str) -> None:
    data, recipe = TASKS[objective][0](), asked(method, objective)
    task: Any = OBJECTIVES[objective]
    if task.target not in METHODS[method].targets:
        with pytest.raises(InputError, match=f"{METHODS[method].__name__} needs .*{objective}"):
            world_of(make(recipe), Overrides(data=data))
        return
    run = fedgist.run(recipe, data=data)
    line = run.rounds[-1]
    first = next(iter(METRICS_OF[objective]))
    columns = [name for name in line if name.startswith("eval/") and f"/{first}" in name]
    assert columns
    assert all(math.isfinite(line[name]) for name in columns)
    assert line["comm/up_bytes"] >= 0


def test_names_of_objectives_and_their_labels_agree() -> None:
    assert set(OBJECTIVES) == set(LABELS_OF) == set(METRICS_OF)
    made: dict[str, Any] = dict(OBJECTIVES.items())
    assert {name: cls.labels for name, cls in made.items()} == dict(LABELS_OF)


@pytest.mark.parametrize("objective", TASKS)
def test_stacked_and_alone_train_alike(objective: str) -> None:
    data, model = TASKS[objective][0](), TASKS[objective][1]["name"]
    lines = []
    for plan in ({"cohort_size": 3}, {"cohort_size": 1, "stack": False}):
        engine = {"workers": 1, "plans": {model: plan}}
        found = recipe_of(objective, method={"name": "fedavg"}, engine=engine)
        lines.append(fedgist.run(found, data=data).rounds[-1])
    names = [name for name in lines[0] if name.startswith(("eval/", "train/"))]
    for name in names:
        if isinstance(lines[0][name], float):
            assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["regression", "multilabel", "segmentation", "text_classes"])
def test_models_learn_the_small_tasks(objective: str) -> None:
    data = TASKS[objective][0]()
    train = {"num_rounds": 12, "lr": 0.02, "batch_size": 8, "local_epochs": 4, "optimizer": "adam"}
    found = recipe_of(objective, method={"name": "centralized"}, train=train)
    if objective == "segmentation":
        found["model"]["channels"] = 6
    run = fedgist.run(found, data=data)
    metric = next(iter(METRICS_OF[objective]))
    first, last = (run.rounds[i][f"eval/global/{metric}"] for i in (0, -1))
    assert last > max(first, 0.5)


@pytest.mark.parametrize(
    ("data", "sections", "says"),
    [
        (numbers(), {"objective": {"name": "classes"}}, "numbers for each row; use 'regression'"),
        (labels(), {"objective": {"name": "regression"}}, "several labels .*use 'multilabel'"),
        (
            text_classes(),
            {"objective": {"name": "classes"}},
            "texts with one class.*'text_classes'",
        ),
        (numbers(), {"partition": {"name": "dirichlet"}}, "needs one class for each row"),
        (numbers(), {"train": {"class_weights": "balanced"}}, "needs one class for each row"),
        (numbers(), {"train": {"label_smoothing": 0.1}}, "smooths classes"),
        (numbers(), {"train": {"sample_weights": "w"}}, "the annotations of small are nothing"),
        (numbers(), {"evaluate": {"probe": "logistic"}}, "needs one class for each row"),
        (
            numbers(),
            {"objective": {"name": "regression", "metrics": ["auroc"]}},
            "no metric 'auroc'",
        ),
        (numbers(), {"objective": {"name": "regression", "std": [0.0]}}, "objective.std"),
        (numbers(), {"objective": {"name": "regression", "mean": [0.0] * 7}}, "has 7 numbers"),
    ],
)
def test_what_a_task_does_not_have_is_refused(
    data: Any, sections: dict[str, Any], says: str
) -> None:
    objective = {"numbers": "regression", "labels": "multilabel"}.get(data.target, "text_classes")
    with pytest.raises(InputError, match=says):
        world_of(make(recipe_of(objective) | sections), Overrides(data=data))


def test_augmentation_that_moves_pixels_is_refused() -> None:
    found = recipe_of("segmentation", data={"augment": ["flip"]})
    with pytest.raises(InputError, match="flip moves pixels, and their classes would stay"):
        world_of(make(found), Overrides(data=pixels()))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (torch.arange(48.0) - 1, "a weight is at least 0, not -1"),
        (torch.zeros(48), "the weights of all rows are 0: nothing would be learned"),
    ],
)
def test_weights_of_rows_are_not_negative_and_not_all_0(weights: torch.Tensor, says: str) -> None:
    data = replace(numbers(), annotations={"w": weights})
    found = recipe_of("regression", train={"num_rounds": 1, "sample_weights": "w"})
    with pytest.raises(InputError, match=says):
        world_of(make(found), Overrides(data=data))


@pytest.mark.slow
@pytest.mark.parametrize("objective", TASKS)
def test_a_weight_of_0_takes_a_row_out_of_training(objective: str) -> None:
    weight = (torch.arange(48) % 2).float()
    data = replace(TASKS[objective][0](), annotations={"w": weight})
    there = weight.view(-1, *(1 for _ in data.y.shape[1:])) > 0
    other = data.y.roll(1, 0)  # labels of other rows
    garbled = replace(data, y=torch.where(there, data.y, other))
    assert not torch.equal(garbled.y, data.y)
    found = recipe_of(objective, method={"name": "centralized"})
    found["train"] = {"num_rounds": 2, "lr": 0.1, "batch_size": 48, "sample_weights": "w"}
    if objective == "regression":  # else the means of the labels differ
        found["objective"] = {"name": objective, "mean": [5.0], "std": [10.0]}
    runs = [fedgist.run(found, data=rows) for rows in (data, garbled)]
    assert runs[0].rounds[-1]["train/loss"] == runs[1].rounds[-1]["train/loss"]
    plain = found | {"train": {"num_rounds": 2, "lr": 0.1, "batch_size": 48}}
    losses = [fedgist.run(plain, data=rows).rounds[-1]["train/loss"] for rows in (data, garbled)]
    assert losses[0] != losses[1]


def test_own_metrics_get_numbers_and_labels() -> None:
    def worst(predicted: torch.Tensor, true: torch.Tensor) -> float:
        assert predicted.shape == true.shape
        assert predicted.shape[1] == 3
        return float((predicted - true).abs().max())

    for objective, data in (("regression", numbers()), ("multilabel", labels())):
        line = fedgist.run(recipe_of(objective), data=data, metrics=[worst]).rounds[-1]
        assert line["eval/client/worst_mean"] > 0


def test_missing_labels_are_refused_unless_they_are_masked() -> None:
    data = numbers()
    y = data.y.clone()
    y[5, 1] = math.nan
    data = replace(data, y=y)
    with pytest.raises(InputError, match=r"training row 5 .* lacks a label; .*missing_labels"):
        world_of(make(recipe_of("regression")), Overrides(data=data))
    masked = recipe_of("regression", data={"missing_labels": "mask"}, method={"name": "fedavg"})
    line = fedgist.run(masked, data=data).rounds[-1]
    assert math.isfinite(line["eval/client/r2_mean"])
    y[5] = math.nan
    with pytest.raises(InputError, match=r"training row 5 .* has no label"):
        world_of(make(masked), Overrides(data=data))
