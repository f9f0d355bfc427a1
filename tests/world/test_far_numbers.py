"""Numbers far from zero train, score, predict and export as if they were near it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedgist
from fedgist.data.facts import DataFacts
from fedgist.runs.finished.model_files import export
from fedgist.world.declared import as_section, differences

FAR = 2.0**31  # float32 has a step of 256 there
RECIPE: dict[str, Any] = {
    "train": {"num_rounds": 2, "batch_size": 10, "lr": 0.02},
    "partition": {"name": "iid"},
    "clients": {"num_clients": 3},
    "model": {"name": "mlp", "hidden": [6]},
}
DRAWS = np.random.default_rng(0)
X = np.round(DRAWS.normal(size=(200, 4)) * 2**20) / 2**20  # so that a shift rounds nothing
Y = np.round(np.stack([X[:, 0], 3 * X[:, 1]], 1) * 2**20) / 2**20
CLASSES = (X[:, 0] > 0).astype(int)


def run(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], **sections: Any) -> fedgist.Result:
    return fedgist.run(RECIPE | sections, data=(x[:150], y[:150], x[150:], y[150:]))


@pytest.mark.parametrize("method", ["fedavg", "fedlog", "fedrep", "centralized"])
def test_predicted_numbers_far_from_zero(method: str) -> None:
    # seen: an error of exactly 0, because all targets had become equal
    sections = {"method": {"name": method}, "objective": {"name": "regression"}}
    near, far = run(X, Y, **sections), run(X, Y + FAR, **sections)
    for metric in ("mae", "rmse", "r2", "loss"):
        name = f"eval/client/{metric}_mean"
        name = name if name in near.rounds[-1] else f"eval/global/{metric}"
        assert far.rounds[-1][name] == pytest.approx(near.rounds[-1][name], rel=1e-5)
        assert metric == "r2" or far.rounds[-1][name] > 0
    if method != "centralized":
        answers = [result.model(0).predict(X[150:]) for result in (near, far)]
        assert all(isinstance(part, torch.Tensor) for part in answers)
        shifted = torch.as_tensor(answers[1]) - FAR
        assert torch.allclose(shifted, torch.as_tensor(answers[0]).double(), atol=1e-5)


def test_inputs_far_from_zero_and_an_exported_model(tmp_path: Path) -> None:
    sections = {"method": {"name": "fedlog"}}
    near, far = run(X, CLASSES, **sections), run(X + FAR, CLASSES, **sections)
    name = "eval/client/loss_mean"  # Adam turns last bits into small steps
    assert far.rounds[-1][name] == pytest.approx(near.rounds[-1][name], rel=1e-3)
    assert far.model(0).predict(X[150:] + FAR) == near.model(0).predict(X[150:])
    export(far.model(0), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    logits = program(torch.from_numpy(X[150:] + FAR))
    own = near.model(0).eval()(torch.from_numpy(X[150:]))
    assert torch.allclose(logits, own, atol=1e-2)


def test_a_federation_does_not_see_in_how_many_bits_a_site_keeps_its_rows() -> None:
    near, far = (DataFacts("t", (2,), 2, element) for element in ("float32", "float64"))
    assert [*differences(near, far)] == [*differences(far, near)] == []
    assert as_section(far)["element"] == "float32"
    assert [*differences(near, DataFacts("t", (2,), 2, "uint8"))] != []
