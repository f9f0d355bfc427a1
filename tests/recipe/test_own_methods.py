"""A method from outside the package can do all that a registered one can."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import commands
import fedgist
from fedgist.errors import RecipeError
from fedgist.recipe.reading import read
from fedgist.report.tables.comparison import study
from fedgist.runs.finished import run_reader
from fedgist.testing import LAWS, check_laws

from outside_methods import ShareMeans  # isort: skip

NAME = "outside_methods:ShareMeans"
PLUGINS = Path(__file__).parents[1] / "plugins"
QUICK: dict[str, Any] = {
    "data": {"train_rows": 200},
    "clients": {"num_clients": 4},
    "model": {"hidden": [8]},
    "train": {"num_rounds": 2},
    "engine": {"workers": 1, "cohort_size": 4},
}
TOML = """
[data]
train_rows = 200
[clients]
num_clients = 4
[train]
num_rounds = 2
[engine]
workers = 1
cohort_size = 4
[methods."outside_methods:ShareMeans"]
pull = 0.7
train.lr = 0.02
"""


@pytest.mark.slow
def test_it_obeys_all_laws_in_one_line() -> None:
    assert len(check_laws(ShareMeans())) == len(LAWS)


def test_its_fields_are_keys_with_their_bounds() -> None:
    recipe = QUICK | {"method": {"name": NAME, "pull": 0.5}}
    assert fedgist.run(recipe).summary["method"] == NAME
    with pytest.raises(RecipeError, match=r"method\.pul: unknown key of outside.*mean 'pull'"):
        fedgist.run(QUICK | {"method": {"name": NAME, "pul": 0.5}})
    with pytest.raises(RecipeError, match=r"method\.pull = -1: must be at least 0"):
        fedgist.run(QUICK | {"method": {"name": NAME, "pull": -1}})
    with pytest.raises(RecipeError, match=r"method\.name = 'outside_methods:Nope'"):
        fedgist.run(QUICK | {"method": {"name": "outside_methods:Nope"}})


@pytest.mark.slow
def test_an_object_is_recorded_and_resumed_only_as_it_was(tmp_path: Path) -> None:
    # seen: recorded as fedlog, and resumed with other hyper-parameters
    out = tmp_path / "run"
    fedgist.run(QUICK, method=ShareMeans(pull=0.3), out=out)
    recorded = read(out / "recipe.toml")
    assert (recorded.method.name, recorded.method.options) == (NAME, {"pull": 0.3})
    fedgist.run(QUICK, method=ShareMeans(pull=0.3), out=out, resume=True)
    with pytest.raises(RecipeError, match=r"was begun with method\.pull = 0\.3, not 0\.4"):
        fedgist.run(QUICK, method=ShareMeans(pull=0.4), out=out, resume=True)
    other = replace(fedgist.run(QUICK, out=tmp_path / "b", method=ShareMeans()), rounds=[])
    assert other.summary["method"] == NAME


@pytest.mark.slow
def test_a_class_of_a_function_is_resumed_with_the_object(tmp_path: Path) -> None:
    class Local(fedgist.Method):
        """A class that no other process can name."""

    out = tmp_path / "run"
    fedgist.run(QUICK, method=Local(), out=out)
    fedgist.run(QUICK, method=Local(), out=out, resume=True)
    with pytest.raises(RecipeError, match=r"method\.name = .*<locals>"):
        fedgist.run(None, out=out, resume=True)
    with pytest.raises(RecipeError, match=r"was begun with method\.name"):
        fedgist.run(QUICK, method=ShareMeans(), out=out, resume=True)


@pytest.mark.slow
def test_compare_tells_two_objects_apart(tmp_path: Path) -> None:
    # seen: the second was left out as a repetition of the first
    for pull in (0.1, 0.9):
        fedgist.run(QUICK, method=ShareMeans(pull=pull), out=tmp_path / str(pull))
    table = study(run_reader.find([tmp_path]))
    assert [row.label for row in table.rows] == [f"{NAME} pull=0.1", f"{NAME} pull=0.9"]
    assert not [note for note in table.notes if "repeats" in note]


def fedgist_command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = f"{PLUGINS}:{Path(fedgist.__file__).parents[1]}"
    env = {"PYTHONPATH": paths, "HOME": str(cwd), "PATH": "", "COLUMNS": "200"}
    return commands.fedgist(*args, cwd=cwd, code=None, **env)


@pytest.mark.slow
def test_the_command_line_runs_resumes_sweeps_and_compares_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TOML)
    run = fedgist_command("run", "mine.toml", "--set", f"method.name={NAME}", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "runs" / "mine-outside_methods_ShareMeans"
    recorded = read(folder / "recipe.toml")
    assert (recorded.method.options, recorded.train.lr) == ({"pull": 0.7}, 0.02)
    resumed = fedgist_command("run", "--resume", str(folder), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "finished" in resumed.stdout + resumed.stderr
    grid = ("--grid", f"method.name={NAME},local", "--seeds", "2", "--jobs", "1")
    sweep = fedgist_command("sweep", "mine.toml", *grid, "--quiet", cwd=tmp_path)
    assert sweep.returncode == 0, sweep.stderr
    assert NAME in sweep.stdout
    compared = fedgist_command(
        "compare", "runs/sweep-mine", "--format", "json", "--reference", "local", cwd=tmp_path
    )
    assert compared.returncode == 0, compared.stderr
    labels = {row["label"] for row in json.loads(compared.stdout)["rows"]}
    assert labels == {NAME, "local"}
