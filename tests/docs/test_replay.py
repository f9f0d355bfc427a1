"""Archived runs are what this code computes: a sample of them begins again, round by round."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedgist
import replay
from fedgist.recipe.reading import make
from fedgist.runs.files.columns import DOWN_BYTES, TRAIN_LOSS, UP_BYTES, over_clients
from fedgist.runs.finished.archived_run import archived_part, to_csv
from fedgist.runs.finished.run_reader import read_run

RECIPE: dict[str, Any] = {
    "data": {"train_rows": 100},
    "clients": {"num_clients": 4},
    "method": {"name": "fedavg"},
    "train": {"num_rounds": 3},
    "engine": {"workers": 1},
}


def archived(
    folder: Path,
    *,
    off: float = 0.0,
    column: str = TRAIN_LOSS,
    last: int = 2,
    recipe: dict[str, Any] = RECIPE,
    result: dict[str, Any] | None = None,
) -> Path:
    """An archived run; ``off`` is added to a column of its round 2, or of its last one."""
    fedgist.run(make(recipe), out=folder / "run")
    run = archived_part(read_run(folder / "run"), "a command")
    for line in run.rounds:
        line[column] = line.get(column, 0) + (off if line["round"] == last else 0)
    path = folder / "row" / "seed-0.csv"
    path.parent.mkdir()
    path.write_text(to_csv(replace(run, result=run.result | (result or {}))))
    return path


def sealed_with(path: Path, changed: dict[str, dict[str, str]]) -> str:
    """The text of an archived run whose recipe says something else."""
    run = read_run(path)
    recipe = {name: {**run.recipe.get(name, {}), **new} for name, new in changed.items()}
    return to_csv(replace(run, recipe=dict(run.recipe) | recipe))


def test_a_run_of_this_code_is_the_same_and_two_rounds_are_done(tmp_path: Path) -> None:
    done = replay.replay(archived(tmp_path))
    assert (done.state, len(done.losses)) == ("same", 2)


@pytest.mark.parametrize("off", [3e-4, -3e-4])
def test_a_loss_that_moved_is_found(tmp_path: Path, off: float) -> None:
    path = archived(tmp_path, off=off)
    done = replay.replay(path)
    assert done.state == "differs"
    assert done.losses[0][0] == pytest.approx(done.losses[0][1], abs=1e-5)
    assert replay.main([str(path.parent), "--jobs", "1"]) == 1


@pytest.mark.parametrize("column", [UP_BYTES, DOWN_BYTES])
def test_bytes_that_moved_are_found(tmp_path: Path, column: str) -> None:
    done = replay.replay(archived(tmp_path, off=4, column=column))
    assert (done.state, done.bytes_same) == ("differs", False)
    assert "other bytes" in str(done)


@pytest.mark.parametrize(("off", "state"), [(0.0, "same"), (0.01, "differs")])
def test_a_method_without_losses_is_compared_by_its_tests(
    tmp_path: Path, off: float, state: str
) -> None:
    recipe = RECIPE | {"method": {"name": "analytic"}, "train": {"num_rounds": 1}}
    accuracy = over_clients("client", "accuracy")
    path = archived(tmp_path, off=off, column=accuracy, last=1, recipe=recipe)
    assert not any(line.get(TRAIN_LOSS) for line in read_run(path).rounds)
    assert replay.replay(path).state == state


def test_what_tests_no_longer_find_is_a_difference(tmp_path: Path) -> None:
    recipe = RECIPE | {"method": {"name": "analytic"}, "train": {"num_rounds": 1}}
    path = archived(tmp_path, off=0.5, column="eval/client/gone", last=1, recipe=recipe)
    done = replay.replay(path)
    assert done.state == "differs"
    assert [old for old, new in done.losses if math.isnan(new)] == [0.5]


def test_a_model_of_code_is_done_again_where_its_folder_is_given(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "flat_model_of_a_test.py").write_text(
        "import math\n\nfrom torch import nn\n\n\ndef flat(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))\n"
    )
    own = {"model": {"name": "flat_model_of_a_test:flat"}, "engine": {"code_folder": str(code)}}
    path = archived(tmp_path, recipe=RECIPE | own)
    assert (replay.replay(path).state, replay.replay(path, code).state) == ("left out", "same")


def test_a_run_of_an_earlier_version_is_left_out(tmp_path: Path) -> None:
    done = replay.replay(archived(tmp_path, result={"versions": {"method": 7}}))
    assert done.state == "left out"
    assert "earlier version" in done.reason


def test_a_run_whose_first_weights_are_elsewhere_is_left_out(tmp_path: Path) -> None:
    path = archived(tmp_path)
    path.write_text(sealed_with(path, {"model": {"weights": "elsewhere.safetensors"}}))
    done = replay.replay(path)
    assert (done.state, "elsewhere.safetensors" in done.reason) == ("left out", True)


@pytest.mark.environment
def test_a_quick_row_of_each_experiment_is_what_this_code_computes() -> None:
    if not os.environ.get("FEDGIST_DATA"):
        pytest.skip("FEDGIST_DATA is not set")
    paths = replay.sample()
    places = {path.parent.parent for path in paths}
    assert len(paths) == len(places) > 20
    done = list(replay.replays(paths, 2))
    assert [str(one) for one in done if one.state not in {"same", "left out"}] == []
    assert sum(one.state == "same" for one in done) > 20
