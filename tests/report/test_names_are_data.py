"""Names may hold anything: markup, escape sequences, formulas, other languages' commands."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import markupsafe
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedgist.cli import job_progress
from fedgist.cli.main import app
from fedgist.errors import JobsError, printable
from fedgist.recipe.reading import make
from fedgist.report.formatting import Sheet, csv_text, latex_text, markdown_text
from fedgist.report.tables import comparison
from fedgist.report.terminal.console import SheetView, console, paragraph
from fedgist.report.terminal.progress import Json, Plain
from fedgist.report.terminal.table_formats import in_words, render
from fedgist.runs.files.record import PARTITION
from fedgist.runs.finished.run_reader import find
from fedgist.studies.job import Event, Job

from commands import call  # isort: skip
from written import sealed_run, write_run  # isort: skip

LATEX = shutil.which("pdflatex")
CLEAR, TITLE, RIGHT_TO_LEFT = "\x1b[2J", "\x1b]0;gone\x07", "\u202e"
HOSTILE = [
    "[/red]",
    "[bold]x[/bold][link=file:///etc]",
    f"a{CLEAR}b",
    f"c{TITLE}d",
    f"e{RIGHT_TO_LEFT}f",
    "$a_$",
    "two\nlines",
    "=cmd|' /C calc'!A0",
    "<script>alert(1)</script>",
    r"\input{/etc/passwd}",
    "a & b % c # d ^ e ~ f",
    ":smile: *x* `y` | z",
    "{task.description}",
]
FOLDERS = [name.replace("/", "|") for name in HOSTILE]  # a folder's name holds no slash


def shown(*args: object) -> str:
    """What a command prints, which must not fail."""
    done = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def is_harmless(text: str) -> bool:
    return all(sign.isprintable() or sign == "\n" for sign in text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose folders, columns, reasons and classes have such names."""
    place = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(FOLDERS):
        run = write_run(place / name, [0.5, 0.6], seed=seed, clients=[0.5, 0.7])
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        lines[0]["refused"] = [{"client": 0, "reason": HOSTILE[seed]}]
        lines[0][f"server/{HOSTILE[seed]}"] = 1.0
        lines[0]["events"] = [HOSTILE[seed]]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "rounds.jsonl").write_text(text)
        split = {"classes": HOSTILE, "train": [[1] * len(HOSTILE)] * 2}
        (run / PARTITION).write_text(json.dumps(split))
        sealed_run(run)
    return place


@pytest.mark.parametrize("name", FOLDERS, ids=ascii)
def test_a_run_of_any_name_is_shown(folder: Path, name: str) -> None:
    # rejects rich's markup in the title of the table of rounds, and escape sequences
    text = shown("show", folder / name)
    assert is_harmless(text)
    # a long path is folded, anywhere
    assert "".join(printable(name)[:4].split()) in "".join(text.split())


def test_every_format_of_a_table_is_harmless(folder: Path) -> None:
    for form in ("terminal", "markdown", "latex", "csv", "json"):
        assert is_harmless(shown("compare", folder, "--format", form)), form
    assert is_harmless(shown("show", folder))
    assert is_harmless(shown("watch", folder, "--once"))


def labelled(folder: Path, values: Sequence[str]) -> Path:
    """Write runs of one method: a row's label holds the value in which they differ."""
    for number, value in enumerate(values):
        run = write_run(folder / str(number), [0.5])
        (run / "recipe.toml").write_text(
            f'seed = 0\n[method]\nname = "fedlog"\nword = {json.dumps(value)}\n'
        )
        sealed_run(run)
    return folder


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_label_of_any_name_is_a_cell_of_its_own(tmp_path: Path, name: str) -> None:
    labelled(tmp_path, (name, "other"))
    study = comparison.study(find([tmp_path]))
    label = f"fedlog word={name}"
    assert study.rows[0].label == label
    rows = list(csv.reader(io.StringIO(str(render(study, "csv")))))
    assert {len(row) for row in rows} == {len(rows[0])}
    markdown = str(render(study, "markdown")).splitlines()
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in markdown[2:6]}
    assert bars == {6}


