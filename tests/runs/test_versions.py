"""Versions of methods and of the arithmetic: recorded, never mixed, and not changed on resume."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import commands
import fedgist
import fedgist.runs.versions as module
from fedgist.errors import RecipeError
from fedgist.methods import METHODS
from fedgist.recipe.reading import make
from fedgist.report.tables import comparison
from fedgist.runs.finished.archived_run import archived_part, read_csv, to_csv
from fedgist.runs.finished.run_reader import read_run
from fedgist.runs.versions import Computed, commit, is_current
from fedgist.studies.archive import Archive
from fedgist.studies.job import Job
from fedgist.studies.job_process import is_stale

RECIPE: dict[str, Any] = {
    "data": {"train_rows": 100},
    "clients": {"num_clients": 4},
    "method": {"name": "local"},
    "train": {"num_rounds": 2},
    "engine": {"workers": 1},
}


def ended(folder: Path, seed: int = 0) -> Path:
    fedgist.run(make({**RECIPE, "seed": seed}), out=folder)
    return folder


def raise_version(monkeypatch: pytest.MonkeyPatch, number: int = 2) -> None:
    monkeypatch.setattr(METHODS["local"], "version", number)


def test_a_result_and_its_archive_say_what_computed_it(tmp_path: Path) -> None:
    run = read_run(ended(tmp_path / "run"))
    archived = tmp_path / "seed-0.csv"
    archived.write_text(to_csv(archived_part(run, "a command")))
    for read in (run, read_csv(archived)):
        stated = read.result["versions"]
        assert (stated["method"], stated["arithmetic"]) == (1, module.ARITHMETIC)
        assert stated.get("commit", "") == commit()
        assert read.computed == Computed(1, module.ARITHMETIC)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_this_checkout_or_unknown() -> None:
    root = module.PACKAGE.parents[1]
    head = commands.call(["git", "rev-parse", "HEAD"], root, None).stdout.strip()
    assert commit().removesuffix("+") == head[: module.COMMIT_LETTERS]


@pytest.mark.parametrize(
    "result", [{}, {"versions": None}, {"versions": {"method": "x", "arithmetic": True}}]
)
def test_a_result_without_usable_versions_is_of_an_unknown_one(result: dict[str, Any]) -> None:
    assert Computed.of_result(result) == Computed(0, 0)


def test_every_registered_method_has_a_version_and_a_users_own_is_current() -> None:
    assert all(METHODS[name].version >= 1 for name in METHODS)
    now = {"method": METHODS["local"].version, "arithmetic": module.ARITHMETIC}
    assert is_current("local@variant", {"versions": now})
    assert not is_current("local", {"versions": {"method": 7}})
    assert is_current("mine:Method", {"versions": {"method": 7}})


@pytest.mark.parametrize("which", ["method", "arithmetic"])
def test_runs_of_two_versions_are_two_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    old = ended(tmp_path / "old", seed=0)
    if which == "method":
        raise_version(monkeypatch)
    else:
        monkeypatch.setattr(module, "ARITHMETIC", module.ARITHMETIC + 1)
    new = ended(tmp_path / "new", seed=1)
    rows = comparison.study([read_run(old), read_run(new)]).rows
    assert [row.seeds for row in rows] == [[0], [1]]
    word = "version" if which == "method" else "arithmetic"
    assert [row.label for row in rows] == [f"local {word}=1", f"local {word}=2"]
    (row,) = comparison.study([read_run(old)]).rows
    assert row.label == "local"


def test_an_unfinished_run_is_in_the_row_of_the_newest_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_version(monkeypatch, 3)
    done, other = (read_run(ended(tmp_path / str(seed), seed)) for seed in (0, 1))
    (row,) = comparison.study([done, replace(other, result={})]).rows
    assert row.seeds == [0, 1]


def test_a_run_of_an_earlier_version_is_done_again_and_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("local seed 0", make(RECIPE), tmp_path / "runs" / "seed-0")
    ended(job.folder)
    archive = Archive(tmp_path / "archive", tmp_path / "runs")
    archive.add(job)
    assert archive.holds(job)
    assert not is_stale(job.folder)
    raise_version(monkeypatch)
    assert not archive.holds(job)
    assert is_stale(job.folder)


def test_a_stopped_run_goes_on_only_with_its_own_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    ended(folder)
    more: dict[str, Any] = {"out": folder, "resume": True, "rounds": 3}
    raise_version(monkeypatch)
    with pytest.raises(RecipeError, match="the version of the method changed since the run"):
        fedgist.run(None, **more)
    raise_version(monkeypatch, 1)
    assert len(fedgist.run(None, **more).rounds) == 3
