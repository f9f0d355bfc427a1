"""Run folders that are damaged: each damaged file or line is named, and the rest is used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedgist.cli.main import app
from fedgist.errors import ReportError
from fedgist.report import page
from fedgist.report.pictures import study_pictures as pictures
from fedgist.report.tables import comparison
from fedgist.runs.files.file_checks import fault_of_client, fault_of_recipe, fault_of_round
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.finished.run_reader import find, readable

from written import sealed_run, write_run  # isort: skip


def read_one(folder: Path) -> FinishedRun:
    return find([folder])[0]


def with_line(folder: Path, number: int, text: str) -> Path:
    """Replace a line of the record."""
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    lines[number - 1] = text
    (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    sealed_run(folder)
    return folder


def line_with(**columns: object) -> str:
    good = {"round": 2, "comm/up_bytes": 1, "comm/down_bytes": 1, "eval/client/accuracy_mean": 0.5}
    return json.dumps(good | {key.replace("__", "/"): value for key, value in columns.items()})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"round": 2', "is not JSON"),
        ("\x00", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[2]", "is [2], not a table"),
        ("null", "is None, not a table"),
        ("{}", "has no round"),
        (line_with(round="2"), "has round = '2', not a whole number"),
        (line_with(round=True), "has round = True, not a whole number"),
        (line_with(round=2.0), "has round = 2.0, not a whole number"),
        (line_with(round=-2), "has round = -2, not a whole number"),
        (line_with(round=10**30), "has round = 1000"),
        (line_with(comm__up_bytes="12"), "has comm/up_bytes = '12', not a number"),
        (line_with(comm__up_bytes=-5), "has comm/up_bytes = -5, not a number from 0 on"),
        (line_with(comm__up_bytes=[1, 2]), "has comm/up_bytes = [1, 2], not a number"),
        (line_with(time__round_s=True), "has time/round_s = True, not a number"),
        (line_with(eval__client__accuracy_mean={}), "has eval/client/accuracy_mean = {}, not"),
        (line_with(server__x=10**400), "has server/x = "),
        ('{"round": 2, "server/x": 1e999}', "has server/x = inf, not a number"),
        ('{"round": 2, "server/x": NaN}', "is not JSON: NaN is no number"),
        (line_with(refused="all"), "has refused = 'all', not a list with a table for each client"),
        (line_with(absent=[{"client": "x"}]), "has absent = "),
        (line_with(late=[3]), "has late = [3], not a list"),
        (line_with(events=[3]), "has events = [3], not a list of texts"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_damaged_line_is_named_with_its_number_and_left_out(
    tmp_path: Path, text: str, why: str
) -> None:
    run = with_line(write_run(tmp_path / "run", [0.5, 0.6, 0.7]), 2, text)
    read = read_one(run)
    line, lacking = read.problems
    assert line.startswith(f"{run / 'rounds.jsonl'} line 2 {why}")
    assert line.endswith(": it is left out")
    assert "\n" not in line
    assert lacking == f"{run / 'rounds.jsonl'}: round 2 is missing; its bytes are not counted"
    assert [line["round"] for line in read.rounds] == [1, 3]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "cannot be read"),
        ("seed = 1\n", "has no method"),
        ('seed = "1"\n[method]\nname = "local"', "has seed = '1', not a whole number"),
        ("method = 3", "has method = 3, not a table"),
        ("[method]\nname = 3", "has method.name = 3, not a text"),
        ('[method]\nname = "local"\n[train]\nnum_rounds = "3"', "has train.num_rounds = '3', not"),
        ('train = 3\n[method]\nname = "local"', "has train = 3, not a table"),
        (
            '[method]\nname = "local"\n[paper]\naccuracy = {local = 3}',
            "has paper.accuracy = {'local': 3}, not a table of means",
        ),
        (
            '[method]\nname = "local"\n[paper]\ntarget_accuracy = "x"',
            "has paper.target_accuracy = 'x', not a number",
        ),
    ],
)
def test_a_damaged_recipe_leaves_out_its_run_and_no_other(
    tmp_path: Path, text: str, why: str
) -> None:
    write_run(tmp_path / "good", [0.5])
    bad = write_run(tmp_path / "bad", [0.6]) / "recipe.toml"
    bad.write_text(text)
    sealed_run(bad.parent)
    study = comparison.study(find([tmp_path]))
    assert [row.seeds for row in study.rows] == [[0]]
    (note,) = [note for note in study.notes if "bad" in note]
    assert note.startswith(f"{bad} {why}")
    assert note.endswith(": this run is left out")
    with pytest.raises(ReportError, match="this run is left out"):
        readable(find([bad.parent]))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("result.json", '{"time/total_s": "x"}', "has time/total_s = 'x', not a number"),
        ("result.json", '{"versions": 3}', "has versions = 3, not a table"),
        ("result.json", '{"status": 3}', "has status = 3, not a text"),
        ("metrics.json", "[3]", "is [3], not a table"),
    ],
)
def test_another_damaged_file_is_named_and_its_run_is_used(
    tmp_path: Path, name: str, text: str, why: str
) -> None:
    run = write_run(tmp_path / "run", [0.5])
    (run / name).write_text(text)
    sealed_run(run)
    study = comparison.study(find([run]))
    assert study.notes[0].startswith(f"{run / name} {why}")
    page.render(study, [], "A page")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"classes": ["a"], "train": [[1, 2]]}', "has train[0] = [1, 2], not a count for each"),
        ('{"classes": ["a"], "train": [["x"]]}', "has train[0] = ['x'], not a count for each"),
        ('{"classes": ["a"], "train": [[-1]]}', "has train[0] = [-1], not a count for each class"),
        ('{"classes": 3, "train": [[1]]}', "has classes = 3, not a list"),
        ('{"classes": ["a"], "train": [[1]], "clients": ["x", "y"]}', "has clients = ['x', 'y']"),
        ("[]", "is [], not a table"),
        ("{", "cannot be read"),
    ],
)
def test_a_damaged_partition_is_named_and_not_drawn(tmp_path: Path, text: str, why: str) -> None:
    run = write_run(tmp_path / "run", [0.5], clients=[0.5])
    (run / "partition.json").write_text(text)
    sealed_run(run)
    study = comparison.study(find([run]))
    assert "partition-1" not in [picture.name for picture in pictures.pictures(study)]
    (note,) = pictures.unreadable(study)
    assert note.startswith(f"{run / 'partition.json'} {why}")


def test_lines_of_clients_are_named_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5], clients=[0.5, 0.7])
    path = run / "clients.jsonl"
    path.write_text(path.read_text() + '{"round": 1, "client": 2, "accuracy": "high"}\n')
    sealed_run(path.parent)
    (note,) = pictures.unreadable(comparison.study(find([run])))
    assert note == (f"{path} line 3 has accuracy = 'high', not a number: it is left out")


def test_many_damaged_lines_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5] * 20)
    (run / "rounds.jsonl").write_text((run / "rounds.jsonl").read_text() + "x\n" * 12)
    sealed_run(run)
    problems = read_one(run).problems
    assert len(problems) == 6
    assert problems[-1].endswith("7 more lines cannot be used, and are left out")


def test_rounds_that_are_missing_are_said(tmp_path: Path) -> None:
    # seen: lines [1, 2, 7..12] were summed up as the bytes of 12 rounds
    run = write_run(tmp_path / "run", [0.5] * 12)
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (run / "rounds.jsonl").write_text("".join(lines[:2] + lines[6:]))
    sealed_run(run)
    (problem,) = read_one(run).problems
    assert problem == (
        f"{run / 'rounds.jsonl'}: 4 rounds are missing, the first is round 3; their bytes are not "
        "counted"
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this system")
@pytest.mark.parametrize("name", ["rounds.jsonl", "result.json", "recipe.toml", "metrics.json"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "good", [0.5])
    run = write_run(tmp_path / "run", [0.5])
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    study = comparison.study(find([tmp_path]))
    assert any(f"{run} does not match its seal: {name}" in note for note in study.notes)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["show", "watch", "compare", "report"])
def test_every_command_names_the_damage_and_goes_on(tmp_path: Path, command: str) -> None:
    write_run(tmp_path / "runs" / "good", [0.5, 0.6])
    bad = with_line(write_run(tmp_path / "runs" / "bad", [0.5, 0.6], seed=1), 1, "[]")
    more = {"watch": ["--once"], "report": ["-o", str(tmp_path / "page.html")]}.get(command, [])
    done = CliRunner().invoke(app, [command, str(tmp_path / "runs"), *more], catch_exceptions=False)
    assert done.exit_code == 0
    text = " ".join(done.output.split()).replace(" ", "")
    assert f"{bad / 'rounds.jsonl'} line 1 is [], not a table: it is left out".replace(" ", "") in (
        text
    )


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
KEYS = (
    "round",
    "comm/up_bytes",
    "comm/down_bytes",
    "time/round_s",
    "time/train_s",
    "eval/client/accuracy_mean",
    "eval/client/accuracy_std",
    "train/loss",
    "refused",
    "absent",
    "late",
    "events",
    "privacy/epsilon",
)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(st.dictionaries(st.sampled_from(KEYS), anything), max_size=4))
def test_whatever_is_in_the_lines_every_table_is_made(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]
) -> None:
    run = write_run(tmp_path_factory.mktemp("runs") / "run", [0.5, 0.6], clients=[0.5])
    with (run / "rounds.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    sealed_run(run)
    for command in (["show"], ["watch", "--once"], ["compare", "--target-accuracy", "50"]):
        done = CliRunner().invoke(app, [*command, str(run)], catch_exceptions=False)
        assert done.exit_code == 0


@given(anything)
def test_whatever_a_value_is_it_is_judged_in_one_line(value: object) -> None:
    for fault in (fault_of_round, fault_of_client):
        assert "\n" not in fault(value)
        assert "\n" not in fault({"round": 1, "client": 0, "comm/x": value, "refused": value})
    assert "\n" not in fault_of_recipe({"method": {"name": value}, "train": value, "paper": value})


def test_where_no_client_is_scored_nothing_is_missing(tmp_path: Path) -> None:
    for on in ("client", "global"):
        run = write_run(tmp_path / on, [0.5], raw={"evaluate": {"on": on}})
        (run / "clients.jsonl").write_text("")
        sealed_run(run)
        notes = pictures.unreadable(comparison.study(find([run])))
        assert any("clients.jsonl is missing" in note for note in notes) == (on == "client")
