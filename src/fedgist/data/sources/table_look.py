"""A first look at a table: which column is what, what is missing, what should not be an input.

Nothing is decided for good: each finding has a reason, and
:mod:`fedgist.recipe.first_recipe` writes both into a recipe.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from sklearn.model_selection import cross_val_score
from sklearn.tree import DecisionTreeClassifier

from fedgist.data.sources.column_kinds import MOST_CATEGORIES, Numbers, is_number, kind_of
from fedgist.data.sources.locations import existing
from fedgist.data.sources.splits import Values
from fedgist.data.sources.table_file import (
    TableFrame,
    expect,
    is_missing,
    load_table,
    numbers_and_gaps,
    reals,
    texts,
)
from fedgist.data.sources.tabular import labels_in
from fedgist.data.table_columns import TableForm
from fedgist.errors import DataError, listed

LABELS = ("label", "target", "class", "outcome", "diagnosis", "disease", "result", "y")
CLIENTS = ("client", "site", "hospital", "clinic", "center", "centre", "institution", "institute")
GROUPS = ("patient", "patient_id", "subject", "subject_id", "person", "person_id")
_ID = re.compile(r"(^|[\W_])(id|nr|no|number|index|key)$", re.IGNORECASE)
MOST_CLIENTS = 200
MOST_SAMPLED = 5000  # rows that a column is tried on
GIVEN_AWAY = 0.95  # share of the errors of guessing that one column alone saves
MOST_SIGNS = 3  # different texts of a column of numbers that may be signs of a missing one
RARE = 0.2  # share of the rarest class below which accuracy is not the first metric

Use = Literal["number", "categories", "ignore"]


@dataclass(frozen=True)
class ColumnLook:
    """What a column is used for, why, and how many cells are missing.

    ``mean`` and ``std`` are those of numbers; ``categories`` are sorted.
    """

    name: str
    use: Use
    reason: str = ""
    missing: int = 0
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableLook:
    """What was found in a table.

    ``guessed`` are the roles that were found by a column's name. ``signs`` are texts that are taken
    as signs of a missing number, each with a column that has it.
    """

    path: Path
    rows: int
    label: str
    client: str | None
    group: str | None
    guessed: tuple[str, ...]
    columns: tuple[ColumnLook, ...]
    classes: tuple[tuple[str, int], ...]  # empty if the label is a number to predict
    clients: tuple[tuple[str, int], ...]
    missing_labels: int = 0
    missing_clients: int = 0
    sep: str | None = None
    signs: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[ColumnLook, ...]:
        """The columns that are inputs."""
        return tuple(column for column in self.columns if column.use != "ignore")

    @property
    def ignored(self) -> tuple[ColumnLook, ...]:
        """The columns that are not."""
        return tuple(column for column in self.columns if column.use == "ignore")

    @property
    def rarest(self) -> float:
        """The share of the rarest class, 1 without classes."""
        counts = [count for _, count in self.classes]
        return min(counts) / sum(counts) if counts else 1.0


def look_at(
    path: Path, label: str | None = None, client: str | None = None, sep: str | None = None
) -> TableLook:
    """Return what is in a table; roles that are not stated are found by the names of columns.

    Raises
    ------
    DataError
        If the file is no table, a stated column is missing, or no column looks like the label.
    """
    table = load_table(existing(path), TableForm.of(sep, ()))
    names = [str(name) for name in table.frame.columns]
    expect(table, [name for name in (label, client) if name is not None])
    guessed = []
    if label is None:
        label = _by_name(names, LABELS)
        guessed.append(f"label = {label!r}")
    if label is None:
        raise DataError(
            f"{table.name}: which column is predicted? Say --label, one of: {listed(names)}"
        )
    if client is None and (client := _client_of(table, [n for n in names if n != label])):
        guessed.append(f"client = {client!r}")
    aside = {label, client}
    group = _by_name([name for name in names if name not in aside], GROUPS)
    group = group if group and _repeats(texts(table, group)) else None
    numbered_anew = group if group and client and _is_of_several(table, group, client) else None
    group = None if numbered_anew else group
    if group is not None:
        guessed.append(f"group = {group!r}")
    absent = is_missing(table, label)
    if absent.all():
        raise DataError(
            f"{table.name}: no row has a label: the column {label!r} is empty; --label names "
            "another one"
        )
    numeric = _is_measured(table.take(~absent), label)
    labels = texts(table, label)
    others = [name for name in names if name not in {*aside, group}]
    if signs := _odd_cells(table, others, {*labels}):
        table = load_table(existing(path), TableForm.of(sep, list(signs)))
    if not numeric:  # named as the data source names them: 1.0 is 1
        numbered = is_number(table, label)
        labels[~absent] = labels_in(table.take(~absent), label, numbered=numbered)
    reason = f"a value of several {client!r} may be several people; join both for data.group"
    columns = tuple(
        ColumnLook(name, "ignore", reason)
        if name == numbered_anew
        else _look_at_column(table, name, labels, ~absent, numeric=numeric)
        for name in others
    )
    owners = None if client is None else texts(table, client)
    return TableLook(
        path,
        len(table.frame),
        label,
        client,
        group,
        tuple(guessed),
        columns,
        () if numeric else tuple(sorted(Counter(labels[~absent]).items())),
        () if owners is None else tuple(sorted(Counter(filter(str.strip, owners)).items())),
        missing_labels=int(absent.sum()),
        missing_clients=0 if owners is None else sum(not owner.strip() for owner in owners),
        sep=sep,
        signs=signs,
    )


def _is_measured(labelled: TableFrame, label: str) -> bool:
    """Return whether the labels are numbers to predict, and no classes."""
    if not is_number(labelled, label):
        return False
    numbers = np.unique(reals(labelled, label))
    return len(numbers) > MOST_CATEGORIES or bool((numbers != np.round(numbers)).any())


def _odd_cells(table: TableFrame, names: Sequence[str], labels: Collection[str]) -> dict[str, str]:
    """Return the few texts that stand among numbers, each with the first column that has it.

    A text that is one of the ``labels`` is none of these: signs hold for labels, too.
    """
    found: dict[str, str] = {}
    of_labels = {label.strip().lower() for label in labels}
    for name in names:
        numbers, gaps = numbers_and_gaps(table, name)
        odd = ~gaps & np.isnan(numbers)
        cells = {cell.strip() for cell in texts(table, name)[odd]}
        cells = {cell for cell in cells if cell.lower() not in of_labels}
        if 0 < len(cells) <= MOST_SIGNS and 2 * odd.sum() < (~gaps).sum():
            found |= {cell: name for cell in sorted(cells) if cell not in found}
    return found


def _by_name(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Return the column called like one of the wanted names, the most wanted first."""
    for word in wanted:
        for name in names:
            if name.strip().lower() == word:
                return name
    return None


