"""A finished run as one small file: nothing that is kept is lost, and damage is told."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedgist
from fedgist.errors import DataError
from fedgist.runs.files.record import Line
from fedgist.runs.files.seals import Seal
from fedgist.runs.finished.archived_run import archived_part, is_archived, read_csv, to_csv
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.finished.run_reader import read_run

METHOD: dict[str, object] = {"method": {"name": "fedlog"}}
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-(2**60), 2**60) | st.floats(-1e90, 1e90).map(lambda v: float(f"{v:.6g}"))
VALUES = st.recursive(
    NUMBERS | WORDS | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(WORDS, VALUES, max_size=4)
COLUMNS = st.sampled_from(["train/loss", "eval/client/accuracy_mean"]) | (
    st.text(max_size=6).filter(str.isprintable).map("server/{}".format)
)
REFUSALS = st.lists(st.fixed_dictionaries({"client": st.integers(0, 9), "reason": WORDS}))
LINES = st.builds(
    lambda columns, up, refused: columns | up | ({"refused": refused} if refused else {}),
    st.dictionaries(COLUMNS, NUMBERS, max_size=5),
    st.fixed_dictionaries({}, optional={"comm/up_bytes": st.integers(0, 2**60)}),
    REFUSALS,
)


@st.composite
def runs(draw: st.DrawFn) -> FinishedRun:
    numbers = sorted(draw(st.sets(st.integers(0, 500), max_size=6)))
    rounds = [{"round": number, **draw(LINES)} for number in numbers]
    recipe = draw(TABLES) | METHOD
    tables = (recipe, rounds, draw(TABLES), draw(TABLES))
    return FinishedRun(Path(), *tables, draw(WORDS), seal=Seal("sealed"))


@pytest.mark.slow
@given(runs(), st.sampled_from(["\n", "\r\n"]))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, run: FinishedRun, end: str
) -> None:
    path = tmp_path_factory.mktemp("archive") / "seed-0.csv"
    text = to_csv(run)
    path.write_bytes(text.replace("\n", end).encode())
    assert read_csv(path) == replace(run, folder=path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "seed-0"
    recipe = {
        "train": {"num_rounds": 3},
        "data": {"train_rows": 100},
        "evaluate": {"every": 2},
        "paper": {"accuracy": {"fedlog": [90.0, 0.1], "fedavg": [80.0, 0.1]}},
    }
    fedgist.run(recipe, out=place)
    return place


def test_of_a_run_directory_what_tables_and_curves_need_is_kept(folder: Path) -> None:
    run = archived_part(read_run(folder), "fedgist run")
    lines = [json.loads(text) for text in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in run.rounds] == [1, 2, 3]
    assert set(run.rounds[-1]) == {
        *("round", "train/loss", "comm/up_bytes", "comm/down_bytes"),
        *("eval/client/accuracy_mean", "eval/client/accuracy_std", "eval/client/loss_mean"),
        "eval/client/count",
    }
    assert "eval/client/accuracy_mean" not in run.rounds[0]  # measured every second round
    for kept, line in zip(run.rounds, lines, strict=True):
        for key, value in kept.items():
            assert value == pytest.approx(line[key], rel=1e-5)
        assert kept["comm/up_bytes"] == line["comm/up_bytes"]
    assert run.result["status"] == "finished"
    assert isinstance(total := run.result["time/total_s"], float)
    assert total >= round(sum(line["time/round_s"] for line in lines), 1)
    assert list(run.described) == ["accuracy", "loss"]
    paper = run.recipe["paper"]
    assert isinstance(paper, dict)
    assert paper["accuracy"] == {"fedlog": [90.0, 0.1]}  # its own row alone


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("\n3,", "\n4,"), "it was changed, or is not whole"),
        (lambda text: text[:-9], "it was changed, or is not whole"),
        (lambda text: "", "it has fedgist_run = None, not 2"),
        (lambda text: text.replace("fedgist_run = 2", "fedgist_run = 3"), "fedgist_run = 3, not 2"),
        (lambda text: text.replace("fedgist_run = 2", "fedgist_run = 1"), "fedgist_run = 1, not 2"),
        (lambda text: text.replace("lr = 0.", "lr = 0.1"), "it was changed, or is not whole"),
        (lambda text: text.partition("\n")[2], "it was changed, or is not whole"),
        (lambda text: text.replace("# [result]", "# [result"), "Expected"),
        (lambda text: text.replace("# [result", "# [resolt"), "it was changed, or is not whole"),
        (lambda text: "<<<<<<< HEAD\n" + text, "it has fedgist_run = None, not 2"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(
    folder: Path, tmp_path: Path, change: type[str], says: str
) -> None:
    path = tmp_path / "seed-0.csv"
    path.write_text(change(to_csv(archived_part(read_run(folder), "fedgist run"))))
    with pytest.raises(DataError) as error:
        read_csv(path)
    assert str(error.value).startswith(f"{path} cannot be used as an archived run: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_that_was_sealed_anew_is_read_with_care(tmp_path: Path) -> None:
    path = tmp_path / "seed-0.csv"
    damaged: list[tuple[list[Line], str]] = [
        ([{"round": 1, "comm/up_bytes": -1}], "line 1 of its table has comm/up_bytes = -1, not a"),
        (
            [{"round": 1, "late": [{"reason": "x"}]}],
            "round 1 has late = .*, not a list with a table",
        ),
        ([{"round": 2}, {"round": 1}], "round 1 comes after 2"),
        ([{"round": 1}, {"round": 1}], "round 1 comes after 1"),
        ([{"round": 1, "train/loss": float("nan")}], "its train/loss is 'nan', not a number"),
        ([{"round": 1.5}], "line 1 of its table has round = 1.5, not a whole number"),
    ]
    for lines, says in damaged:
        path.write_text(to_csv(FinishedRun(path, METHOD, lines, {}, {})))
        with pytest.raises(DataError, match=says):
            read_csv(path)


def test_a_file_is_known_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "seed-3.csv").touch()
    (tmp_path / "by-round.csv").touch()
    (tmp_path / "seed-4.csv").mkdir()
    for name in ("seed-3-division-12.csv", "seed--1.csv"):
        assert not is_archived(tmp_path / name)
        (tmp_path / name).touch()
        assert is_archived(tmp_path / name)
    for name in ("seed-3-division-1.toml", "seed-3-client-1.csv", "seed-²"):
        (tmp_path / name).touch()
        assert not is_archived(tmp_path / name)
    assert is_archived(tmp_path / "seed-3.csv")
    assert not is_archived(tmp_path / "by-round.csv")
    assert not is_archived(tmp_path / "seed-4.csv")


def test_what_a_run_says_of_its_privacy_is_kept(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "seed-0"
    shutil.copytree(folder, copy)
    result = json.loads((copy / "result.json").read_text())
    privacy = {"unit": "record", "epsilon": 1.0, "clip": None}
    (copy / "result.json").write_text(json.dumps(result | {"privacy": privacy}))
    lines = (
        (copy / "rounds.jsonl")
        .read_text()
        .replace('"round": ', '"privacy/epsilon": 0.5, "round": ')
    )
    (copy / "rounds.jsonl").write_text(lines)
    path = tmp_path / "seed-0.csv"
    path.write_text(to_csv(archived_part(read_run(copy), "")))
    assert read_csv(path).result["privacy"] == {"unit": "record", "epsilon": 1.0}
    assert read_csv(path).rounds[-1]["privacy/epsilon"] == 0.5
