"""The commands under a results page's tables make those tables: each archived run is one of theirs.

Runs of before a correction, and those whose commands begin with a switch to an older version, were
made with recipes as they were; they are not tried.
"""

from __future__ import annotations

import argparse
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedgist.cli.recipe_files import find_recipe, find_table
from fedgist.recipe.reading import make
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.studies.job import Job, difference
from fedgist.studies.paper_table import cells, read_paper_table
from fedgist.studies.sweep import grid
from results_cells import experiment

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "results").glob("*.toml"))
OUT = Path("runs")


def parsed(command: str) -> argparse.Namespace:
    """The parts of a command that say which runs it makes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("study", choices=["sweep", "reproduce"])
    parser.add_argument("what")
    for name in ("grid", "set", "column", "method"):
        parser.add_argument(f"--{name}", action="append", default=[])
    for name in ("archive", "reference", "scale"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--seeds", type=int)
    words = shlex.split(command, comments=True)
    assert words[0] == "fedgist"
    return parser.parse_args(words[1:])


def jobs_of(asked: argparse.Namespace) -> list[Job]:
    if asked.study == "sweep":
        return grid(find_recipe(asked.what), asked.set, asked.grid, asked.seeds or 1, OUT)
    return cells(
        read_paper_table(find_table(asked.what)),
        "paper" if asked.scale == "paper" else "small",
        find_recipe,
        OUT,
        seeds=asked.seeds,
        columns=asked.column,
        methods=asked.method,
        settings=asked.set,
    )[0]


def made_by(commands: list[str]) -> dict[Path, list[Job]]:
    """The files that commands add to the archive, with the jobs of each."""
    made: dict[Path, list[Job]] = {}
    for command in commands:
        if not command.startswith(("fedgist sweep", "fedgist reproduce")):
            continue
        asked = parsed(command)
        for job in jobs_of(asked):
            inside = job.folder.relative_to(OUT)
            file = ROOT / asked.archive / inside.with_name(f"{inside.name}.csv")
            made.setdefault(file, []).append(job)
    return made


def differing(runs: list[FinishedRun], commands: list[str]) -> Iterator[str]:
    """Each run that no command makes as it is, and each further seed that a command would make."""
    made = made_by(commands)
    current = {run.folder: run for run in runs if not run.before}
    for file, run in current.items():
        recipe = make(dict(run.recipe))
        found = [difference(job.recipe, recipe) for job in made.get(file, [])]
        if set(found) != {None}:  # of two commands, the second would be refused
            yield f"{file.relative_to(ROOT)}: {found or 'no command makes it'}"
    cells_there = {file.parent for file in current}
    for file in made:
        if file.parent in cells_there and not file.exists():
            yield f"{file.relative_to(ROOT)}: a command makes it, and it is not there"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_make_its_tables(page: Path) -> None:
    about = tomllib.loads(page.read_text("utf-8"))
    found = [experiment(one, ROOT / "docs" / "results" / "data") for one in about["experiments"]]
    older = [one for one in found if any(c.startswith("git switch") for c in one.commands)]
    not_tried = {run.folder for one in older for run in one.runs}
    found = [one for one in found if one not in older]
    runs = {run.folder: run for one in found for run in one.runs if run.folder not in not_tried}
    commands = dict.fromkeys(command for one in found for command in one.commands)
    assert list(differing([*runs.values()], [*commands])) == []
