"""Data source for numeric .parquet files, which may be larger than memory, by row groups."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from fedgist.core.objectives.target import NUMERIC
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import LazyRows
from fedgist.data.sources.array_file import features
from fedgist.data.sources.file_identity import identity_of
from fedgist.data.sources.file_sizes import fits, regular
from fedgist.data.sources.locations import existing
from fedgist.data.sources.optional_packages import need
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.splits import (
    RowOptions,
    Split,
    Values,
    as_clients,
    as_groups,
    as_mask,
    dataset,
    division_of,
    refuse_group,
)
from fedgist.data.sources.stored_labels import label_columns, stored_labels
from fedgist.data.table_columns import Column
from fedgist.errors import DataError, first_line, listed

_NEED = "reading parquet files needs pyarrow: pip install 'fedgist[table]'"
_KEPT = 64 << 20  # bytes of row groups that a process keeps


def parquet(
    *,
    path: str | Path,
    label: str | list[str],
    client: str | None = None,
    group: str | None = None,
    test: str | None = None,
    ignore: list[str] | None = None,
    read: Read = "auto",
    **options: Unpack[RowOptions],
) -> Dataset:
    """Read a .parquet file of numeric columns, whole or a row group at a time.

    Parameters
    ----------
    path
        The file.
    label
        The column of labels. For the objectives ``regression`` and ``multilabel`` it may be a list
        of columns.
    client
        The column with the name of the client that owns a row.
    group
        The column of what stays together when test or validation rows are chosen, such as
        ``"patient"``: all its rows are among them, or none. It is no input.
    test
        A column that is 1 (true) for test rows and 0 (false) for the others.
    ignore
        Columns to leave out.

    Notes
    -----
    All other columns are inputs, and must be numbers; the source ``table`` encodes categories.
    With ``data.read = "lazy"``, or if the rows would fill more than half of the memory, a row is
    read with its row group. A process keeps about 64 MB of row groups, so write small ones (a few
    MB) if rows of a client are spread over the file. Missing numbers of such rows are refused.

    Pooled normalization: mean and deviation of each column over all training rows, or over a sample
    of at most 2,048 rows if they are read lazily.

    Examples
    --------
    A recipe's section::

        [data]
        name = "parquet"
        path = "signals.parquet"
        label = "state"
        read = "lazy"
    """
    file, target = existing(path), options.get("target", "class")
    labels = label_columns(label, target)
    aside = [*labels, *(name for name in (client, group, test) if name)]
    reader = GroupRows.of(file, [*aside, *(ignore or [])])
    lazy = LazyRows.of(reader)
    y = _columns(file, labels)
    stored = stored_labels(y[:, 0] if len(labels) == 1 else y, f"{file.name}: {label}", target)
    owner = None
    if client is not None:
        owner = as_clients(_columns(file, [client])[:, 0], f"{file.name}: {client}")
    groups = None
    if group is not None:
        groups = as_groups(_columns(file, [group])[:, 0], f"{file.name}: {group}")
    once = read == "once" or (read == "auto" and fits(len(lazy) * lazy.source.row_bytes))
    inputs = _columns(file, [*reader.columns]).astype(np.float64) if once else None
    rows = Split(lazy if inputs is None else features(inputs, file.name), stored, owner, groups)
    parts: tuple[Split, ...] = (rows,)
    if test is not None:
        division_of(options).refuse(f"test = {test!r} names the test rows")
        refuse_group(group, f"test = {test!r} names the test rows")
        mask = as_mask(_columns(file, [test])[:, 0], f"{file.name}: {test}")
        parts = rows.take(~mask), rows.take(mask)
    if target in NUMERIC:
        options["classes"] = labels
    data = dataset(file.name, *parts, **options)
    return replace(data, columns=tuple(Column(name) for name in reader.columns))


@dataclass(frozen=True, eq=False)
class GroupRows:
    """A reader of rows of numbers by row groups.

    ``begins`` are the first row of each group, and the number of all rows. ``kept`` holds the row
    groups that were read last, by process and number.
    """

    file: Path
    columns: tuple[str, ...]
    begins: tuple[int, ...] = field(repr=False)
    kept: dict[tuple[int, int], Values] = field(default_factory=dict, repr=False)
    draws: bool = False

    @staticmethod
    def of(file: Path, aside: Sequence[str]) -> GroupRows:
        """Return a reader of all columns but those ``aside``.

        Raises
        ------
        DataError
            If the file cannot be read, lacks a column, or a column does not hold numbers.
        """
        package = need("pyarrow.parquet", _NEED)
        try:
            with package.ParquetFile(regular(file)) as opened:
                schema, facts = opened.schema_arrow, opened.metadata
                counts = [facts.row_group(i).num_rows for i in range(facts.num_row_groups)]
        except (OSError, ValueError) as error:
            raise DataError(f"{file.name} cannot be read: {first_line(error)}") from error
        if lost := [name for name in aside if name not in schema.names]:
            raise DataError(f"{file.name} has no column {lost[0]!r}; it has {listed(schema.names)}")
        columns = [name for name in schema.names if name not in aside]
        types = need("pyarrow.types", _NEED)
        for name in columns:
            kind = schema.field(name).type
            numeric = types.is_integer, types.is_floating, types.is_decimal, types.is_boolean
            if not any(is_kind(kind) for is_kind in numeric):
                nested = types.is_nested(kind) or types.is_binary(kind)
                cure = "" if nested else ", or use data.name = 'table'"
                raise DataError(
                    f"{file.name}: the column {name!r} holds {kind}, not numbers; name it in "
                    f"data.ignore{cure}"
                )
        return GroupRows(file, tuple(columns), (0, *itertools.accumulate(counts)))

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.file.name

    def __len__(self) -> int:
        return self.begins[-1]

    def __call__(self, row: int) -> object:
        """Return the numbers of a row, float64 (columns,)."""
        group = int(np.searchsorted(self.begins, row, side="right")) - 1
        key = (os.getpid(), group)
        values = self.kept.pop(key, None)
        if values is None:
            values = self._group(group)
            most = max(1, _KEPT // max(1, values.nbytes))
            for old in list(self.kept)[: max(0, len(self.kept) + 1 - most)]:
                self.kept.pop(old)
        self.kept[key] = values  # the newest comes last
        return values[row - self.begins[group]]

    def file_of(self, row: int) -> str:
        """Return the file."""
        return self.file.name if row < len(self) else ""

    def identity(self) -> Sequence[str]:
        """Return the name, size and time of the file."""
        return tuple(identity_of([str(self.file)]))

    def _group(self, group: int) -> Values:
        # without threads: they do not survive a fork
        with need("pyarrow.parquet", _NEED).ParquetFile(self.file) as opened:
            table = opened.read_row_group(group, columns=list(self.columns), use_threads=False)
        parts = [
            np.asarray(table.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)
            for name in self.columns
        ]
        return np.stack(parts, axis=1)


def _columns(file: Path, names: list[str]) -> Values:
    """Return some columns of a file: (rows, columns)."""
    with need("pyarrow.parquet", _NEED).ParquetFile(file) as opened:
        table = opened.read(columns=names, use_threads=False)
    parts = [np.asarray(table.column(name).to_numpy(zero_copy_only=False)) for name in names]
    return np.stack(parts, axis=1)
