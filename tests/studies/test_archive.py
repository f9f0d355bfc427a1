"""An archive of finished runs: what is found there is not run again, and reports read it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedgist.cli.shared_options import same_runs
from fedgist.errors import DataError, RecipeError
from fedgist.recipe.reading import make
from fedgist.report.tables import comparison
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.archived_run import read_csv
from fedgist.studies.archive import Archive
from fedgist.studies.job import Event, Job, jobs_of_seeds
from fedgist.studies.jobs import run_jobs

NET = """
import math
from torch import nn

def net(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))
"""
SMALL = ["train.num_rounds=3", "data.train_rows=100"]


def jobs(out: Path, *more: str) -> list[Job]:
    return jobs_of_seeds("cell", make({}, [*SMALL, *more]), 2, out / "cell")


def do(todo: list[Job], archive: Archive) -> list[str]:
    kinds: list[str] = []

    def listen(job: Job, event: Event) -> bool:
        kinds.append(event.kind)
        return False

    run_jobs(todo, 1, listen, archive=archive)
    return kinds


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Job], Archive]:
    place = tmp_path_factory.mktemp("archive")
    todo = jobs(place / "runs")
    archive = Archive(place / "kept", place / "runs", "fedgist sweep demo")
    assert do(todo, archive).count("round") == 6
    return todo, archive


def test_what_is_archived_is_not_run_again(done: tuple[list[Job], Archive], tmp_path: Path) -> None:
    todo, archive = done
    files = [archive.folder / "cell" / f"seed-{seed}.csv" for seed in (0, 1)]
    assert [archive.place(job) for job in todo] == files
    elsewhere = Archive(archive.folder, tmp_path)
    assert do(jobs(tmp_path), elsewhere) == ["done", "done"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", [0, 10, -3])
@pytest.mark.parametrize("divided", ["", "data.folds=2", "data.repeats=3"])
def test_every_file_of_an_archive_is_found_by_reports(
    divided: str, seed: int, tmp_path: Path
) -> None:
    # rejects a reader that knows files of seeds alone, and skips folds in silence
    archive = Archive(tmp_path, tmp_path / "runs")
    paths = [archive.place(job) for job in jobs(archive.runs, f"seed={seed}", *divided.split())]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text("")
    assert sorted(run.folder for run in run_reader.find([tmp_path])) == sorted(paths)


def test_a_run_that_ended_without_the_archive_is_added(
    done: tuple[list[Job], Archive], tmp_path: Path
) -> None:
    todo, archive = done
    late = Archive(tmp_path, archive.runs, archive.command)
    assert do(todo, late) == ["done", "done"]
    for job in todo:
        assert late.place(job).read_bytes() == archive.place(job).read_bytes()


def test_reports_read_an_archive_as_they_read_the_runs(done: tuple[list[Job], Archive]) -> None:
    _, archive = done
    (whole,) = comparison.study(run_reader.find([archive.runs]), target_accuracy=0.5).rows
    (kept,) = comparison.study(run_reader.find([archive.folder]), target_accuracy=0.5).rows
    assert kept.final
    assert whole.final
    assert kept.final.mean == pytest.approx(whole.final.mean, rel=1e-5)
    assert kept.final.error == pytest.approx(whole.final.error, rel=1e-4)
    assert (kept.label, kept.seeds, kept.rounds) == (whole.label, whole.seeds, whole.rounds)
    assert (kept.unfinished, kept.up, kept.down) == (0, whole.up, whole.down)
    assert kept.target == whole.target
    # both at once: each run counts once
    both = comparison.study(run_reader.find([archive.folder, archive.runs]))
    assert len(both.rows) == 1
    assert len(both.rows[0].runs) == 2


def test_a_changed_recipe_is_refused_by_its_key(
    done: tuple[list[Job], Archive], tmp_path: Path
) -> None:
    _, archive = done
    other = jobs(tmp_path, "train.lr=0.5")
    with pytest.raises(RecipeError, match=r"seed-0.csv holds a run with train.lr = .*, not 0.5"):
        Archive(archive.folder, tmp_path).holds(other[0])


def test_how_a_run_was_done_is_no_change(done: tuple[list[Job], Archive], tmp_path: Path) -> None:
    _, archive = done
    other = jobs(tmp_path, "engine.memory_limit=100000000", "engine.cohort_size=2")
    assert Archive(archive.folder, tmp_path).holds(other[1])


def test_own_code_may_lie_elsewhere_on_another_machine(tmp_path: Path) -> None:
    archive, held = Archive(tmp_path / "kept", tmp_path / "runs"), []
    for place in (tmp_path / "one", tmp_path / "other"):
        place.mkdir()
        (place / "an_own_net.py").write_text(NET)
        sys.modules.pop("an_own_net", None)
        recipe = make({"model": {"name": "an_own_net:net"}}, SMALL, place)
        job = Job("own", recipe, archive.runs / "cell" / "seed-0")
        held.append(archive.holds(job))
        assert do([job], archive)[-1] == "done"
        assert str(tmp_path) not in archive.place(job).read_text()
    assert held == [False, True]


def test_a_damaged_file_is_refused_and_left_out_of_reports(
    done: tuple[list[Job], Archive], tmp_path: Path
) -> None:
    todo, archive = done
    copy = Archive(tmp_path, archive.runs)
    for job in todo:
        copy.place(job).parent.mkdir(exist_ok=True)
        copy.place(job).write_bytes(archive.place(job).read_bytes())
    path = copy.place(todo[1])
    path.write_text(path.read_text()[:-3])
    with pytest.raises(DataError, match=r"seed-1.csv cannot be used as an archived run"):
        copy.holds(todo[1])
    study = comparison.study(run_reader.find([tmp_path]))
    assert study.rows[0].seeds == [0]
    assert any(str(path) in note and "this run is left out" in note for note in study.notes)


def test_the_command_is_kept_without_what_is_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = "reproduce fedlog/table1 --out x -j 2 --column mnist --data-root=/d -q --archive a"
    monkeypatch.setattr(sys, "argv", ["fedgist", *words.split(), "--seeds", "5"])
    assert same_runs() == "fedgist reproduce fedlog/table1 --column mnist --seeds 5"


def test_the_command_stands_in_the_file(done: tuple[list[Job], Archive]) -> None:
    todo, archive = done
    assert read_csv(archive.place(todo[0])).command == "fedgist sweep demo"
