"""Privacy on the command line: what is spent is in every table, and mistakes are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import fedgist

pytestmark = pytest.mark.slow  # each command is a process that imports torch

PRIVATE = ["privacy.unit=record", "privacy.epsilon=2", "privacy.delta=0.01", "privacy.clip=5"]
SMALL = [
    "train.num_rounds=2",
    "engine.cohort_size=3",
    "data.train_rows=300",
    "train.local_epochs=1",
]


def settings(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


def test_what_was_spent_is_shown_wherever_a_run_is(tmp_path: Path) -> None:
    run = fedgist("run", *settings(*SMALL, *PRIVATE), "--out", "private", cwd=tmp_path)
    assert "epsilon 2" in run.stdout + run.stderr
    assert "do not depend on the record" in run.stdout + run.stderr
    fedgist("run", *settings(*SMALL), "--out", "plain", cwd=tmp_path)
    for command in (["show", "private"], ["show", "private", "plain"], ["compare", "."]):
        out = fedgist(*command, cwd=tmp_path).stdout
        assert "epsilon" in out, command
        assert " 2 " in out, command
        told = "epsilon: simulated, noise from seed 0, which anyone can subtract"
        assert told in " ".join(out.split()), command
    assert "epsilon" not in fedgist("show", "plain", cwd=tmp_path).stdout
    fedgist("report", "private", "plain", "-o", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert "epsilon" in page
    assert "Privacy spent" in page
    assert "simulated, noise from seed 0, which anyone can subtract" in page


@pytest.mark.environment
def test_runs_of_several_seeds_or_settings_say_what_they_spend_together(tmp_path: Path) -> None:
    told = "2 runs on the same rows compose to epsilon 3.191, delta 0.01 for one record more or"
    words = settings(*SMALL, *PRIVATE)
    run = fedgist("run", *words, "--seeds", "2", "--out", "seeds", cwd=tmp_path)
    assert (run.stdout + run.stderr).count(told) == 1
    grid = ["--grid", "train.lr=1e-3,1e-2", "--out", "grid"]
    assert fedgist("sweep", "demo", *words, *grid, cwd=tmp_path).stderr.count(told) == 1
    table = """
    [table]
    source = "ours"
    methods = ["fedlog", "fedlog_c"]
    [columns.first]
    recipe = "demo"
    [columns.second]
    recipe = "demo"
    """
    (tmp_path / "two.toml").write_text(table)
    only = ["--method", "fedlog", "--seeds", "2", "--out", "table"]
    said = fedgist("reproduce", "two.toml", *words, *only, cwd=tmp_path).stderr
    assert f"first: privacy: {told}" in said  # rejects a sum over columns: their data may differ
    assert f"second: privacy: {told}" in said


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["privacy.epsilon=0"], "privacy.epsilon = 0: must be greater than 0"),
        (["privacy.delta=1"], "privacy.delta = 1: must be less than 1"),
        (["method.name=fedavg"], "use unit = 'client'"),
    ],
)
def test_what_cannot_be_promised_is_told_in_one_line(
    keys: list[str], says: str, tmp_path: Path
) -> None:
    done = fedgist("run", *settings(*SMALL, *PRIVATE, *keys), cwd=tmp_path, code=2)
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
