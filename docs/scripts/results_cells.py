"""What the pages of results are made from: experiments, their cells, and the runs of each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedgist.cli.recipe_files import find_recipe, find_table
from fedgist.methods import METHODS, base_name
from fedgist.recipe.reading import read
from fedgist.recipe.schema import PaperSection
from fedgist.report.pictures.varied import VariedLine, varied
from fedgist.report.tables import comparison
from fedgist.report.tables.comparison import Paper, Row, paper_numbers
from fedgist.report.tables.paper_comparison import PaperRow
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.versions import is_current
from fedgist.studies.paper_table import read_paper_table
from fedgist.studies.queue import read_queue

RESULTS = Path(__file__).parents[1] / "results"
QUEUE = RESULTS / "queue.toml"
PAGES = sorted(path for path in RESULTS.glob("*.toml") if path != QUEUE)


def read_page(path: Path) -> dict[str, Any]:
    """Return what a page's file says; its experiments have also the queue's commands.

    An experiment that is ``like`` another of the page shows the same runs.
    """
    about = tomllib.loads(path.read_text(encoding="utf-8"))
    for one in about["experiments"]:
        of = f"{path.stem} {one.get('like', one['name'])}"
        queued = dict.fromkeys(entry.command for entry in read_queue(QUEUE) if entry.of == of)
        one["commands"] = [*queued, *one.get("commands", ())]
    return about


@dataclass(frozen=True)
class Experiment:
    """One experiment of a page, as its file describes it, with its cells.

    The paper's test is against the method ``reference``, if it has one.
    """

    name: str
    title: str
    text: str
    commands: tuple[str, ...]
    paper: PaperSection
    cells: tuple[PaperRow, ...]
    options: Mapping[str, Any]
    reference: str = ""
    data: Path = Path()

    def beside(self, folder: str) -> Row | None:
        """Return the row of another folder: runs of the same row in another experiment."""
        return _row(self.data / folder, self.paper, self.metric)

    @property
    def metric(self) -> str:
        """The column that is shown; empty: each run's main one."""
        return str(self.options.get("metric", ""))

    @property
    def runs(self) -> list[FinishedRun]:
        """All of its runs."""
        return [run for cell in self.cells if cell.row for run in cell.row.runs]

    @property
    def rows(self) -> list[Row]:
        """The rows that have runs."""
        return [cell.row for cell in self.cells if cell.row]

    @property
    def lines(self) -> list[VariedLine]:
        """The metric over the setting that is varied; 0 of it is as if it were not there."""
        key = self.options["over"]
        rows = [
            replace(r, settings={**r.settings, key: r.settings.get(key) or None}) for r in self.rows
        ]
        return varied(rows, key)


def experiment(about: Mapping[str, Any], data: Path) -> Experiment:
    """Return an experiment with the runs of its cells.

    ``about`` has ``name``, ``title``, ``text``, ``commands``, and ``table`` and ``column`` of a
    paper's table, or ``recipe`` and ``folder``; of ``rows`` the folders, all that are there if not
    given; in ``also`` further labels with their folders, or other labels of those that are there;
    ``reference`` is the method of the test, if not the table's; ``at`` is another round that is
    shown; ``paper`` is false where the recipe's numbers of the paper are of other settings.
    """
    folder, rows, recipe = about.get("folder", ""), about.get("rows"), about.get("recipe")
    reference, own = about.get("reference", ""), {}
    if "table" in about:
        table = read_paper_table(find_table(about["table"]))
        folder, column = f"{about['table']}/{about['column']}", table.columns[about["column"]]
        recipe, own, rows = column.recipe, column.own, rows or table.table.methods
        reference = reference or table.table.reference or ""
    if rows is None:
        here = data / folder
        inside = [p for p in here.iterdir() if p.is_dir()] if here.is_dir() else []
        rows = [p.name for p in sorted(inside, key=run_reader.natural_order)]
    paper = read(find_recipe(recipe), own=own).paper
    if not about.get("paper", True):
        paper = PaperSection()
    also = about.get("also", {})
    places = {
        _short(row): f"{folder}/{row}" for row in rows if f"{folder}/{row}" not in also.values()
    }
    metric, printed = about.get("metric", ""), about.get("papers", {})
    cells = []
    for label, place in (places | also).items():
        row = _row(data / place, paper, metric)
        method = row.method if row else label
        named = ", ".join([label, *filter(None, [_before(row.runs[0]) if row else ""])])
        own_row = replace(row, label=named) if row else None
        cells.append(PaperRow(named, method, _printed(paper, method, printed.get(named)), own_row))
    commands = tuple(about.get("commands", ()))
    text = about.get("text", "")
    return Experiment(
        about["name"], about["title"], text, commands, paper, tuple(cells), about, reference, data
    )


def _before(run: FinishedRun) -> str:
    """Return of which version a run is not yet, or an empty text."""
    if is_current(run.name, run.result):
        return ""
    return f"before version {METHODS[base_name(run.name)].version}"


def _printed(section: PaperSection, method: str, own: Sequence[float] | None) -> Paper | None:
    """Return what the paper printed for a row: its own number, or that of its method."""
    paper = paper_numbers(section.model_dump(), method)
    if own is None:
        return paper
    accuracy = tuple(value / 100 for value in own)
    return replace(paper, accuracy=accuracy) if paper else Paper(section.source, accuracy, None, ())


def _short(folder: str) -> str:
    """Return the label of a sweep's cell: numbers with their key's last part, words alone."""
    pairs = [part.split("=", 1) for part in folder.split(",") if "=" in part]
    if not pairs:
        return folder
    numbers = [f"{key.split('.')[-1]}={value}" for key, value in pairs if not value.isidentifier()]
    return " ".join([*(value for _, value in pairs if value.isidentifier()), *numbers])


def _row(place: Path, paper: PaperSection, metric: str) -> Row | None:
    """Return the row of the runs in a folder, which differ in nothing but their seeds."""
    if not place.is_dir():
        return None
    goal = None if paper.target_accuracy is None or metric else paper.target_accuracy / 100
    runs = run_reader.find([place])
    new = [run for run in runs if not run.usable or is_current(run.name, run.result)]
    runs = new if any(run.usable for run in new) else runs  # those of two versions never mix
    study = comparison.study(runs, metric=metric or None, target_accuracy=goal)
    row, *others = study.rows
    broken = [run.problems for run in row.runs if run.problems or not run.finished]
    if others or broken or any("left out" in note for note in study.notes):
        raise ValueError(
            f"{place}: its runs are not one cell, or not whole: {' '.join(study.notes)}"
        )
    return row
