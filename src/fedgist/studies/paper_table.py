"""Tables of papers: their recipes, methods and seeds, at two scales.

A table is a TOML file among the recipes with a section ``[table]``. The recipes hold the paper's
numbers.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from fedgist.core.bounds import PositiveInt
from fedgist.errors import RecipeError, first_line
from fedgist.methods import METHODS, base_name
from fedgist.options import checked
from fedgist.recipe.reading import Recipe, check_parts, read
from fedgist.studies.job import Job, jobs_of_seeds

Scale = Literal["small", "paper"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Seeds(_Part):
    """The number of seeds at each scale."""

    small: PositiveInt = 3
    paper: PositiveInt = 10


class PaperHeader(_Part):
    """Section ``[table]``: the paper, the compared methods, and the number of seeds."""

    source: str
    methods: tuple[str, ...]
    reference: str | None = None
    seeds: Seeds = Seeds()


class PaperColumn(_Part):
    """One experiment of the table: its recipe, and the settings that override the recipe.

    ``set`` holds the paper's settings, ``paper`` the accuracies that it reports, and ``small`` the
    settings that differ at the small scale. A column with ``only`` runs at that scale by default;
    at the other scale it runs only if its name is given.
    """

    recipe: str
    set: dict[str, object] = {}
    paper: dict[str, tuple[float, float] | tuple[float]] = {}
    small: dict[str, object] = {}
    only: Scale | None = None

    @property
    def own(self) -> dict[str, object]:
        """The values that override the recipe's, by dotted key."""
        return self.set | ({"paper.accuracy": self.paper} if self.paper else {})


class PaperTable(_Part):
    """A paper's table: its header and its experiments by name."""

    table: PaperHeader
    columns: dict[str, PaperColumn]


def is_table(path: Path) -> bool:
    """Return whether a file among the recipes is a table."""
    return "\n[table]\n" in "\n" + path.read_text(encoding="utf-8-sig", errors="replace")


def read_paper_table(path: Path) -> PaperTable:
    """Return the table in a file."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: {first_line(error)}") from error
    try:
        table: PaperTable = checked(PaperTable, raw)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    return table


def cells(
    table: PaperTable,
    scale: Scale,
    find: Callable[[str], Path],
    out: Path,
    *,
    seeds: int | None = None,
    columns: Sequence[str] = (),
    methods: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> tuple[list[Job], dict[str, Recipe]]:
    """Return one job per cell and seed, and each column's recipe with the paper's settings.

    Methods of the paper that fedgist does not have are left out. ``columns`` and ``methods`` name
    the ones to run; the default is all.
    """
    available = [m for m in table.table.methods if base_name(m) in METHODS or ":" in m]
    _check_names(columns, methods, table, available)
    count = seeds or getattr(table.table.seeds, scale)
    jobs, recipes = [], {}
    for name, column in table.columns.items():
        wanted = name in columns if columns else column.only in {None, scale}
        if not wanted:
            continue
        path, own = find(column.recipe), column.own
        recipes[name] = read(path, own=own)
        small = (
            [f"{key}={json.dumps(value)}" for key, value in column.small.items()]
            if scale == "small"
            else []
        )
        for method in [method for method in available if not methods or method in methods]:
            recipe = read(path, [*small, *settings, f"method.name={method}"], own)
            check_parts(recipe)  # a mistake in a cell is found before any run
            jobs += jobs_of_seeds(f"{name} {method}", recipe, count, out / name / method)
    return jobs, recipes


def _check_names(
    columns: Sequence[str], methods: Sequence[str], table: PaperTable, available: Sequence[str]
) -> None:
    for name in columns:
        if name not in table.columns:
            raise RecipeError(f"--column {name}: the table has {', '.join(table.columns)}")
    for name in methods:
        if name not in available:
            raise RecipeError(
                f"--method {name}: of the table's methods fedgist has {', '.join(available)}"
            )
