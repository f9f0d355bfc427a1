"""Factories of models: how they are called, and one line about what does not work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fedgist
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.testing.small_worlds import blobs, rows, world_of

import outside_models as own  # isort: skip

QUICK: dict[str, Any] = {
    "train": {"num_rounds": 1, "batch_size": 5},
    "engine": {"workers": 1, "cohort_size": 3},
}


def refused(says: str, **arguments: Any) -> None:
    given: dict[str, Any] = {"recipe": QUICK, "data": blobs(), "clients": rows()} | arguments
    with pytest.raises(ValueError, match=says) as error:
        fedgist.run(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"name": "outside_models:no_sizes"}, r"f\(input_shape, num_classes\), .* f\(\) -> "),
        ({"name": "outside_models:one_size"}, r"f\(input_shape, num_classes\), .* f\(x: "),
        ({"name": "outside_models:no_module"}, "returned a Tensor, not a torch.nn.Module"),
        ({"name": "outside_models:fails"}, "fails failed: IndexError: list index out of range"),
        (
            {"name": "outside_models:giant"},
            r"giant: 100,000,040,000,003 parameters, .* would take 1.6 PB; half of this machine's",
        ),
        ({"last": "clamp", "last_bound": 1e300}, r"last_bound must be above 0 and at most 1e\+30"),
        ({"hidden": [10**9]}, r"mlp \(hidden = \[1000000000\]\): 10,000,000,003 parameters, with"),
        ({"hidden": [10**9, 10**9]}, r"\): 1,000,000,011,000,000,003 parameters"),
        ({"hidden": [2**62, 2**62]}, "model mlp"),
        ({"hidden": [0]}, "hidden must hold widths of at least 1, not 0"),
        ({"hidden": [-4]}, "hidden must hold widths of at least 1, not -4"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1, not -0.1"),
        ({"dropout": True}, "dropout"),
    ],
)
def test_models_of_a_recipe_that_cannot_be_made(model: dict[str, Any], says: str) -> None:
    # seen: a factory without sizes was a TypeError of torch, and nets of gigabytes were tried
    refused(says, recipe=QUICK | {"model": model})


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (own.one_size, r"model model: a factory is called as f\(input_shape, num_classes\)"),
        (own.no_module, "model model returned a Tensor"),
        (own.fails, "model model failed: IndexError"),
        (own.giant, "model model: 100,000,040,000,003 parameters"),
        (lambda: None, "model model returned a NoneType, not a torch.nn.Module"),
        ({"a": (own.fails, range(5))}, "model a failed: IndexError"),
    ],
)
def test_models_given_from_python_that_cannot_be_made(model: Any, says: str) -> None:
    refused(says, model=model)


class Own(nn.Module):
    """A class is a factory, too."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_shape[0], 4)
        self.head = nn.Linear(4, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.fc(x)))
        return out


@pytest.mark.parametrize(
    "model", [own.good, partial(own.good, width=3), own.no_sizes, Own, own.looks_at_numbers]
)
def test_a_factory_takes_the_sizes_or_nothing(model: Callable[..., nn.Module]) -> None:
    result = fedgist.run(QUICK, data=blobs(), clients=rows(), model=model)
    assert result.model(0)(blobs().x_test).shape == (30, 3)


def test_a_factory_of_a_recipe_has_the_sizes_and_its_options() -> None:
    recipe = QUICK | {"model": {"name": "outside_models:good", "width": 7}}
    result = fedgist.run(recipe, data=blobs(), clients=rows())
    assert result.server_run.task.architectures["good"].feature_width == 7


@pytest.mark.parametrize("table", ["model", "pool"])
def test_weights_may_start_from_a_truncated_normal_distribution_and_biases_from_0(
    table: str,
) -> None:
    # rejects torch's uniform numbers, a deviation by outputs, and one rescaled for what is cut off
    model = {"init": "truncated_normal", "hidden": [400, 300]}
    recipe: dict[str, Any] = {"train": {"num_rounds": 1}}
    if table == "model":
        recipe |= {"model": {"name": "mlp", **model}, "method": {"name": "fedavg"}}
    else:
        recipe |= {"clients": {"pools": {"mlp": {"model": "mlp", **model}}}}
        recipe |= {"method": {"name": "fedadam"}}
    start = world_of(make(recipe), Overrides(data=blobs(), clients=rows())).server.task.starts[
        "mlp"
    ]
    weight = start.params["3.weight"]
    assert weight.shape == (300, 400)
    assert float(weight.abs().max()) <= 2 / 400**0.5
    # of a standard normal number cut off at two deviations: 0.8796
    assert float(weight.std()) == pytest.approx(0.8796 / 400**0.5, rel=0.01)
    assert not any(v.any() for name, v in start.params.items() if name.endswith("bias"))


def test_a_start_is_read_or_drawn() -> None:
    refused(
        "weights are the start: init = 'truncated_normal' would not be used",
        recipe=QUICK | {"model": {"weights": "a.pt", "init": "truncated_normal"}},
    )


def test_to_count_a_model_draws_nothing() -> None:
    # the start of a model is the same as if it had not been counted: nobody's generator is used
    state = torch.get_rng_state()
    fedgist.run(QUICK, data=blobs(), clients=rows(), model=own.looks_at_numbers)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_layer_without_a_size_is_named() -> None:
    """Seen: torch's own error, which names a method of TensorBase and no layer."""
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))
    refused("the layer '1' of model has no size before its first input", model=model)
    refused("model has no size", model=lambda: nn.Sequential(nn.LazyLinear(3)))
    model(torch.zeros(2, *blobs().input_shape))
    assert fedgist.run(QUICK, data=blobs(), clients=rows(), model=model).rounds
