"""model.project: models of different widths make features of one width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fedgist
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import Net
from fedgist.core.random import key
from fedgist.errors import MethodError, RecipeError
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.report.terminal.progress import title
from fedgist.runs.finished.model_files import export
from fedgist.testing.small_worlds import blobs, rows, world, world_of

WIDE = {"model": "mlp", "hidden": [9, 8], "dropout": 0.5, "clients": [0, 1]}
SMALL = {"model": "mlp", "hidden": [4], "clients": [2, 3]}
FLAT = {"model": "logistic", "clients": [4]}
ARCHITECTURES = {"wide": WIDE, "small": SMALL, "flat": FLAT}
X = blobs().x


def starts(**model: Any) -> dict[str, Net]:
    made = world("fedlog", architectures=ARCHITECTURES, model=model)
    return dict(made.server.task.starts)


def test_features_are_the_models_own_and_then_projected() -> None:
    net = starts(project=4)["wide"]
    p = net.params
    own = (X @ p["1.weight"].T + p["1.bias"]).relu()
    own = (own @ p["3.weight"].T + p["3.bias"]).relu()
    features = own @ p["6.project.weight"].T + p["6.project.bias"]
    logits = features @ p["6.head.weight"].T + p["6.head.bias"]
    torch.testing.assert_close(net.features(X), features)
    torch.testing.assert_close(net(X), logits)
    assert features.shape == (len(X), 4)


def test_the_projection_is_of_the_body_and_the_head_is_new() -> None:
    nets = starts(project=4)
    assert {"6.project.weight", "6.project.bias"} < set(nets["wide"].body)
    assert set(nets["wide"].part("head")) == {"6.head.weight", "6.head.bias"}
    assert {net.arch.feature_width for net in nets.values()} == {4}
    assert "4.weight" in nets["small"].part("head")  # its features had this width


def test_dropout_before_the_head_acts_on_projected_features() -> None:
    net = starts(project=4)["wide"]
    training = Net(net.params, net.buffers, net.arch, Pass(torch.ones(len(X)).bool(), key(1)))
    z = training.features(X)
    torch.testing.assert_close(z, net.features(X))  # features are whole in training
    weight, bias = net.head
    assert bias is not None
    # each feature is zero or doubled: some choice of the four must give the logits
    choices = torch.cartesian_prod(*[torch.tensor([0.0, 2.0])] * 4)
    possible = (z[:, None, :] * choices) @ weight.T + bias
    distance = (possible - training.logits(z)[:, None, :]).abs().amax(-1).amin(-1)
    assert float(distance.max()) < 1e-5


@pytest.mark.parametrize("method", ["fedlog", "fedlog_c", "fedproto", "repshare", "local"])
def test_methods_of_one_width_take_any_module(method: str) -> None:
    recipe: dict[str, Any] = {
        "train": {"num_rounds": 2, "batch_size": 5},
        "method": {"name": method},
        "model": {"project": 6},
        "clients": {"architectures": ARCHITECTURES},
        "engine": {"workers": 1},
    }
    result = fedgist.run(recipe, data=blobs(), clients=rows())
    assert result.rounds[-1]["eval/client/loss_mean"] < 5


def test_without_it_the_error_names_it() -> None:
    with pytest.raises((MethodError, RecipeError), match=r"model\.project = 4 projects the others"):
        starts()


def test_modules_from_python_are_projected() -> None:
    class Own(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = nn.Linear(6, width)
            self.fc = nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.fc(self.body(x).tanh())
            return logits

    models = {"a": (Own(7), [0, 1]), "b": (Own(5), [2, 3, 4])}
    recipe = {"model": {"project": 5}, "train": {"num_rounds": 1}, "method": {"name": "fedlog"}}
    result = fedgist.run(recipe, data=blobs(), clients=rows(), model=models)
    large, small = result.model(0), result.model(2)
    assert large.arch.head == "fc.head"
    assert small.arch.head == "fc"


def test_an_exported_model_contains_its_projection_and_starts_another_run(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "train": {"num_rounds": 1},
        "method": {"name": "local"},
        "model": {"name": "mlp", "hidden": [9], "project": 4},
    }
    result = fedgist.run(recipe, data=blobs(), clients=rows())
    model = result.model(0)
    for name in ("model.pt2", "model.safetensors"):
        export(model, tmp_path / name)
    program = torch.export.load(str(tmp_path / "model.pt2")).module()
    torch.testing.assert_close(program(X), model(X))
    arrays = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert arrays["4.project.weight"].shape == (4, 9)
    recipe["model"]["weights"] = str(tmp_path / "model.safetensors")
    start = world_of(make(recipe), Overrides(data=blobs())).server.task.starts["mlp"]
    assert all(torch.equal(arrays[name], value) for name, value in start.params.items())


def test_weights_of_the_model_without_projection_start_its_body(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(6, 9), nn.ReLU(), nn.Dropout(0), nn.Linear(9, 3))
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "w.safetensors")
    raw = {"name": "mlp", "hidden": [9], "project": 4, "weights": str(tmp_path / "w.safetensors")}
    made = world_of(make({"model": raw}), Overrides(data=blobs()))
    start = made.server.task.starts["mlp"]
    assert torch.equal(start.params["1.weight"], plain.state_dict()["1.weight"])
    assert "the head keeps its random start" in made.server.notes[0]
    assert "not used: 4.bias, 4.weight" in made.server.notes[0]
    assert title(made.server, "").endswith("mlp (118 parameters, projected to 4 features), seed 0")


def test_an_architecture_may_state_its_own() -> None:
    tables = {"a": {"model": "mlp", "project": 3, "share": 0.5}, "mlp": 0.5}
    recipe = make({"clients": {"architectures": tables}, "model": {"project": 8}})
    assert recipe.clients.architectures["a"] == {"project": 3, "model": "mlp", "share": 0.5}
    assert recipe.clients.architectures["mlp"] == {"project": 8, "share": 0.5}
    assert recipe.model is None


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "64"])
def test_impossible_widths(value: object) -> None:
    with pytest.raises(RecipeError, match=r"model\.project"):
        make({"model": {"project": value}})