@pytest.mark.slow
@pytest.mark.parametrize("names", [HOSTILE[i::3] for i in range(3)], ids=["0", "1", "2"])
def test_labels_of_any_names_are_text_on_the_page(tmp_path: Path, names: list[str]) -> None:
    labelled(tmp_path, names)
    page = tmp_path / "page.html"
    text = shown("report", tmp_path, "-o", page)
    assert is_harmless(text)
    assert "<script>alert" not in page.read_text()
    for name in names:
        assert str(markupsafe.escape(printable(f"fedlog word={name}"))) in page.read_text()


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40))
def test_any_text_is_one_cell_in_any_file(name: str) -> None:
    assert "\n" not in latex_text(name)
    assert is_harmless(latex_text(name) + markdown_text(name))
    ((cell, number),) = csv.reader(io.StringIO(csv_text([[name, 1.5]])))
    assert number == "1.5"
    assert not cell.startswith(("=", "@", "\t", "\r")) or len(name) == 1


def test_what_a_spreadsheet_would_compute_is_text_and_numbers_stay_numbers() -> None:
    rows = list(csv.reader(io.StringIO(csv_text([["=1+1", "-1", "-x", "+2.5e-3", "@a", -3.0]]))))
    assert rows == [["'=1+1", "-1", "'-x", "+2.5e-3", "'@a", "-3.0"]]


def test_numbers_are_mathematics_in_latex_and_names_are_not() -> None:
    assert latex_text("[-25.75, -21.66]") == "$[-25.75, -21.66]$"
    assert latex_text("-19.08 ± 1.57") == r"$-19.08 \pm 1.57$"
    assert latex_text("1.5e-07") == r"$1.5 \times 10^{-7}$"
    assert latex_text("[/red] a_b--c") == r"{[}/red{]} a\_b-{}-c"


def test_each_table_in_latex_has_one_caption_and_a_label_of_its_own() -> None:
    wide = Sheet("Wide", ("method", *map(str, range(20))), (("a_b" * 20, *["0.5 ± 0.1"] * 20),))
    text = str(in_words([wide, wide, Sheet("5 %", ("a",), (("b",),))], [], "latex"))
    assert text.count(r"\caption{") == text.count(r"\begin{table}") == 3
    labels = re.findall(r"\\label\{(.*)\}", text)
    assert labels == ["tab:wide", "tab:wide-no2", "tab:5"]
    assert text.count(r"\begin{tabular}") == 3
    assert text.count(r"\resizebox{\linewidth}{!}") == 2, "wide tables are made smaller"
    assert r"a\_b" not in text, "a long name may be broken after each underscore"


