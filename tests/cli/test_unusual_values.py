"""Prediction names the values of new rows that the training rows did not have."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import safetensors
from typer.testing import CliRunner

import fedgist
from fedgist.cli.main import app
from fedgist.errors import InputError
from fedgist.runs.runner import load_run

NEW = pd.DataFrame({"age": [50.0, 170.0, 50.0, -3.0], "town": ["a", "b", "Ulm", "Ulm"]})
STATED = {"ranges": {"age": [0, 200]}}
PRIVATE: dict[str, Any] = {
    "data": {
        "columns": {"age": "number", "town": ["a", "b"]},
        "mean": [45.0],
        "std": [10.0],
        "classes": ["ill", "well"],
    },
    "privacy": {"unit": "record", "epsilon": 5.0, "delta": 1e-3, "clip": 1.0},
    "method": {"name": "fedlog"},
}


def trained(folder: Path, rows: int = 120, **sections: Any) -> Path:
    draw = np.random.default_rng(0)
    ill = np.arange(rows) % 3 == 0
    age = 40 + 15 * ill + draw.normal(size=rows) * 9
    age[:2] = 149.0, 1.0  # extremes of two persons
    table = {"age": age.round(1), "town": draw.choice(["a", "b"], rows)}
    names = np.where(ill, "ill", "well")
    pd.DataFrame({**table, "state": names}).to_csv(folder / "train.csv", index=False)
    NEW.to_csv(folder / "new.csv", index=False)
    source = {"name": "table", "path": str(folder / "train.csv"), "label": "state"}
    recipe = {
        "data": source | sections.pop("data", {}),
        "partition": {"name": "iid"},
        "clients": {"num_clients": 2},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1, "cohort_size": 2},
    }
    fedgist.run(recipe | sections, out=folder / "run")
    return folder


def answers(folder: Path, new: str = "new.csv") -> tuple[list[str], list[str], str]:
    """The ids and unusual columns of the rows of a prediction, and what was said."""
    done = CliRunner().invoke(app, ["predict", f"{folder}/run", f"{folder}/{new}", "--client", "0"])
    assert done.exit_code == 0, done.exception
    lines = list(csv.DictReader(io.StringIO(done.stdout)))
    assert list(lines[0]) == ["row", "label", "p_ill", "p_well", "unusual"]
    return [line["row"] for line in lines], [line["unusual"] for line in lines], done.stderr


@pytest.mark.parametrize("columns", [{}, {"columns": {"age": "number", "town": ["a", "b"]}}])
def test_unknown_categories_and_far_numbers_are_named_and_counted(
    columns: dict[str, Any], tmp_path: Path
) -> None:
    # stated columns too: a new town is an error of training rows, and a finding in new ones
    ids, unusual, says = answers(trained(tmp_path, data=columns))
    assert ids == ["0", "1", "2", "3"]
    assert unusual == ["", "age", "town", "age; town"]
    assert says.startswith("! 3 of 4 rows have unusual values: age (outside ")
    assert "2 rows), town (an unknown category, 2 rows)\n" in says


def test_an_exported_file_holds_rounded_quantiles_and_nobodys_extreme(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    file = folder / "model.safetensors"
    done = CliRunner().invoke(app, ["export", f"{folder}/run", "--client", "0", "-o", str(file)])
    assert done.exit_code == 0, done.exception
    with safetensors.safe_open(file, "pt") as opened:
        ranges = json.loads(opened.metadata()["ranges"])
    _, world = load_run(folder / "run")
    ages = sorted(world.data.x[world.partition.train.rows, 0].tolist())
    [low, high] = ranges.pop("age")
    assert ranges == {}
    assert ages[0] < low <= ages[1]
    assert ages[-2] <= high < ages[-1]
    assert [float(f"{end:.1e}") for end in (low, high)] == [low, high]
    # what a server or another client could see of the columns has none
    assert all(column.usual is None for column in world.data.columns)
    assert all(column.usual is None for column in world.data.facts.columns)


def test_stated_ranges_replace_measured_ones_and_are_no_setting_of_the_experiment(
    tmp_path: Path,
) -> None:
    _, unusual, says = answers(trained(tmp_path, data=STATED))
    assert unusual == ["", "", "town", "age; town"]
    assert "age (outside 0 to 200, 1 row)" in says
    recipe = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert recipe["data"]["ranges"] == STATED["ranges"]


def test_a_recipe_without_ranges_has_no_new_key(tmp_path: Path) -> None:
    recipe = tomllib.loads((trained(tmp_path) / "run" / "recipe.toml").read_text())
    assert "ranges" not in recipe["data"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ranges", [{}, STATED])
def test_under_privacy_only_stated_ranges_count(tmp_path: Path, ranges: dict[str, Any]) -> None:
    private = PRIVATE | {"data": {**PRIVATE["data"], **ranges}}
    folder = trained(tmp_path, **private)
    NEW.replace("Ulm", "a").to_csv(folder / "known.csv", index=False)
    _, unusual, says = answers(folder, "known.csv")
    assert unusual == ["", "", "", "age" if ranges else ""]
    assert ("numbers are not compared with usual ones: state data.ranges" in says) != bool(ranges)


def test_few_rows_have_no_range_and_it_is_said(tmp_path: Path) -> None:
    _, unusual, says = answers(trained(tmp_path, rows=20))  # a fifth is held out
    assert unusual == ["", "", "town", "town"]
    assert says.endswith(
        "numbers are not compared with usual ones: state data.ranges before a run\n"
    )


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ({"age": [90, 18]}, r"data.*ranges.age = \[90, 18\]: give the smaller number first"),
        ({"town": [0, 1]}, "data.ranges names 'town'; train.csv has the numeric columns age"),
    ],
)
def test_ranges_that_cannot_be_are_refused_before_training(
    tmp_path: Path, ranges: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        trained(tmp_path, data={"ranges": ranges})


def test_rows_that_are_read_when_they_are_used_have_ranges_too(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    table = {"age": draw.uniform(20, 80, 200), "weight": draw.uniform(50, 90, 200)}
    pd.DataFrame(table | {"y": ["ill", "well"] * 100}).to_parquet(tmp_path / "x.parquet")
    pd.DataFrame({"age": [50.0, 7.0], "weight": [70.0, 70.0]}).to_parquet(tmp_path / "new.parquet")
    source = {"name": "parquet", "path": str(tmp_path / "x.parquet"), "label": "y", "read": "lazy"}
    recipe = {
        "data": source,
        "partition": {"name": "iid"},
        "clients": {"num_clients": 2},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1, "cohort_size": 2},
    }
    fedgist.run(recipe, out=tmp_path / "run")
    _, unusual, says = answers(tmp_path, "new.parquet")
    assert unusual == ["", "age"]
    assert says.startswith("! 1 of 2 rows have unusual values: age (outside ")
