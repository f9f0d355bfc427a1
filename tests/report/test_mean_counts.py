"""A mean over fewer than all clients is marked, and the others are named, wherever it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedgist
from fedgist.report.pictures import curves
from fedgist.report.pictures import study_pictures as pictures
from fedgist.report.tables import client_tables, comparison, run_tables
from fedgist.report.tables import study_tables as tables
from fedgist.report.tables.mean_counts import who_is_missing
from fedgist.report.terminal import watch
from fedgist.report.terminal.table_formats import as_data
from fedgist.runs.files.columns import ACCURACY, clients_in
from fedgist.runs.files.record import read_lines
from fedgist.runs.finished.archived_run import archived_part, read_csv, to_csv
from fedgist.runs.finished.run_reader import read_run
from three_sites import SAME, recipe, rows_of_sites

TINY, PART = "Tiny", "2 of 3 clients"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulation in which one client has no test rows, and another is away in round 1."""
    place = tmp_path_factory.mktemp("runs")
    trace = place / "trace.csv"
    trace.write_text("round,client\n1,0\n1,2\n2,0\n2,1\n2,2\n")
    data, parts = rows_of_sites()
    raw = recipe("fedavg", rounds=2, clients={"availability": str(trace)}, **SAME)
    names = ("Berlin", "Lyon", TINY)
    with pytest.warns(UserWarning, match="1 client is in no mean of the result"):
        fedgist.run(
            {key: value for key, value in raw.items() if key != "facts"},
            data=data,
            clients={name: parts.train[i] for i, name in enumerate(names)},
            clients_test={
                name: parts.test[i][: 0 if name == TINY else None] for i, name in enumerate(names)
            },
            out=place / "run",
        )
    return place / "run"


def test_a_client_without_test_rows_is_counted_in_every_line_and_named_once(folder: Path) -> None:
    lines = read_lines(folder / "rounds.jsonl")
    assert [clients_in(line, ACCURACY) for line in lines] == [(2, 3), (2, 3)]
    assert not any("unscored" in line for line in lines)  # it cannot be scored in any round
    result = json.loads((folder / "result.json").read_text())
    assert result["unscored"] == [{"client": 2, "name": TINY, "reason": "no test rows"}]
    (note,) = (note for note in result["notes"] if TINY in note)
    assert note == f"1 client is in no mean of the result (no test rows): {TINY}"


def test_every_table_figure_and_page_says_so(folder: Path) -> None:
    run = read_run(folder)
    who = f"{PART} (not {TINY}: no test rows)"
    study = comparison.study([run])
    (results, *_) = tables.sheets(study)
    by_round, overview = run_tables.by_round(run), run_tables.overview([run])
    assert [f"({PART})" in cell for _, cell, *_ in by_round.rows] == [True, True]
    assert overview.rows[0][1].endswith(f" ({PART})")
    assert results.rows[0][0] == f"fedavg ({PART})"
    for text in (
        overview.caption,
        results.caption,
        client_tables.by_client([run])[0].caption,
        client_tables.by_model([run]).caption,
        curves.lines_of(study).caption,
        *(p.caption for p in pictures.pictures(study) if p.name in {"by-round", "over-clients"}),
        *(p.caption for p in pictures.pictures(study) if p.name.startswith("confusion")),
        "; ".join(study.notes),
    ):
        assert who in text
    assert as_data(study)["rows"][0]["clients"] == PART
    assert watch.score(run).endswith(f" ({PART})")


def test_an_archive_keeps_it_and_an_old_run_does_not_say(folder: Path, tmp_path: Path) -> None:
    run = read_run(folder)
    path = tmp_path / "seed-5.csv"
    path.write_text(to_csv(archived_part(run, "fedgist run")))
    assert who_is_missing(read_csv(path), ACCURACY) == who_is_missing(run, ACCURACY)
    for line in run.rounds:  # as before there were such columns
        del line["eval/client/count"], line["eval/client/missing"]
    assert who_is_missing(run, ACCURACY) == ""
    assert "(" not in run_tables.overview([run]).rows[0][1]


def test_a_round_and_a_client_say_how_many_replied(folder: Path) -> None:
    run = read_run(folder)
    sheet = run_tables.by_round(run)
    place = sheet.columns.index("replied")
    assert [row[place] for row in sheet.rows] == ["2 of 3", "-"]
    # Lyon was away and not asked: a simulation's record does not say who was
    assert "replied" not in client_tables.by_client([run])[0].columns
    (folder / "participants.csv").write_bytes(
        b"round,client\r\n1,0\r\n1,2\r\n2,0\r\n2,1\r\n2,2\r\n"
    )
    sheet, _ = client_tables.by_client([run])
    assert [(row[0], row[-1]) for row in sheet.rows] == [("Berlin", "2 of 2"), ("Lyon", "1 of 2")]
