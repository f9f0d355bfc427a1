"""What does not match a run's seal is left out of what is shown, and named; the exit code is 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fedgist
from fedgist.cli.main import app
from fedgist.errors import CheckpointError, SealError
from fedgist.report.tracking.tracker_names import TRACKERS
from fedgist.runs.files.record import FORMAT_KEY, read_lines
from fedgist.runs.files.run_directory import locked
from fedgist.runs.files.seals import seal_of
from fedgist.runs.finished import run_reader

from edits import EDITS, better, later, lines, text  # isort: skip
from interrupted import killed_in_round  # isort: skip
from kept_rounds import KeptRounds  # isort: skip

RECIPE: dict[str, Any] = {
    "data": {"train_rows": 90, "validation": 0.2},
    "clients": {"num_clients": 3},
    "train": {"num_rounds": 4},
    "evaluate": {"keep": "best_validation", "save_features": 3},
    "engine": {"workers": 1, "checkpoint_every": 2},
}
COMMANDS = ("show", "compare", "report")
DRAWN = ("show", "compare", pytest.param("report", marks=pytest.mark.slow))  # it draws


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one of another seed, and one killed after 3 rounds: it has saved 2."""
    place = tmp_path_factory.mktemp("runs")
    fedgist.run(RECIPE, out=place / "finished")
    fedgist.run(RECIPE | {"seed": 1}, out=place / "other")
    killed_in_round(4, RECIPE, place / "stopped")
    return place


