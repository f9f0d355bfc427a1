"""Cells of a sweep that do not match their seal: named, left out, and done again on request."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedgist.cli.main import app
from fedgist.errors import JobsError
from fedgist.runs.files.seals import seal_of
from fedgist.runs.finished.archived_run import read_csv

from edits import EDITS  # isort: skip

SETTINGS = ("train.num_rounds=2", "data.train_rows=90", "clients.num_clients=3")


def sweep(place: Path, *more: str) -> Result:
    words = ["sweep", "demo", "--grid", "method.name=fedlog,local", "--jobs", "1"]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    words += ["--out", str(place / "runs"), "--archive", str(place / "kept"), "--quiet", *more]
    return CliRunner().invoke(app, words, env={"COLUMNS": "400"})


@pytest.fixture(scope="module")
def done_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sweep")
    assert sweep(place).exit_code == 0
    return place


@pytest.fixture
def done(done_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(done_once, tmp_path / "sweep")


CELL = Path("method.name=fedlog") / "seed-0"


def cells_in(result: Result) -> list[str]:
    """The cells in the first table of a sweep."""
    text = result.output.partition("Communication")[0]
    return re.findall(r"^ *(fedlog|local) ", text, re.MULTILINE)


def test_a_broken_run_is_named_and_the_others_are_compared(done: Path) -> None:
    shutil.rmtree(done / "kept")
    run = done / "runs" / CELL
    EDITS["finished: an accuracy"](run, run)
    first = sweep(done)
    assert first.exit_code == 1
    assert isinstance(first.exception, JobsError)
    says = f"fedlog seed 0: {run} does not match its seal: rounds.jsonl was changed since the run"
    assert says in str(first.exception)
    assert "--rerun does it again" in str(first.exception)
    assert cells_in(first) == ["local"]
    assert not (done / "kept" / CELL).with_suffix(".csv").exists()
    again = sweep(done, "--rerun")
    assert again.exit_code == 0
    assert cells_in(again) == ["fedlog", "local"]
    assert seal_of(run).state == "sealed"


@pytest.mark.parametrize(
    "edit", [lambda text: text[:-3], lambda text: text.replace("lr = ", "lr = 1")]
)
def test_a_broken_file_of_an_archive_ends_no_command(done: Path, edit: type[str]) -> None:
    path = (done / "kept" / CELL).with_suffix(".csv")
    whole = path.read_text("utf-8")
    path.write_text(edit(whole), "utf-8")
    first = sweep(done)
    assert first.exit_code == 1
    assert f"{path} cannot be used as an archived run: it was changed" in str(first.exception)
    assert cells_in(first) == ["local"]
    assert CliRunner().invoke(app, ["show", str(done / "kept")]).exit_code == 1
    again = sweep(done, "--rerun")  # its run's folder is whole: nothing is run
    assert again.exit_code == 0
    assert path.read_text("utf-8") == whole
    assert read_csv(path).seal.state == "sealed"


MISSING = """
data = { name = "table", path = "gone.csv", label = "y" }
model = { name = "mlp" }
method = { name = "local" }
train = { num_rounds = 1 }
"""
TABLE = """
[table]
source = "a paper"
methods = ["local"]
seeds = { small = 1 }
[columns]
gone = { recipe = "gone.toml" }
there = { recipe = "demo", set = { "train.num_rounds" = 1, "data.train_rows" = 90 } }
"""
SPACE = '["train.lr"]\nlow = 0.1\nhigh = 1.0\n'


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("sweep gone.toml --grid train.lr=0.1,0.2", 2),
        ("tune gone.toml --space space.toml --trials 2", 2),
        ("reproduce table.toml", 1),
    ],
)
def test_runs_that_fail_say_why_though_there_is_nothing_to_compare(
    words: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"gone": MISSING, "table": TABLE, "space": SPACE}.items():
        (tmp_path / f"{name}.toml").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words.split(), "--jobs", "1", "--out", "runs", "--quiet"])
    assert isinstance(done.exception, JobsError)
    assert str(done.exception).startswith(f"{runs} run{'s' * (runs > 1)} failed:")
    assert "gone.csv does not exist" in str(done.exception)
