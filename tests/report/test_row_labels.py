"""Names of rows that a reader gives: in tables, figures and LaTeX, and what is refused."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedgist.cli.main import app
from fedgist.errors import ReportError
from fedgist.report.pictures import curves
from fedgist.report.pictures.varied import varied
from fedgist.report.tables import client_tables, comparison
from fedgist.report.tables.row_labels import labelled
from fedgist.runs.finished.run_reader import find

from written import write_run  # isort: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for lr in (0.1, 0.01):
        for seed in (0, 1):
            write_run(
                tmp_path / f"train.lr={lr}" / f"seed-{seed}",
                [0.4, 0.5 + lr],
                seed=seed,
                raw={"train": {"lr": lr}},
                clients=[0.5, 0.7],
            )
    write_run(tmp_path / "local", [0.3, 0.4], method="local", clients=[0.5, 0.7])
    return tmp_path


def labels(folder: Path, *texts: str) -> list[str]:
    return [row.label for row in comparison.study(labelled(find([folder]), texts)).rows]


def test_a_row_is_named_by_folder_label_or_method(folder: Path) -> None:
    named = labels(
        folder,
        f"Ours, lr=0.1={folder / 'train.lr=0.1'}",
        "fedlog lr=0.01=fedlog lr=0.01",
        "A=local",
    )
    assert sorted(named) == ["A", "Ours, lr=0.1", "fedlog lr=0.01"]


def test_the_name_is_in_every_table_and_figure(folder: Path) -> None:
    runs = labelled(find([folder]), ["Ours=fedlog lr=0.1"])
    study = comparison.study(runs, reference="Ours")
    assert study.reference == "Ours"
    assert "Ours" in client_tables.by_client(runs)[0].columns
    assert "Ours" in {line[1] for line in client_tables.by_model(runs).rows}
    assert "Ours" in dict(curves.lines_of_runs(runs).rows)
    assert {row.method for row in study.rows if row.label == "Ours"} == {"fedlog"}, "its colour"
    # one line over a setting joins rows, and keeps the method's name
    assert {line.label for line in varied(study.rows, "train.lr")} == {"fedlog", "local"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["Ours"], "write NAME=ROW"),
        (["=fedlog"], "write NAME=ROW"),
        (["Ours=fedlok"], "there is no row or folder 'fedlok'; known: .*fedlog lr=0.01"),
        (["Ours=local2"], "did you mean 'local'"),
        (["Ours=fedlog"], "fedlog stands for 2 rows: 'fedlog lr=0.01', 'fedlog lr=0.1'"),
        (["A=local", "B=local"], "two names for local: 'A' and 'B'"),
        (["A=local", "A=fedlog lr=0.1"], "two rows would have the name 'A'"),
        (["fedlog lr=0.1=local"], "two rows would have the name 'fedlog lr=0.1'"),
    ],
)
def test_what_names_no_single_row_is_refused(folder: Path, texts: list[str], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        labels(folder, *texts)


@pytest.mark.parametrize("form", ["terminal", "markdown", "latex", "csv", "json"])
def test_compare_shows_the_name_in_every_format(folder: Path, form: str) -> None:
    words = ["compare", str(folder), "--label", f"Ours={folder / 'train.lr=0.1'}", "--format", form]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "Ours" in done.output
    assert "fedlog lr=0.1" not in done.output


@pytest.mark.slow
def test_show_and_report_take_names(folder: Path) -> None:
    name = f"Ours={folder / 'train.lr=0.1'}"
    shown = CliRunner().invoke(app, ["show", str(folder), "--label", name], catch_exceptions=False)
    assert "Ours, 2 seeds" in shown.output
    page = folder / "page.html"
    words = ["report", str(folder), "--label", name, "-o", str(page)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert 'data-label="Ours"' in page.read_text()


@settings(max_examples=10)
@given(st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=6, unique=True))
def test_rows_of_a_setting_are_in_the_order_of_its_values(values: list[float]) -> None:
    # seen: epsilon=10 stood before epsilon=5
    with TemporaryDirectory() as place:
        for lr in {f"{value:g}" for value in values}:
            for seed in (2, 10):
                folder = Path(place, f"lr={lr},name=fedlog", f"seed-{seed}")
                write_run(folder, [0.5], seed=seed, raw={"train": {"lr": float(lr)}})
        runs = find([Path(place)])
    rates = [run.recipe["train"]["lr"] for run in runs]
    assert rates == sorted(rates)
    assert [run.seed for run in runs] == [2, 10] * (len(runs) // 2)