@pytest.mark.environment
@pytest.mark.skipif(LATEX is None, reason="no TeX on this machine: apt-get install texlive")
def test_latex_compiles_whatever_the_names(tmp_path: Path) -> None:
    for seed in range(3):
        for method, last in (("fedlog", 0.5), ("fedavg", 0.3)):
            write_run(tmp_path / f"{method}{seed}", [last + 0.01 * seed], seed=seed, method=method)
    study = comparison.study(find([tmp_path]), reference="fedlog", target_accuracy=0.4)
    printable_names = tuple((name.replace(RIGHT_TO_LEFT, ""), "-1.5 ± 0.2") for name in HOSTILE)
    hostile = Sheet("A [title] & 5 %", ("na_me", "$value$"), printable_names, "*: ^ ~ \\ x")
    text = str(render(study, "latex")) + str(in_words([hostile], ["a note\nof two lines"], "latex"))
    assert "$[-20.00, -20.00]$" in text
    head = (
        "\\documentclass{article}\n\\usepackage[utf8]{inputenc}\n\\usepackage{booktabs,graphicx}\n"
    )
    document = head + "\\begin{document}\n" + text + "\\end{document}\n"
    (tmp_path / "table.tex").write_text(document)
    command = [str(LATEX), "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    call(command, tmp_path)
    said = call(command, tmp_path).stdout
    assert "multiply" not in said
    assert "Overfull" not in said
    assert (tmp_path / "table.pdf").stat().st_size > 1000


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_round_of_any_words_is_one_harmless_line(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    line = {
        "round": 1,
        "comm/up_bytes": 1,
        "comm/down_bytes": 1,
        "time/round_s": 1.0,
        "refused": [{"client": 0, "reason": name}],
        "absent": [{"client": 1, "reason": name}],
        "events": [name],
    }
    Plain().finished_round(line)
    plain = capsys.readouterr().out
    assert is_harmless(plain)
    assert len(plain.splitlines()) == 4
    Json().finished_round(line)
    as_json = capsys.readouterr().out
    assert is_harmless(as_json)
    assert json.loads(as_json) == line  # the same values, whatever was escaped


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_jobs_of_any_name_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # rejects markup in the columns of rich's bars, and an escape sequence in any of them
    job = Job(name, make({}), Path(name))
    for color, display in (("", "a pipe"), ("1", "a terminal")):
        monkeypatch.setenv("FORCE_COLOR", color)
        with job_progress.display(1, "eval/x", quiet=False) as listener:
            listener(job, Event("began", {"round": 0}))
            listener(job, Event("failed", text=name))
        text = capsys.readouterr().err
        assert CLEAR not in text, display
        assert TITLE not in text
        assert RIGHT_TO_LEFT not in text
        assert printable(name) in text
    with pytest.raises(JobsError) as failed:
        job_progress.raise_failures({name: name})
    buffer = io.StringIO()
    console(buffer, width=200, soft_wrap=True).print(paragraph(str(failed.value)))
    assert is_harmless(buffer.getvalue())


OWN = """
[data]
name = "table"
path = "{path}"
label = "kind"
client = "owner"
[partition]
name = "natural"
[clients]
num_clients = 3
[model]
name = "mlp"
[train]
num_rounds = 1
[engine]
cohort_size = 3
[evaluate]
save_features = 5
"""


@pytest.mark.slow
def test_data_of_any_names_go_through_every_command(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    owners, classes = HOSTILE[:3], HOSTILE[3:6]
    numbers = rng.normal(size=(90, 2)).tolist()
    rows = [[*pair, owners[i % 3], classes[i // 3 % 3]] for i, pair in enumerate(numbers)]
    with (tmp_path / "own.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "owner", "kind"], *rows])
    (tmp_path / "own.toml").write_text(OWN.format(path=tmp_path / "own.csv"))
    own = tmp_path / "own.toml"
    run = tmp_path / "[/red]run"
    for command in (
        ("partition", own, "--png", tmp_path / "p.png"),
        ("run", own, "--out", run),
        ("run", own, "--json", "--out", tmp_path / "json"),
        ("show", run, "--png", tmp_path / "c.png"),
        ("report", run, "-o", tmp_path / "r.html", "--figures", tmp_path / "figures"),
        ("predict", run, tmp_path / "own.csv", "--client", "0"),
        ("evaluate", run, tmp_path / "own.csv"),
        ("export", run, "--client", "0", "-o", tmp_path / "m.safetensors"),
        ("watch", run, "--once"),
    ):
        assert is_harmless(shown(*command)), command[0]


WIDE = Sheet(
    "Wide",
    ("method", *(f"a long header {i}" for i in range(8))),
    (("fedlog " + "x" * 60, *["97.92 ± 0.03"] * 8),),
    "A caption.",
)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_headers_are_whole_at_any_width(width: int) -> None:
    buffer = io.StringIO()
    console(buffer, width=width).print(SheetView(WIDE))
    text = buffer.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for name in WIDE.columns:
        assert name in text
    assert text.count("97.92 ± 0.03") == 8
    heads = [line for line in text.splitlines() if "header" in line]
    assert all(line.startswith("method") for line in heads)  # each block names its rows


def test_the_tables_of_a_study_stand_side_by_side_in_80_columns(tmp_path: Path) -> None:
    for seed in range(5):
        for method, last in (("fedlog", 0.9), ("fedavg", 0.8)):
            write_run(
                tmp_path / f"{method}{seed}", [last + seed / 99] * 12, seed=seed, method=method
            )
    study = comparison.study(find([tmp_path]), reference="fedlog", target_accuracy=0.85)
    buffer = io.StringIO()
    console(buffer, width=80).print(render(study, "terminal"))
    lines = buffer.getvalue().splitlines()
    assert sum(line.startswith("method  ") for line in lines) == 4  # four tables, no second block
    assert max(map(len, lines)) <= 80
