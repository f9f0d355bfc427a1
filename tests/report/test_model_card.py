"""The model card: its parts, in Markdown and HTML, from the runs' own files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist.cli.main import app
from fedgist.errors import ReportError
from fedgist.report import model_card
from fedgist.report.privacy_words import in_words
from fedgist.report.tables import comparison
from fedgist.report.tables.data_table import data_sheets
from fedgist.runs.files.record import PARTITION
from fedgist.runs.finished.run_reader import find

from written import sealed_run, write_run  # isort: skip

SPLIT = {
    "classes": ["ill", "<well>"],
    "clients": ["Bonn", "Ulm"],
    "models": ["mlp", "mlp"],
    "train": [[3, 4], [1, 0]],
    "inputs": ["age", "ward (3 categories)"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    private = {"unit": "record", "epsilon": 1.0, "delta": 1e-5, "clip": 1.0}
    for method, raw in (("fedlog", {"privacy": private}), ("local", {})):
        data = {"name": "table", "path": "p.csv", "label": "y", "ignore": ["id"], "missing": "mean"}
        sections = {"data": data, "partition": {"name": "natural"}, **raw}
        columns = {"privacy/epsilon": 1.0} if raw else {}
        run = write_run(
            tmp_path / method,
            [0.5, 0.8],
            method=method,
            clients=[0.9, 0.7],
            raw=sections,
            columns=columns,
        )
        (run / PARTITION).write_text(json.dumps(SPLIT))
        sealed_run(run)
    return tmp_path


def test_a_card_has_all_parts_and_says_what_is_the_readers(folder: Path) -> None:
    study = comparison.study(find([folder]), reference="local")
    text = model_card.as_markdown(model_card.card(study, "Ill or *well*"))
    assert text.startswith("# Ill or \\*well\\*\n")
    parts = ["Task", "Data", "Method", "Privacy", "Results", "Limits", "How it was made"]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == parts
    assert "Intended use: [what decision it supports" in text
    for words in (
        "2: age, ward (3 categories)",
        "| ignored columns | id |",
        "| Bonn | mlp | 7 | 3 | 4 | 10 |",
        "FedLog: clients share sums of features",
        "is right in at most 73.11 % of cases",
        "This covers the noisy sums alone",
        "No formal privacy: messages have no noise",
        "20 test rows: one row is up to 5.0 points",
        "fewer than 30 test rows at 0, 1",
        "Tested on one division of the rows",
        "seal ",
    ):
        assert words in text, words
    html = model_card.as_html(model_card.card(study, "Ill <or> well"))
    assert "&lt;well&gt;" in html
    assert "<or>" not in html
    assert html.count("<h2>") == len(parts)


def test_the_chance_of_an_attacker() -> None:
    for epsilon in (0.1, 1.0, 8.0):
        chance = math.exp(epsilon) / (1 + math.exp(epsilon))
        assert f"{100 * chance:.2f} % of cases" in in_words(epsilon, "record")


def test_the_command_writes_by_the_ending(folder: Path) -> None:
    for name, start in (("card.md", "# Model card"), ("card.html", "<!doctype html>")):
        done = CliRunner().invoke(app, ["card", str(folder), "-o", str(folder / name)])
        assert done.exit_code == 0, done.output
        assert (folder / name).read_text().startswith(start)
    study = comparison.study(find([folder]))
    with pytest.raises(ReportError, match=r"card.pdf: a card is a file \*.md or \*.html"):
        model_card.write(model_card.card(study, "x"), folder / "card.pdf")


def test_a_run_that_is_not_finished_has_no_card(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], planned=4, result=False)
    with pytest.raises(ReportError, match="no run is finished"):
        model_card.card(comparison.study(find([tmp_path])), "x")


def test_a_study_says_what_its_rows_are(folder: Path, tmp_path: Path) -> None:
    facts, by_client = data_sheets(comparison.study(find([folder])))
    assert ("training rows", "8") in facts.rows
    assert ("missing numbers", "mean") in facts.rows
    assert by_client.columns == ("client", "model", "training rows", "ill", "<well>", "test rows")
    assert by_client.rows[1] == ("Ulm", "mlp", "1", "1", "0", "10")
    write_run(tmp_path / "none", [0.5])
    assert data_sheets(comparison.study(find([tmp_path / "none"]))) == []


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ({**SPLIT, "classes": ["rows"], "train": [[7], [1]]}, "Objective: regression.\n"),
        ({**SPLIT, "classes": ["rows", "stems"]}, "Objective: regression; 2 classes."),
        (None, "Clients (sites): not kept in an archived run."),
    ],
)
def test_a_card_states_no_number_that_it_does_not_know(
    split: dict[str, object] | None, said: str, tmp_path: Path
) -> None:
    # seen: "regression; 1 classes", a class called rows, and "Clients (sites): 0"
    run = write_run(tmp_path / "run", [0.5], raw={"objective": {"name": "regression"}})
    if split:
        (run / PARTITION).write_text(json.dumps(split))
    sealed_run(run)
    text = model_card.as_markdown(model_card.card(comparison.study(find([run])), "Card"))
    assert said in text
    assert ("| classes" in text) == ("2 classes" in said)
    assert split or "Rows: not kept in an archived run." in text