def _client_of(table: TableFrame, names: Sequence[str]) -> str | None:
    """Return the column called like clients, if some of its values have several rows."""
    name = _by_name(names, CLIENTS)
    if name is None:
        return None
    counts = Counter(texts(table, name))
    return name if 1 < len(counts) <= MOST_CLIENTS and max(counts.values()) > 1 else None


def _is_of_several(table: TableFrame, group: str, client: str) -> bool:
    """Return whether a group has rows of several clients, as patients that each numbers anew."""
    pairs = {*zip(texts(table, group), texts(table, client), strict=True)}
    return len(pairs) > len({cell for cell, _ in pairs})


def _repeats(cells: Values) -> bool:
    return len({*cells}) < len(cells)


def _look_at_column(
    table: TableFrame, name: str, labels: Values, labelled: Values, *, numeric: bool
) -> ColumnLook:
    cells = texts(table, name)
    missing = int(is_missing(table, name).sum())
    kind, problem = None, ""
    try:
        kind = kind_of(table, name)
    except DataError as error:
        problem = str(error).removeprefix(f"{table.name}: ").removeprefix(f"the column {name!r} ")
        problem = problem.split(";", 1)[0].split(": replace", 1)[0]
    is_like_an_id = _ID.search(name) or not is_number(table, name)
    if not _repeats(cells) and is_like_an_id and (not problem or "different texts" in problem):
        return ColumnLook(name, "ignore", "a different value in each row, like an identifier")
    if kind is None:
        return ColumnLook(name, "ignore", problem)
    if len({*cells}) == 1:
        return ColumnLook(name, "ignore", f"the same value in every row: {cells[0]!r:.40}")
    use: Use = "number" if isinstance(kind, Numbers) else "categories"
    if not numeric and (saved := _saves(table, name, use, labels, labelled)) >= GIVEN_AWAY:
        reason = (
            f"it gives the label away alone (it saves {100 * saved:.0f} % of the errors of "
            "guessing): if it is known before the label is, delete it here"
        )
        return ColumnLook(name, "ignore", reason, missing)
    if not isinstance(kind, Numbers):
        return ColumnLook(name, use, f"{len(kind)} categories", categories=kind)
    numbers = numbers_and_gaps(table, name)[0]
    mean, std = float(np.nanmean(numbers)), float(np.nanstd(numbers))
    return ColumnLook(name, use, "", missing, mean, std)


def _saves(table: TableFrame, name: str, use: Use, labels: Values, labelled: Values) -> float:
    """Return the share of the errors of guessing the commonest class that a column alone saves.

    It is that of a small tree on rows that it was not grown on.
    """
    _, y = np.unique(labels[labelled], return_inverse=True)
    if use == "number":
        x = np.nan_to_num(numbers_and_gaps(table, name)[0][labelled], nan=-1e30)
    else:
        x = np.unique(texts(table, name)[labelled], return_inverse=True)[1].astype(float)
    places = np.random.default_rng(0).permutation(len(y))[:MOST_SAMPLED]
    x, y = x[places, None], y[places]
    counts = np.bincount(y)
    folds = int(min(5, counts[counts > 0].min()))
    common = counts.max() / len(y)
    if folds <= 1 or common == 1:
        return 0.0
    leaves = max(2 * len(counts), len({*x[:, 0]}) if use == "categories" else 0)
    tree = DecisionTreeClassifier(max_leaf_nodes=leaves, random_state=0)
    right = float(cross_val_score(tree, x.clip(-1e30, 1e30), y, cv=folds).mean())
    return float((right - common) / (1 - common))
