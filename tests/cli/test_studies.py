"""The commands for many runs, as processes; their statistics are checked against scipy."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from browsers import CHROMIUM, new_page, open_browser
from commands import fedgist

pytestmark = pytest.mark.slow  # fifteen runs

METHODS = ("fedlog", "fedavg", "local")
SEEDS = 5
GOAL = 0.7
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def cli(place: Path) -> Cli:
    def call(*args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        return fedgist(*args, cwd=place, code=code)

    return call


@pytest.fixture(scope="module")
def swept(cli: Cli, place: Path) -> Path:
    done = cli(
        "sweep",
        "demo",
        "--grid",
        f"method.name={','.join(METHODS)}",
        "--seeds",
        SEEDS,
        "--out",
        "study",
        "--set",
        "train.num_rounds=10",
        "--set",
        "evaluate.save_features=10",
        "--reference",
        "fedlog",
    )
    assert "[15/15]" in done.stderr
    assert "Against fedlog" in done.stdout
    return place / "study"


def curves(folder: Path, method: str) -> list[list[dict[str, float]]]:
    paths = sorted(folder.glob(f"*{method}/seed-*/rounds.jsonl"))
    assert len(paths) == SEEDS
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def test_the_table_agrees_with_scipy(cli: Cli, swept: Path) -> None:
    text = cli(
        "compare",
        swept,
        "--reference",
        "fedlog",
        "--target-accuracy",
        100 * GOAL,
        "--format",
        "csv",
    ).stdout
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(text))}
    finals = {
        m: np.array([run[-1]["eval/client/accuracy_mean"] for run in curves(swept, m)])
        for m in METHODS
    }
    for method in METHODS:
        row = rows[method]
        assert float(row["final_mean"]) == pytest.approx(finals[method].mean())
        assert float(row["final_se"]) == pytest.approx(stats.sem(finals[method]))
        if method != "fedlog":
            differences = finals[method] - finals["fedlog"]
            assert float(row["difference_mean"]) == pytest.approx(differences.mean())
            interval = stats.ttest_1samp(differences, 0).confidence_interval()
            assert float(row["difference_low"]) == pytest.approx(interval.low)
            assert row["p"] == "", "five seeds cannot be significant"
        spent = []
        for run in curves(swept, method):
            values = [line["eval/client/accuracy_mean"] for line in run]
            end = next((i for i, v in enumerate(values) if v >= GOAL), int(np.argmax(values)))
            spent.append(
                sum(line["comm/up_bytes"] + line["comm/down_bytes"] for line in run[: end + 1])
            )
        assert float(row["target_total_bytes_mean"]) == pytest.approx(np.mean(spent))
    assert (
        float(rows["fedlog"]["final_low"])
        <= finals["fedlog"].mean()
        <= float(rows["fedlog"]["final_high"])
    )


def test_the_page_is_one_command(cli: Cli, swept: Path, place: Path) -> None:
    done = cli("report", swept, "--reference", "fedlog", "-o", "page.html", "--figures", "figures")
    assert "page.html: " in done.stdout
    text = (place / "page.html").read_text()
    assert len(text) < 5_000_000
    for name in (
        "by-round",
        "by-bytes",
        "over-clients",
        "partition-1",
        "bytes-by-round",
        "times",
        "features-1-class",
        "features-1-client",
    ):
        assert f'id="{name}"' in text
        assert (place / "figures" / f"{name}.png").stat().st_size > 5_000
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page is written, not opened")
    with open_browser() as browser:
        for name, width, height, scheme in (
            ("desktop", 1280, 1500, "light"),
            ("phone", 390, 844, "dark"),
        ):
            tab = new_page(browser, width, height, scheme)
            said: list[str] = []
            tab.on("console", lambda message, said=said: said.append(message.text))
            tab.goto((place / "page.html").as_uri())
            tab.screenshot(path=place / f"report-{name}.png")
            assert said == []
        browser.close()


def test_a_run_that_fails_is_named_below_the_table_of_the_others(cli: Cli, place: Path) -> None:
    done = cli(
        "sweep",
        "demo",
        "--grid",
        "clients.availability=1.0,nowhere.csv",
        "--out",
        "half",
        "--set",
        "train.num_rounds=1",
        "--set",
        "data.train_rows=200",
        code=1,
    )
    assert "fedlog" in done.stdout
    assert "1 run failed:" in done.stderr
    assert "nowhere.csv" in done.stderr


def test_watching_what_is_finished_ends(cli: Cli, swept: Path) -> None:
    lines = cli("watch", swept).stdout.splitlines()
    assert len(lines) == len(METHODS) * SEEDS
    assert all("round 10/10" in line and line.endswith("finished") for line in lines)


@pytest.mark.environment
def test_a_table_is_reproduced_beside_the_papers(cli: Cli, place: Path, data_sets: Path) -> None:
    args = (
        "reproduce",
        "fedlog/table1",
        "--column",
        "mnist",
        "--seeds",
        2,
        "--out",
        "table",
        "--data-root",
        data_sets,
        "--set",
        "train.num_rounds=1",
        "--set",
        "train.local_epochs=1",
        *("--set", "data.train_rows=6000"),
        *("--method", "fedlog", "--method", "lg_fedavg@2"),
        *("--format", "markdown"),
    )
    first = cli(*args).stdout
    accuracy = first.partition("**Communication")[0].splitlines()
    ours = {line.split(" | ")[0].strip("| "): line for line in accuracy if line.startswith("| ")}
    assert "98.15 ± 0.05" in ours["fedlog"]
    assert "| 98.18 ± 0.06 |" in ours["lg_fedavg@2"]
    assert "| - |" not in ours["lg_fedavg@2"]
    assert "| - | 97.85 ± 0.05 |" in ours["lg_fedavg@1"]  # the paper's alone: not asked for
    assert "depart from the paper's settings: train.num_rounds" in first
    again = cli(*args)
    assert again.stdout == first
    assert again.stderr.count(" done\n") == 4  # nothing was run twice
    lines = place / "table" / "mnist" / "fedlog" / "seed-1" / "rounds.jsonl"
    lines.write_text(lines.read_text().replace('"comm/up_bytes": ', '"comm/up_bytes": 1'))
    broken = cli(*args, code=1)
    assert "fedlog seed 1" in broken.stderr
    assert "does not match its seal: rounds.jsonl was changed" in broken.stderr
    assert broken.stdout.count("fedlog") > 0  # the other seed is still compared
    assert broken.stdout != first
    assert cli(*args, "--rerun").stdout == first


def test_a_search_ends_in_a_recipe(cli: Cli, place: Path) -> None:
    (place / "space.toml").write_text('["train.lr"]\nlow = 1e-3\nhigh = 1e-1\nlog = true\n')
    small = ("--set", "train.num_rounds=2", "--set", "data.train_rows=200")
    done = cli("tune", "demo", "--space", "space.toml", "--trials", 2, "--out", "search", *small)
    assert "best of 2 trials on validation data" in done.stdout
    cli("run", "search/best.toml", "--quiet", "--out", "best")
    assert "validation = 0.0" in (place / "best" / "recipe.toml").read_text()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("compare", "nowhere"), "nowhere holds no run: there is no such folder"),
        (
            ("compare", "study", "--format", "html"),
            "unknown format 'html'; known: terminal, markdown",
        ),
        (
            ("compare", "study", "--reference", "fedlg"),
            "unknown reference 'fedlg'; did you mean 'fedlog'?",
        ),
        (
            ("report", "study", "--metric", "eval/x"),
            "no run has 'eval/x'; columns: eval/client/accuracy_mean",
        ),
        (
            ("report", "study", "--over", "train.lrr"),
            "no run has the setting 'train.lrr'; did you mean 'train.lr'?",
        ),
        (
            ("sweep", "demo", "--grid", "train.lr"),
            "--grid train.lr: expected section.key=value,value",
        ),
        (
            ("reproduce", "fedlog/tabel1"),
            "unknown table 'fedlog/tabel1'; did you mean 'fedlog/table1'",
        ),
        (
            ("reproduce", "fedlog/table1", "--scale", "big"),
            "unknown scale 'big'; known: small, paper",
        ),
        (("tune", "demo", "--space", "nowhere.toml"), "nowhere.toml"),
        (
            ("watch", "study", "--track", "neptune"),
            "unknown tracker 'neptune'; known: tensorboard, mlflow, wandb",
        ),
        (("run", "--resume", "study"), "study holds runs of several settings"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    cli: Cli, swept: Path, args: tuple[str, ...], says: str
) -> None:
    done = cli(*args, code=2)
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_sweeps_with_archives_of_their_own_have_folders_of_their_own(cli: Cli, place: Path) -> None:
    for rounds in (1, 2):  # in settings that are no part of a cell's name
        setting = f"train.num_rounds={rounds}"
        archive = f"kept/of_{rounds}"
        cli("sweep", "demo", "--grid", "method.name=local", "--set", setting, "--archive", archive)
        (run,) = (place / "runs" / f"of_{rounds}").glob("*/seed-0/rounds.jsonl")
        assert len(run.read_text("utf-8").splitlines()) == rounds
