"""Compare a reproduced table with the paper's numbers, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedgist.recipe.reading import Recipe
from fedgist.report.formatting import bits_text, printed
from fedgist.report.sheet import Sheet
from fedgist.report.study_rows import Row, Study


def side_by_side(
    studies: Mapping[str, Study], recipes: Mapping[str, Recipe], methods: Sequence[str], source: str
) -> list[Sheet]:
    """Return tables of accuracy and communication, with one row per method of the paper.

    Without a target accuracy there is no table of communication. Methods that were not run show
    only the paper's numbers.
    """
    columns = ("method", *(f"{name} {whose}" for name in recipes for whose in ("ours", "paper")))
    accuracy, communication = [], []
    for method in methods:
        accuracy_cells, communication_cells = [method], [method]
        for name, recipe in recipes.items():
            row = _row(studies.get(name), method)
            accuracy_cells += _accuracy(row, recipe, method)
            communication_cells += _communication(row, recipe, method)
        accuracy.append(tuple(accuracy_cells))
        communication.append(tuple(communication_cells))
    sheets = [
        Sheet(
            "Accuracy in the last round, mean over clients (%)",
            columns,
            tuple(accuracy),
            f"mean ± standard error over seeds (ours: {_seeds(studies)}). paper: {source}. "
            "-: not run, or not in this version",
        ),
        Sheet(
            "Communication, both ways, until the target accuracy",
            columns,
            tuple(communication),
            f"bits; targets: {_targets(recipes)}. †: not reached by every seed: until the round of "
            "its highest accuracy",
        ),
    ]
    return sheets if _targets(recipes) else sheets[:1]


def _row(study: Study | None, method: str) -> Row | None:
    return next((row for row in study.rows if row.method == method), None) if study else None


def _accuracy(row: Row | None, recipe: Recipe, method: str) -> list[str]:
    final = row.final if row else None
    ours = f"{100 * final.mean:.2f}" if final else "-"
    if final and final.error is not None:
        ours += f" ± {100 * final.error:.2f}"
    theirs = recipe.paper.accuracy.get(method)
    return [ours, printed(theirs) if theirs else "-"]


def _communication(row: Row | None, recipe: Recipe, method: str) -> list[str]:
    target = row.target if row else None
    mark = "" if target is None or target.by_all else " †"
    printed = recipe.paper.communication.get(method)
    return [
        bits_text(8 * target.both.mean) + mark if target else "-",
        bits_text(printed) if printed else "-",
    ]


def _seeds(studies: Mapping[str, Study]) -> str:
    counts = {len(row.runs) for study in studies.values() for row in study.rows}
    return "-".join(str(n) for n in sorted({min(counts), max(counts)})) if counts else "0"


def _targets(recipes: Mapping[str, Recipe]) -> str:
    percents = {name: recipe.paper.target_accuracy for name, recipe in recipes.items()}
    return ", ".join(f"{name} {percent:g} %" for name, percent in percents.items() if percent)
