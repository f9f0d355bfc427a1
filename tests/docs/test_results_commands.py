"""The commands under a results page's tables make those tables: each archived run is one of theirs.

Runs of an earlier version were made with recipes as they were; they are not tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgist.cli.queue_runs import jobs_of_command
from fedgist.cli.study_commands import JOBS_OF
from fedgist.recipe.reading import make
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.versions import is_current
from fedgist.studies.archive import Archive
from fedgist.studies.job import Job, difference
from fedgist.studies.queue import read_queue
from results_cells import PAGES, QUEUE, experiment, read_page

ROOT = Path(__file__).parents[2]
OUT = Path("runs")


def made_by(commands: list[str]) -> dict[Path, list[Job]]:
    """The files that commands add to the archive, with the jobs of each."""
    made: dict[Path, list[Job]] = {}
    for command in commands:
        if not command.startswith(("fedgist sweep", "fedgist reproduce")):
            continue
        jobs, archive = jobs_of_command(command, JOBS_OF, OUT)
        for job in jobs:
            made.setdefault(Archive(ROOT / archive, OUT).place(job), []).append(job)
    return made


def code_of(job: Job) -> Path | None:
    folder = job.recipe.engine.code_folder
    return Path(folder) if folder else None


def differing(runs: list[FinishedRun], commands: list[str]) -> Iterator[str]:
    """Each run that no command makes as it is."""
    made = made_by(commands)
    current = {run.folder: run for run in runs if is_current(run.name, run.result)}
    for file, run in current.items():
        found = [
            difference(job.recipe, make(dict(run.recipe), beside=code_of(job)))
            for job in made.get(file, [])
        ]
        if set(found) != {None}:  # of two commands, the second would be refused
            yield f"{file.relative_to(ROOT)}: {found or 'no command makes it'}"


@pytest.mark.environment
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_make_its_tables(page: Path) -> None:
    about = read_page(page)
    found = [experiment(one, ROOT / "docs" / "results" / "data") for one in about["experiments"]]
    runs = {run.folder: run for one in found for run in one.runs}
    commands = dict.fromkeys(command for one in found for command in one.commands)
    assert list(differing([*runs.values()], [*commands])) == []


def test_every_command_of_the_queue_is_of_an_experiment_of_a_page() -> None:
    shown = {
        f"{page.stem} {one.get('like', one['name'])}"
        for page in PAGES
        for one in read_page(page)["experiments"]
    }
    assert {entry.of for entry in read_queue(QUEUE)} <= shown
