"""A sweep over folds tests each row once, and says what its intervals are about."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedgist.cli.main import app
from fedgist.errors import RecipeError
from fedgist.report.tables import client_tables, comparison
from fedgist.report.tables.client_scores import over_rows
from fedgist.runs.finished.run_reader import find
from fedgist.studies.sweep import grid

RECIPE = """
[data]
name = "table"
path = "patients.csv"
label = "sick"
client = "town"
folds = 3
repeats = 2
[partition]
name = "natural"
[model]
name = "mlp"
hidden = [4]
[train]
num_rounds = 1
batch_size = 8
[engine]
workers = 1
cohort_size = 2
"""
ROWS = {"Bonn": 40, "Kiel": 31, "Ulm": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, rng = tmp_path_factory.mktemp("sweep"), np.random.default_rng(0)
    lines = ["age,weight,town,sick"]
    for town, count in ROWS.items():
        for i in range(count):
            age, weight = rng.normal(i % 2, 0.4, 2)
            lines.append(f"{age:.3f},{weight:.3f},{town},{'no' if i % 2 else 'yes'}")
    (place / "patients.csv").write_text("\n".join(lines))
    (place / "r.toml").write_text(RECIPE.replace("patients.csv", str(place / "patients.csv")))
    command = ["sweep", str(place / "r.toml"), "--grid", "method.name=fedlog,local"]
    done = CliRunner().invoke(app, [*command, "--seeds", "2", "--out", str(place / "runs")])
    assert done.exit_code == 0, done.output
    return place


def test_each_row_is_tested_once_in_a_repeat(folder: Path) -> None:
    tested: dict[tuple[int, str], int] = {}
    runs = find([folder / "runs"])
    assert len(runs) == 2 * 2 * 6
    for run in runs:
        if (run.name, run.seed) == ("local", 0):
            for line in run.clients.lines:
                key = (run.division // 3, line["name"])
                tested[key] = tested.get(key, 0) + line["rows"]
    assert tested == {(r, town): count for r in (0, 1) for town, count in ROWS.items()}


def test_a_small_site_has_all_its_rows_in_the_tables(folder: Path) -> None:
    study = comparison.study(find([folder / "runs"]), reference="local")
    row = study.rows[0]
    assert (row.seeds, row.divisions) == ([0, 1], [*range(6)])
    assert row.overlap == pytest.approx(0.5)
    of_rows = over_rows(row.runs, "accuracy")
    assert of_rows is not None
    assert {c.name: c.rows for c in of_rows.clients} == ROWS
    hits = dict.fromkeys(ROWS, 0.0)
    for run in row.runs:
        for line in run.clients.lines:
            hits[line["name"]] += line["accuracy"] * line["rows"]
    shares = {town: hits[town] / (4 * count) for town, count in ROWS.items()}  # 2 seeds, 2 repeats
    assert {c.name: c.score for c in of_rows.clients} == pytest.approx(shares)
    assert of_rows.each_row.mean == pytest.approx(sum(hits.values()) / 4 / sum(ROWS.values()))
    assert of_rows.mean is not None
    assert of_rows.mean.low is None, "a client has fewer than 30 rows"
    assert any("76 test rows: one row is up to 6.7 points of the mean" in n for n in study.notes)
    table, _ = client_tables.by_client(find([folder / "runs"]))
    assert table.title == "Accuracy by client, mean over 2 seeds and 6 divisions"
    assert [row[2] for row in table.rows] == [*map(str, ROWS.values())]


def test_one_run_says_that_there_are_others(folder: Path, tmp_path: Path) -> None:
    command = ["run", str(folder / "r.toml"), "--set", "data.division=4", "--out"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "one")])
    assert done.exit_code == 0, done.output
    assert "division 5 of 6 of the rows; fedgist sweep runs all 6" in done.output
    result = json.loads((tmp_path / "one" / "result.json").read_text())
    assert result["status"] == "finished"


def test_the_grid_has_no_divisions(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"--grid data.division=0,1: all divisions of data.folds"):
        grid(folder / "r.toml", [], ["data.division=0,1"], 1, folder / "x")
    jobs = grid(folder / "r.toml", [], ["train.lr=0.1,0.2"], 1, folder / "x")
    assert [job.folder.name for job in jobs[:2]] == ["seed-0-division-0", "seed-0-division-1"]
    assert len(jobs) == 12
