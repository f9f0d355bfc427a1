"""A data set of the user's own, as a table: .csv, .tsv or .parquet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.data.assemble import Examples, Values, dataset, held_out, in_order, names
from fedgist.data.base import DataError, Dataset
from fedgist.data.files import existing
from fedgist.data.table_file import Table, expect, filled, is_number, load_table, reals, texts

_MOST = 1000  # categories of a column; more of them are identifiers or free text


@dataclass(frozen=True)
class Column:
    """A feature column: numbers, or one 0/1 column for each category."""

    name: str
    categories: tuple[str, ...] | None = None


def table(
    *, path: str | Path, label: str, client: str | None = None, test: str | Path | None = None,
    test_fraction: float = 0.2, ignore: list[str] | None = None,
) -> Dataset:  # fmt: skip
    """Read a table: a column of labels, perhaps one of clients, and all others are numbers or categories."""
    train = load_table(existing(path))
    columns = list(train.frame.columns)
    expect(train, [label, *([] if client is None else [client]), *(ignore or [])])
    numbered = is_number(train, label)
    if test is None:
        mask = held_out(_labels(train, label, numbered=numbered), test_fraction)
        train, rest = train.take(~mask), train.take(mask)
    else:
        rest = load_table(existing(test))
    learned = [_learn(train, name) for name in columns if name not in {label, client, *(ignore or [])}]
    if not learned:
        msg = f"{train.name} has no column beside the label"
        raise DataError(msg)
    expect(rest, [label, *(column.name for column in learned)])
    first, second = (
        Examples(
            torch.cat([_encode(part, column) for column in learned], dim=1),
            _labels(part, label, numbered=numbered),
            _clients(part, client),
        )
        for part in (train, rest)
    )
    return _keep_categories(dataset(train.name, first, second), learned)


def _labels(found: Table, name: str, *, numbered: bool) -> Values:
    cells = filled(found, name, "label", numbered=numbered)
    return names(reals(found, name), f"{found.name}: the labels {name!r}") if numbered else cells


def _clients(found: Table, name: str | None) -> Values | None:
    return filled(found, name, "client") if name is not None and name in found.frame.columns else None


def _learn(train: Table, name: str) -> Column:
    if is_number(train, name):
        return Column(name)
    categories = in_order(texts(train, name))
    if len(categories) > _MOST:
        msg = f"{train.name}: the column {name!r} holds {len(categories)} different texts, more than {_MOST}; "
        msg += "name it in ignore, or replace it with numbers"
        raise DataError(msg)
    return Column(name, categories)


def _encode(found: Table, column: Column) -> Tensor:
    """Return a column as numbers (rows, 1) or as 0/1 (rows, categories), all 0 for a category that is new."""
    if column.categories is None:
        numbers = reals(found, column.name)
        if not np.isfinite(numbers).all():
            at = int(np.argmin(np.isfinite(numbers)))
            row, cell = found.frame.index[at] + 1, str(found.frame[column.name].iloc[at])
            msg = f"{found.name}: the column {column.name!r} holds no number in row {row} below the header: {cell!r}"
            raise DataError(msg)
        return torch.from_numpy(numbers).float()[:, None]
    place = {category: number for number, category in enumerate(column.categories)}
    code = torch.tensor([place.get(cell, len(place)) for cell in texts(found, column.name)], dtype=torch.int64)
    return torch.nn.functional.one_hot(code, len(place) + 1)[:, :-1].float()


def _keep_categories(found: Dataset, learned: list[Column]) -> Dataset:
    """Standardise numbers only: a 0/1 column stays as it is."""
    number = [column.categories is None for column in learned for _ in column.categories or ("",)]
    mean = tuple(m if plain else 0.0 for m, plain in zip(found.mean, number, strict=True))
    std = tuple(s if plain else 1.0 for s, plain in zip(found.std, number, strict=True))
    return replace(found, mean=mean, std=std)