@pytest.fixture
def finished(runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(runs / "finished", tmp_path / "runs" / "finished")


def call(command: str, *words: object) -> Result:
    more = ["-o", str(Path(str(words[0])).parent / "page.html")] if command == "report" else []
    return CliRunner().invoke(app, [command, *map(str, words), *more], env={"COLUMNS": "400"})


def said(result: Result) -> str:
    """All that a command said, its last error too."""
    return f"{result.output}{result.exception if result.exit_code else ''}"


def test_what_fits_is_shown_and_says_nothing_of_seals(runs: Path) -> None:
    for command in ("show", "compare"):
        done = call(command, runs / "finished", runs / "other")
        assert done.exit_code == 0
        assert "seal" not in done.output


@pytest.mark.parametrize("what", EDITS)
def test_every_edit_is_noticed_by_every_command(runs: Path, tmp_path: Path, what: str) -> None:
    run = shutil.copytree(runs / what.partition(":")[0], tmp_path / "run")
    EDITS[what](run, runs / "other")
    for command in COMMANDS:
        done = call(command, run)
        assert done.exit_code == 1, (command, done.output)
        assert isinstance(done.exception, SealError), done.exception
        assert str(done.exception).startswith(f"{run} does not match its seal: "), done.exception


@pytest.mark.parametrize("command", DRAWN)
def test_the_others_are_shown_and_what_is_left_out_is_named(
    finished: Path, runs: Path, command: str
) -> None:
    alone_ = call(command, runs / "other").output.replace(str(runs), "")
    EDITS["finished: a line of a later round"](finished, runs / "other")
    done = call(command, finished, runs / "other")
    assert done.exit_code == 1
    note = (
        f"{finished} does not match its seal: rounds.jsonl was changed since the run wrote it: it "
        "has lines after round 4, its last one: this run is left out (--trust shows it, marked)"
    )
    assert note in done.output
    if command == "compare":
        table, only = (t.splitlines()[:4] for t in (done.output, alone_))
        assert table == only


@pytest.mark.parametrize("command", [*DRAWN, "watch"])
def test_it_is_shown_marked_on_trust(finished: Path, command: str) -> None:
    text("metrics.json", lambda t: t.replace("higher", "lower"))(finished, finished)
    done = call(command, finished, "--trust", *(["--once"] if command == "watch" else []))
    assert done.exit_code == 0
    page = finished.parent / "page.html"
    shown = page.read_text("utf-8") if command == "report" else done.output
    assert "(seal broken)" in shown
    assert "metrics.json was changed since the run wrote it" in done.output


def test_tables_in_files_name_what_they_leave_out_on_the_screen(
    finished: Path, runs: Path, tmp_path: Path
) -> None:
    text("rounds.jsonl", better)(finished, finished)
    for words in (["--format", "csv"], ["-o", tmp_path / "table.txt"]):
        done = call("compare", finished, runs / "other", *words)
        assert done.exit_code == 1
        assert f"{finished} does not match its seal" in done.stderr
    data = json.loads(call("compare", runs / "other", "--format", "json").stdout)
    assert data["rows"][0]["seal"] == "sealed"


def test_watching_leaves_it_out_and_sends_it_to_no_tracker(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = KeptRounds()
    monkeypatch.setitem(TRACKERS, "mlflow", lambda _: tracker)
    copy = shutil.copytree(finished, finished.parent / "good")
    text("rounds.jsonl", better)(finished, finished)
    done = call("watch", finished.parent, "--track", "mlflow")
    assert done.exit_code == 1
    assert [run.folder for run in tracker.runs] == [copy]
    assert f"{finished} does not match its seal" in done.output


def test_the_number_of_the_format_is_no_column(runs: Path) -> None:
    run = runs / "finished"
    assert all(f'"{FORMAT_KEY}": 1' in t for t in (run / "rounds.jsonl").read_text().splitlines())
    (read,) = run_reader.find([run])
    for found in (read_lines(run / "rounds.jsonl"), read.rounds, read.clients.lines):
        assert found
        assert not any(FORMAT_KEY in line for line in found)
    assert FORMAT_KEY not in read.recipe


def test_a_stopped_run_is_shown_and_lines_behind_its_checkpoint_are_marked(
    runs: Path, tmp_path: Path
) -> None:
    done = call("show", runs / "stopped")
    assert done.exit_code == 0
    assert (
        "it has lines after round 2, which its checkpoint does not cover: not sealed" in done.output
    )
    run = shutil.copytree(runs / "stopped", tmp_path / "run")
    lines(lambda whole: whole[:2])(run, run)
    lines(lambda whole: [t for t in whole if json.loads(t)["round"] < 3], "clients.jsonl")(run, run)
    assert seal_of(run).state == "stopped"
    assert not seal_of(run).behind
    lines(lambda whole: [*whole, later(whole[-1])])(run, run)
    assert "which its checkpoint does not cover" in call("compare", run).output


def test_a_running_run_is_not_judged(runs: Path, finished: Path) -> None:
    EDITS["finished: no result, an accuracy"](finished, runs / "other")
    assert seal_of(finished).state == "broken"
    with locked(finished):
        assert seal_of(finished).state == "running"
        assert call("show", finished).exit_code == 0
    assert seal_of(finished).state == "broken"


def test_a_run_is_running_while_it_runs(tmp_path: Path) -> None:
    states: list[str] = []

    def look(line: dict[str, Any]) -> None:
        states.append(seal_of(tmp_path / "run").state)

    fedgist.run(RECIPE, out=tmp_path / "run", callback=look)
    assert states == ["running"] * 4
    assert seal_of(tmp_path / "run").state == "sealed"


def test_a_run_that_goes_on_is_sealed_again_at_once(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "finished", tmp_path / "run")
    killed_in_round(6, RECIPE, run, resume=True, rounds=8)
    assert seal_of(run).state == "stopped"
    assert "after round 4" in seal_of(run).behind
    fedgist.run(RECIPE | {"train": {"num_rounds": 8}}, out=run, resume=True)
    assert seal_of(run).state == "sealed"


def test_a_run_that_lost_its_result_gets_it_back(finished: Path) -> None:
    before = json.loads((finished / "result.json").read_text())
    (finished / "result.json").unlink()
    fedgist.run(RECIPE, out=finished, resume=True)
    after = json.loads((finished / "result.json").read_text())
    assert after["digests"] == before["digests"]
    assert seal_of(finished).state == "sealed"


def test_edited_features_are_refused_by_a_run_that_goes_on(tmp_path: Path) -> None:
    recipe = RECIPE | {"evaluate": {"save_features": 3, "save_features_at": [1]}}
    run = tmp_path / "run"
    killed_in_round(4, recipe, run)
    assert seal_of(run).state == "stopped"
    path = run / "features-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert seal_of(run).is_broken
    with pytest.raises(CheckpointError, match=r"features-1\.safetensors does not"):
        fedgist.run(recipe, out=run, resume=True)
