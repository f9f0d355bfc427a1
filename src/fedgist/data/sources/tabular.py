"""A data set of the user's own, as a table: .csv, .tsv or .parquet."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.data.dataset import Dataset
from fedgist.data.sources.assembly import Examples, Values, dataset, held_out, in_order, names
from fedgist.data.sources.locations import existing
from fedgist.data.sources.table_file import (
    Table,
    expect,
    filled,
    is_number,
    load_table,
    reals,
    texts,
)
from fedgist.errors import DataError

_MOST = 1000  # categories of a column; more of them are identifiers or free text


@dataclass(frozen=True)
class Column:
    """A feature column: numbers, or one 0/1 column for each category."""

    name: str
    categories: tuple[str, ...] | None = None


def table(
    *,
    path: str | Path,
    label: str,
    client: str | None = None,
    test: str | Path | None = None,
    test_fraction: float = 0.2,
    ignore: list[str] | None = None,
) -> Dataset:
    """Read a table: labels, perhaps clients, and all other columns are numbers or categories."""
    whole, mask = _split(path, label, client, test, test_fraction, ignore)
    train, rest = (
        whole.take(~mask),
        whole.take(mask) if test is None else load_table(existing(test)),
    )
    learned = _learned(train, {label, client, *(ignore or [])})
    expect(rest, [label])
    numbered = is_number(whole, label)
    first, second = (
        Examples(
            encode(part, learned), _labels(part, label, numbered=numbered), _clients(part, client)
        )
        for part in (train, rest)
    )
    return _keep_categories(dataset(train.name, first, second), learned)


def encode_like(file: Path, options: Mapping[str, Any]) -> Tensor:
    """Return a table, labels not needed, encoded as the training rows with these options."""
    given = inspect.signature(table).bind(**options)
    given.apply_defaults()
    whole, mask = _split(**given.arguments)
    aside = {
        given.arguments["label"],
        given.arguments["client"],
        *(given.arguments["ignore"] or []),
    }
    return encode(load_table(file), _learned(whole.take(~mask), aside))


def encode(found: Table, columns: list[Column]) -> Tensor:
    """Return the columns as numbers (rows, numbers and categories)."""
    expect(found, [column.name for column in columns])
    return torch.cat([_encode(found, column) for column in columns], dim=1)


def _split(
    path: str | Path,
    label: str,
    client: str | None,
    test: str | Path | None,
    test_fraction: float,
    ignore: list[str] | None,
) -> tuple[Table, Values]:
    """Return the table, and which of its rows are test rows."""
    whole = load_table(existing(path))
    expect(whole, [label, *([] if client is None else [client]), *(ignore or [])])
    if test is not None:
        return whole, np.zeros(len(whole.frame), dtype=bool)
    return whole, held_out(_labels(whole, label, numbered=is_number(whole, label)), test_fraction)


def _learned(train: Table, aside: set[str | None]) -> list[Column]:
    columns = [_learn(train, name) for name in train.frame.columns if name not in aside]
    if not columns:
        msg = f"{train.name} has no column beside the label"
        raise DataError(msg)
    return columns


def _labels(found: Table, name: str, *, numbered: bool) -> Values:
    cells = filled(found, name, "label", numbered=numbered)
    return names(reals(found, name), f"{found.name}: the labels {name!r}") if numbered else cells


def _clients(found: Table, name: str | None) -> Values | None:
    return (
        filled(found, name, "client") if name is not None and name in found.frame.columns else None
    )


def _learn(train: Table, name: str) -> Column:
    if is_number(train, name):
        return Column(name)
    categories = in_order(texts(train, name))
    if len(categories) > _MOST:
        msg = (
            f"{train.name}: the column {name!r} holds {len(categories)} different texts, more "
            f"than {_MOST}; "
        )
        msg += "name it in ignore, or replace it with numbers"
        raise DataError(msg)
    return Column(name, categories)


def _encode(found: Table, column: Column) -> Tensor:
    """Return a column as numbers (rows, 1) or 0/1 (rows, categories), all 0 for a new category."""
    if column.categories is None:
        numbers = reals(found, column.name)
        if not np.isfinite(numbers).all():
            at = int(np.argmin(np.isfinite(numbers)))
            row, cell = found.frame.index[at] + 1, str(found.frame[column.name].iloc[at])
            msg = (
                f"{found.name}: the column {column.name!r} holds no number in row {row} below the "
                f"header: {cell!r}"
            )
            raise DataError(msg)
        return torch.from_numpy(numbers).float()[:, None]
    place = {category: number for number, category in enumerate(column.categories)}
    code = torch.tensor(
        [place.get(cell, len(place)) for cell in texts(found, column.name)], dtype=torch.int64
    )
    return torch.nn.functional.one_hot(code, len(place) + 1)[:, :-1].float()


def _keep_categories(found: Dataset, learned: list[Column]) -> Dataset:
    """Standardise numbers only: a 0/1 column stays as it is."""
    number = [column.categories is None for column in learned for _ in column.categories or ("",)]
    mean = tuple(m if plain else 0.0 for m, plain in zip(found.mean, number, strict=True))
    std = tuple(s if plain else 1.0 for s, plain in zip(found.std, number, strict=True))
    return replace(found, mean=mean, std=std)
