"""Features of 2 numbers as they are, with the lines of heads; a metric over a varied setting."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import fedgist
from fedgist.errors import ReportError
from fedgist.report.pictures import study_pictures as pictures
from fedgist.report.pictures.drawing import Picture
from fedgist.report.pictures.feature_pictures import borders_of, plane
from fedgist.report.pictures.varied import over, varied
from fedgist.report.tables import comparison
from fedgist.runs.files.record import FEATURES
from fedgist.runs.finished.run_reader import find
from written import sealed_run, write_run

SLOW = pytest.mark.slow
BOX = (-3.0, 3.0, -2.0, 2.0)


def drawn(folder: Path) -> dict[str, Picture]:
    return {
        picture.name: picture for picture in pictures.pictures(comparison.study(find([folder])))
    }


def winners(weight: np.ndarray, bias: np.ndarray, points: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.argmax(points @ weight.T + bias, axis=1)
    return found


@pytest.mark.parametrize("classes", [2, 3, 6])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))]
)
def test_borders_are_where_the_class_changes(classes: int, seed: int) -> None:
    # an oracle by brute force: the class with the highest logit on both sides of many places
    draws = np.random.default_rng(seed)
    weight, bias = draws.normal(size=(classes, 2)), draws.normal(size=classes)
    found = list(borders_of(weight, bias, BOX))
    length = 0.0
    for border in found:
        start, end = np.array(border.start), np.array(border.end)
        along = end - start
        across = 1e-6 * np.array([-along[1], along[0]]) / np.linalg.norm(along)
        places = start + np.linspace(0.01, 0.99, 20)[:, None] * along
        assert (np.abs(places[:, 0]) <= 3 + 1e-9).all()
        assert (np.abs(places[:, 1]) <= 2 + 1e-9).all()
        both = {
            tuple(sorted(pair))
            for pair in zip(
                winners(weight, bias, places + across).tolist(),
                winners(weight, bias, places - across).tolist(),
                strict=True,
            )
        }
        assert both == {border.classes}
        length += float(np.linalg.norm(along))
    assert length == pytest.approx(crossed(weight, bias), rel=0.05, abs=0.05)


def crossed(weight: np.ndarray, bias: np.ndarray) -> float:
    """The length of all borders in the box, by how often fine lines in many directions cross them.

    By Cauchy and Crofton: parallel lines at a distance h cross a curve of length l on average
    2 l / (pi h) times.
    """
    distance, directions, count = 0.03, 30, 0
    for angle in (np.arange(directions) + 0.5) * np.pi / directions:
        along = np.array([np.cos(angle), np.sin(angle)])
        across = np.array([-along[1], along[0]])
        t = np.arange(-4, 4, 0.01)
        for offset in np.arange(-4, 4, distance):
            points = offset * across + t[:, None] * along
            inside = (np.abs(points[:, 0]) <= 3) & (np.abs(points[:, 1]) <= 2)
            count += int(np.count_nonzero(np.diff(winners(weight, bias, points[inside]))))
    return np.pi * distance * count / (2 * directions)


def test_heads_that_never_change_their_mind_have_no_border() -> None:
    weight = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert list(borders_of(weight, np.array([0.0, 1.0]), BOX)) == []  # parallel: one always wins
    far = np.array([[1.0, 0.0], [0.0, 0.0]])
    assert list(borders_of(far, np.array([9.0, 0.0]), BOX)) == []  # outside the box
    # of three classes the middle one never wins, so only the other two have a border
    three = np.array([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])
    (only,) = borders_of(three, np.array([0.0, -1.0, 0.0]), BOX)
    assert only.classes == (0, 2)
    assert {only.start, only.end} == {(0.0, -2.0), (0.0, 2.0)}


CIRCLE: dict[str, Any] = {
    "data": {"name": "circle"},
    "partition": {"name": "natural"},
    "clients": {"init": "own"},
    "model": {"name": "mlp", "hidden": [4, 2], "last": "none"},
    "train": {"num_rounds": 1, "batch_size": 40},
    "evaluate": {"save_features": 7},
    "engine": {"workers": 1, "cohort_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedlog", "local"])
def test_a_run_saves_its_heads_and_they_are_drawn(tmp_path: Path, method: str) -> None:
    run = tmp_path / method
    result = fedgist.run({**CIRCLE, "method": {"name": method}}, out=run)
    arrays = safetensors.numpy.load_file(run / FEATURES)
    assert arrays["weight"].shape == (2, 2, 2)
    for client in (0, 1):
        mine = arrays["client"] == client
        assert mine.sum() == 7
        logits = arrays["features"][mine] @ arrays["weight"][client].T + arrays["bias"][client]
        rows = result.world.partition.test[client][:7]
        expected = result.model(client)(result.world.data.x_test[rows])
        torch.testing.assert_close(torch.from_numpy(logits), expected)
    found = plane(run)
    assert found is not None
    assert found.heads == (((0, 1),) if method == "fedlog" else ((0,), (1,)))
    picture = drawn(tmp_path)["features-1"]
    points = [line for line in picture.table if line[0] == "point"]
    assert [line[1:5] for line in points] == [
        [int(client), int(label), pytest.approx(float(x)), pytest.approx(float(y))]
        for client, label, (x, y) in zip(
            arrays["client"], arrays["label"], arrays["features"], strict=True
        )
    ]
    (legend,) = picture.figure.legends
    words = {text.get_text().lstrip("\u200b") for text in legend.get_texts()}
    assert {"client left", "client right"} < words


def test_wider_features_save_no_heads(tmp_path: Path) -> None:
    model = {"name": "mlp", "hidden": [4, 3]}
    fedgist.run({**CIRCLE, "model": model}, out=tmp_path / "run")
    arrays = safetensors.numpy.load_file(tmp_path / "run" / FEATURES)
    assert set(arrays) == {"features", "client", "label"}
    assert plane(tmp_path / "run") is None
    assert "features-1-class" in drawn(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.rand(2, 3, 2).numpy()},
        {"weight": torch.rand(3, 3, 3).numpy()},
        {"bias": torch.rand(3).numpy()},
        {"bias": torch.full((3, 3), torch.nan).numpy()},
    ],
    ids=["a client without", "another width", "one number", "not finite"],
)
def test_heads_that_do_not_fit_are_told(tmp_path: Path, change: dict[str, Any]) -> None:
    run = write_run(tmp_path / "a", [0.5], clients=[0.5])
    arrays = {
        "features": torch.rand(12, 2).numpy(),
        "client": (torch.arange(12) % 3).numpy(),
        "label": (torch.arange(12) % 3).numpy(),
        "weight": torch.rand(3, 3, 2).numpy(),
        "bias": torch.rand(3, 3).numpy(),
    }
    safetensors.numpy.save_file(arrays, run / FEATURES)
    sealed_run(run)
    assert "features-1" in drawn(tmp_path)
    safetensors.numpy.save_file(arrays | change, run / FEATURES)
    sealed_run(run)
    assert not any(name.startswith("features") for name in drawn(tmp_path))
    study = comparison.study(find([tmp_path]))
    assert pictures.unreadable(study) == [f"{run / FEATURES} cannot be used"]


# a metric over a setting


def with_setting(folder: Path, value: object, accuracy: float, seed: int, method: str) -> None:
    run = write_run(folder, [accuracy], method=method, seed=seed)
    recipe = run / "recipe.toml"
    line = "" if value is None else f"alpha = {json.dumps(value)}"
    text, count = re.subn(r"(?m)^alpha = .*$", line, recipe.read_text())
    assert count == 1
    recipe.write_text(text)
    sealed_run(recipe.parent)


def test_each_line_is_what_is_alike_but_for_the_setting(tmp_path: Path) -> None:
    for number, value in enumerate((8.0, 0.5, 2)):
        for seed in (0, 1):
            place = tmp_path / f"{value}-{seed}"
            with_setting(place, value, 0.5 + 0.1 * number + 0.02 * seed, seed, "fedlog")
    with_setting(tmp_path / "fedavg", 2.0, 0.3, 0, "fedavg")
    with_setting(tmp_path / "none", None, 0.9, 0, "fedlog")
    study = comparison.study(find([tmp_path]))
    lines = {line.label: line for line in varied(study.rows, "partition.alpha")}
    assert set(lines) == {"fedlog", "fedavg"}
    assert [value for value, _ in lines["fedlog"].points] == [0.5, 2.0, 8.0]
    means = [mean.mean for _, mean in lines["fedlog"].points]
    assert means == pytest.approx([0.61, 0.71, 0.51])
    assert lines["fedlog"].without is not None
    assert lines["fedlog"].without.mean == pytest.approx(0.9)
    assert lines["fedavg"].without is None
    picture = over(study, "partition.alpha")
    assert [line[:2] for line in picture.table[1:]] == [
        [label, value]
        for label, line in lines.items()
        for value in (*(v for v, _ in line.points), *([""] if line.without else []))
    ]
    assert "without the setting" in picture.caption


def test_a_setting_that_has_no_place_on_an_axis_is_told(tmp_path: Path) -> None:
    with_setting(tmp_path / "a", "much", 0.5, 0, "fedlog")
    study = comparison.study(find([tmp_path]))
    with pytest.raises(ReportError, match=r"no run has the setting 'partition.alpa'; did you mean"):
        over(study, "partition.alpa")
    with pytest.raises(ReportError, match=r"partition.alpha = 'much' of fedlog: only numbers"):
        over(study, "partition.alpha")
