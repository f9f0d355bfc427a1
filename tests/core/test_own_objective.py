"""A user's own objective: its parts, its rules, and runs with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedgist
from fedgist.core.batch import Batch
from fedgist.core.losses import masked_mean
from fedgist.errors import InputError, RecipeError
from fedgist.testing import check_objective
from small_tasks import classes, numbers, recipe_of

Loss = Callable[[Any, Tensor, Batch], Tensor]


def deviance(outputs: Tensor, y: Tensor) -> float:
    """Mean distance, for the tests."""
    return float((outputs - y).abs().mean())


class Distance:
    """The mean squared distance, summed over numbers."""

    labels = "numbers"
    outputs = 3
    metrics = (deviance,)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return masked_mean((outputs - batch.y).square().sum(-1), batch.mask)


def surest(probabilities: Tensor, y: Tensor) -> float:
    """The largest probability, for the tests."""
    del y
    return float(probabilities.max())


class Focal:
    """The focal loss of classes: methods that need classes may use it."""

    labels = target = "class"
    outputs = 3
    metrics = (surest,)

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        log_p = outputs.log_softmax(-1).gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        return masked_mean(-((1 - log_p.exp()) ** 2) * log_p, batch.mask)


def test_a_good_objective_keeps_all_rules() -> None:
    assert len(check_objective(Distance(), 3)) == 7
    assert check_objective(Focal(), 3)


def spoiled(loss: Loss) -> object:
    return type("Spoiled", (), {**vars(Distance), "loss": loss})()


def _in_place(self: Any, outputs: Tensor, batch: Batch) -> Tensor:
    batch.y.add_(1)
    return Distance.loss(self, outputs, batch)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda s, o, b: (o - b.y).square().sum(-1), "is a finite number"),
        (lambda s, o, b: o.sum() * torch.nan, "is a finite number"),
        (lambda s, o, b: (o - b.y).square().mean(), "none of absent rows"),
        (lambda s, o, b: Distance().loss(o.detach(), b), "has finite gradients"),
        (lambda s, o, b: Distance().loss(o, b) + b.y[-1].sum(), "a false mask have no effect"),
        (lambda s, o, b: Distance().loss(o, b) * b.y[0, 0], "order of rows has no effect"),
        (lambda s, o, b: (o - b.y)[b.mask].square().mean(), "works under vmap"),
        (_in_place, "changes no input"),
    ],
)
def test_each_rule_refuses_a_loss_that_breaks_it(loss: Loss, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        check_objective(spoiled(loss), 3)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"labels": None}, "labels must be"),
        ({"labels": "pixels"}, "labels must be 'class' or 'numbers' or 'labels'"),
        ({"outputs": 0}, "outputs must be a whole number"),
        ({"outputs": True}, "outputs must be a whole number"),
        ({"target": "class"}, "target must be 'own', or 'class'"),
        ({"metrics": (3,)}, "must be a function"),
        ({"metrics": ()}, "metrics is empty"),
        ({"metrics": (deviance, deviance)}, "two metrics are called 'deviance'"),
        ({"metrics": (lambda a, b: "x",)}, "function's name|must return one number"),
    ],
)
def test_parts_that_are_missing_or_wrong_are_named(parts: dict[str, object], says: str) -> None:
    thing = type("Wrong", (), {**vars(Distance), **parts})()
    with pytest.raises(RecipeError, match=says):
        check_objective(thing, 3)
    lacking = type("Lacking", (), {"labels": "numbers", "outputs": 3, "metrics": ()})()
    with pytest.raises(RecipeError, match="objective Lacking has no loss"):
        check_objective(lacking, 3)
    with pytest.raises(RecipeError, match="give an object of it"):
        check_objective(Distance, 3)


def test_a_run_with_an_own_objective_is_recorded_resumed_and_read(tmp_path: Path) -> None:
    found = recipe_of("regression", method={"name": "fedavg"})
    del found["objective"]
    folder = tmp_path / "run"
    run = fedgist.run(found, data=numbers(), objective=Distance(), out=folder)
    line = run.rounds[-1]
    assert line["eval/client/deviance_mean"] > 0
    assert line["eval/client/loss_mean"] > 0
    assert "test_own_objective:Distance" in (folder / "recipe.toml").read_text()
    x = numbers().x_test
    assert torch.equal(run.model(0).predict(x), run.model(0).answers(x))  # type: ignore[arg-type]
    assert run.model(0).output_names == ("output_0", "output_1", "output_2")
    with pytest.raises(ValueError, match="no probabilities"):
        run.model(0).probabilities(x)
    more = fedgist.run(data=numbers(), objective=Distance(), out=folder, resume=True, rounds=2)
    assert [entry["round"] for entry in more.rounds] == [1, 2]


def test_methods_that_need_classes_refuse_it_unless_its_target_is_class() -> None:
    found = recipe_of("classes", method={"name": "fedlog"})
    del found["objective"]
    with pytest.raises(InputError, match=r"FedLog needs .*an objective of your own"):
        fedgist.run(found | {"method": {"name": "fedlog"}}, data=numbers(), objective=Distance())
    line = fedgist.run(found, data=classes(), objective=Focal()).rounds[-1]
    assert line["eval/client/loss_mean"] > 0


def test_labels_of_another_form_are_refused() -> None:
    found = recipe_of("classes", method={"name": "fedavg"})
    del found["objective"]
    with pytest.raises(InputError, match="needs numbers for each row; small has one class"):
        fedgist.run(found, data=classes(), objective=Distance())


def test_a_recipe_names_a_class_with_options(tmp_path: Path) -> None:
    code = """
from dataclasses import dataclass
from fedgist.core.losses import masked_mean

def largest_error(outputs, y):
    return (outputs - y).abs().max()

@dataclass(frozen=True)
class Power:
    exponent: float = 2.0
    labels = "numbers"
    outputs = 1
    metrics = (largest_error,)

    def loss(self, outputs, batch):
        return masked_mean((outputs - batch.y).abs().pow(self.exponent).sum(-1), batch.mask)
"""
    (tmp_path / "powers.py").write_text(code)
    text = """
seed = 1
[data]
name = "diabetes"
[objective]
name = "powers:Power"
exponent = 1.5
[partition]
name = "natural"
[method]
name = "fedavg"
[train]
num_rounds = 1
[engine]
workers = 1
[engine.plans.mlp]
cohort_size = 5
"""
    (tmp_path / "recipe.toml").write_text(text)
    line = fedgist.run(tmp_path / "recipe.toml").rounds[-1]
    assert line["eval/client/loss_mean"] > 0
    (tmp_path / "recipe.toml").write_text(text.replace("exponent = 1.5", "power = 1.5"))
    with pytest.raises(InputError, match=r"objective.power: unknown key of powers:Power"):
        fedgist.run(tmp_path / "recipe.toml")
