"""Files that were written before the code was divided anew are read for ever.

In ``tests/recorded/before_rooms``: a run folder of three rounds of the demo, at three clients with
60 rows, and the archived run of local training of the same recipe.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedgist.cli.main import app
from fedgist.runs.record import read_lines
from fedgist.runs.run_seals import seal_of

RECORDED = Path(__file__).parents[1] / "recorded" / "before_rooms"


def fedgist(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(RECORDED / "run", tmp_path / "run")


@pytest.mark.parametrize("command", ["show", "compare"])
def test_tables_have_the_numbers_that_were_recorded(run: Path, command: str) -> None:
    assert seal_of(run).state == "sealed"
    printed = fedgist(command, run, RECORDED / "archive")
    for score in ("41.09", "25.37"):  # FedLog after three rounds, and local training
        assert score in printed


@pytest.mark.slow
def test_a_report_has_a_line_for_each(run: Path, tmp_path: Path) -> None:
    fedgist("report", run, RECORDED / "archive", "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "41.09" in page
    assert "25.37" in page


def test_the_run_goes_on(run: Path) -> None:
    before = read_lines(run / "rounds.jsonl")
    fedgist("run", "--resume", run, "--rounds", 4, "--quiet")
    after = read_lines(run / "rounds.jsonl")
    assert [line["round"] for line in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2]
    assert seal_of(run).state == "sealed"


def test_its_models_are_evaluated_and_predict(run: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 17, (30, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=x, y=np.arange(30) % 10)
    scores = json.loads(fedgist("evaluate", run, tmp_path / "rows.npz", "--client", 1, "--json"))
    assert scores
    table = fedgist("predict", run, tmp_path / "rows.npz", "--client", 1).splitlines()
    assert len([line for line in table if line.count(",") >= 10]) == 31  # and the names of columns
