"""What the pages of results are made from: experiments, their cells, and the runs of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.cli.recipe_files import find_recipe, find_table
from fedgist.recipe.reading import read
from fedgist.recipe.schema import PaperSection
from fedgist.report import comparison
from fedgist.report.run_groups import BEFORE
from fedgist.report.study_rows import Row
from fedgist.runs.columns import measured
from fedgist.runs.finished import run_reader
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.studies.paper_table import read_table


@dataclass(frozen=True)
class Cell:
    """A row of an experiment: its label, its method, and its runs, if there are any."""

    label: str
    method: str
    row: Row | None = None

    def curves(self, column: str = "") -> dict[int, dict[int, float]]:
        """Return each seed's values of a column by round; fractions in percent.

        By default the column is a run's main one.
        """
        runs = self.row.runs if self.row else ()
        found = {}
        for run in runs:
            name = column or run.main
            scale = 100 if measured(name, run.metrics).unit == "fraction" else 1
            found[run.seed] = {n: scale * v for n, v in zip(*run.column(name), strict=True)}
        return {seed: curve for seed, curve in found.items() if curve}

    def values(self, column: str = "") -> dict[int, float]:
        """Return each seed's last value of a column."""
        return {seed: curve[max(curve)] for seed, curve in self.curves(column).items()}

    def at(self, number: int, column: str = "") -> dict[int, float]:
        """Return each seed's value of a column in a round."""
        curves = self.curves(column)
        return {seed: curve[number] for seed, curve in curves.items() if number in curve}

    def best(self, column: str = "") -> dict[int, float]:
        """Return each seed's best value of a column."""
        choose = min if measured(column).better == "lower" else max
        return {seed: choose(curve.values()) for seed, curve in self.curves(column).items()}


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
    cells: tuple[Cell, ...]
    options: Mapping[str, Any]
    reference: str = ""
    data: Path = Path()

    def beside(self, label: str, folder: str) -> Cell:
        """Return the cell of another folder: runs of the same row in another experiment."""
        return _cell(label, self.data / folder, self.paper)

    @property
    def metric(self) -> str:
        """The column that is shown; empty: each run's main one."""
        return str(self.options.get("metric", ""))

    @property
    def runs(self) -> list[FinishedRun]:
        """All of its runs."""
        return [run for cell in self.cells if cell.row for run in cell.row.runs]

    def papers(self, cell: Cell) -> Sequence[float] | None:
        """Return what the paper printed for a row: its own number, or that of its method."""
        own: Mapping[str, Sequence[float]] = self.options.get("papers", {})
        return own.get(cell.label) or self.paper.accuracy.get(cell.method)


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
        table = read_table(find_table(about["table"]))
        folder, column = f"{about['table']}/{about['column']}", table.columns[about["column"]]
        recipe, own, rows = column.recipe, column.own, rows or table.table.methods
        reference = reference or table.table.reference or ""
    if rows is None:
        here = data / folder
        rows = sorted(p.name for p in here.iterdir() if p.is_dir()) if here.is_dir() else []
    paper = read(find_recipe(recipe), own=own).paper
    if not about.get("paper", True):
        paper = PaperSection()
    also = about.get("also", {})
    places = {
        _short(row): f"{folder}/{row}" for row in rows if f"{folder}/{row}" not in also.values()
    }
    return Experiment(
        about["name"],
        about["title"],
        about.get("text", ""),
        tuple(about.get("commands", ())),
        paper,
        tuple(_cell(label, data / place, paper) for label, place in (places | also).items()),
        about,
        reference,
        data,
    )


def _short(folder: str) -> str:
    """Return the label of a sweep's cell: numbers with their key's last part, words alone."""
    pairs = [part.split("=", 1) for part in folder.split(",") if "=" in part]
    if not pairs:
        return folder
    numbers = [f"{key.split('.')[-1]}={value}" for key, value in pairs if not value.isidentifier()]
    return " ".join([*(value for _, value in pairs if value.isidentifier()), *numbers])


def _cell(label: str, place: Path, paper: PaperSection) -> Cell:
    """Return the cell whose runs lie in a folder, and differ in nothing but their seeds."""
    if not place.is_dir():
        return Cell(label, label)
    goal = paper.target_accuracy
    runs = run_reader.find([place])
    runs = [run for run in runs if not run.before] or runs  # corrected ones are not mixed with old
    study = comparison.study(runs, target_accuracy=None if goal is None else goal / 100)
    broken = [run.problems for run in study.rows[0].runs if run.problems or not run.finished]
    if len(study.rows) > 1 or broken or any("left out" in note for note in study.notes):
        raise ValueError(
            f"{place}: its runs are not one cell, or not whole: {' '.join(study.notes)}"
        )
    label = ", ".join([label, *filter(None, [runs[0].before])])
    return Cell(label, study.rows[0].method, study.rows[0])


def over(found: Experiment) -> tuple[list[float], dict[str, dict[float, Cell]]]:
    """Return the values of the setting that is varied, and by line the cell of each value.

    A line is named by its method, if there are several, and by the settings in which lines of that
    method differ; a cell without the setting is a line of its own, under infinity.
    """
    key = found.options["over"]
    settings = [dict(cell.row.settings) for cell in found.cells if cell.row]
    places = [float(some.pop(key, None) or math.inf) for some in settings]
    varied = [some for some, place in zip(settings, places, strict=True) if math.isfinite(place)]
    lines: dict[str, dict[float, Cell]] = {}
    cells = [cell for cell in found.cells if cell.row]
    for cell, some, place in zip(cells, settings, places, strict=True):
        label = cell.label if math.isinf(place) else _line(some, varied)
        lines.setdefault(label, {})[place] = cell
    return sorted({place for place in places if not math.isinf(place)}), lines


def by_method(found: Experiment) -> tuple[list[str], dict[tuple[str, ...], dict[str, Cell]]]:
    """Return the settings in which cells differ apart from their method, and cells by method.

    Cells with the same values of these settings, which are their key, stand together.
    """
    cells = [cell for cell in found.cells if cell.row]
    every = [dict(cell.row.settings) for cell in cells if cell.row]
    apart = ("method.", BEFORE)
    keys = sorted({key for some in every for key in some if not key.startswith(apart)})
    varied = [key for key in keys if len({str(some.get(key)) for some in every}) > 1]
    groups: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell, some in zip(cells, every, strict=True):
        groups.setdefault(tuple(str(some[key]) for key in varied), {})[cell.method] = cell
    return varied, dict(sorted(groups.items(), key=lambda item: [_order(v) for v in item[0]]))


def _order(value: str) -> tuple[float, str]:
    """Return by what values of settings are sorted: numbers by size, then texts."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


def _line(settings: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    name = settings["method.name"]
    alike = [other for other in others if other["method.name"] == name]
    differing = sorted(k for k, v in settings.items() if any(other.get(k) != v for other in alike))
    several = len(alike) < len(others) or not differing
    return " ".join([*([name] if several else []), *(str(settings[key]) for key in differing)])
