"""Readers of map-style data sets, which return a row's inputs and label by its number."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeGuard

import torch
from platformdirs import user_cache_path
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from fedgist.data.lazy_rows import CHECKED, sample_of
from fedgist.data.row_seeds import NO_SEED, own_draws
from fedgist.data.sources.file_identity import identity_of
from fedgist.errors import DataError, first_line

PAIR = 2  # inputs and label


class MapStyle(Protocol):
    """A map-style data set: a pair (inputs, label) for each row number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> object: ...


@dataclass(frozen=True, eq=False)
class MapRows:
    """A reader of a map-style data set. ``files`` are all of its files, if they are known."""

    rows: MapStyle
    name: str
    files: tuple[str, ...] | None = field(default=None, repr=False)
    draws: bool = True

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, row: int) -> object:
        """Return the inputs of a row."""
        return self.pair(row)[0]

    def pair(self, row: int) -> tuple[object, object]:
        """Return the inputs and the label of a row.

        Raises
        ------
        DataError
            If the row is not a pair.
        """
        pair = self.rows[row]
        if not isinstance(pair, tuple | list) or len(pair) != PAIR:
            raise DataError(f"{self.name}: row {row} of the data set is not a pair (x, y)")
        return pair[0], pair[1]

    def file_of(self, row: int) -> str:
        """Return the file that holds a row, if each row has a file."""
        files = self.files or ()
        return files[row] if len(files) == len(self.rows) else ""

    def identity(self) -> Sequence[str] | None:
        """Return the name, size and time of each file."""
        return None if self.files is None else tuple(identity_of(self.files))


def is_map_style(value: object) -> TypeGuard[MapStyle]:
    """Return whether an object is a map-style data set of torch."""
    has_rows = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return isinstance(value, torch.utils.data.Dataset) and has_rows


def files_of(rows: object) -> tuple[str, ...] | None:
    """Return the file of each row of a data set that lists them as ``samples``, or None."""
    if isinstance(rows, Subset):
        files = files_of(rows.dataset)
        return None if files is None else tuple(files[row] for row in rows.indices)
    if isinstance(rows, ConcatDataset):
        parts = [files_of(part) for part in rows.datasets]
        lists = [part for part in parts if part is not None]
        return sum(lists, ()) if len(lists) == len(parts) else None
    samples = getattr(rows, "samples", None)
    if not isinstance(samples, list) or not is_map_style(rows) or len(samples) != len(rows):
        return None
    first = [sample[0] if isinstance(sample, tuple) and sample else sample for sample in samples]
    return tuple(map(str, first)) if all(isinstance(f, str | os.PathLike) for f in first) else None


def labels_of(reader: MapRows) -> list[object]:
    """Return the labels of all rows: those that the data set lists, or those of each row.

    The labels of the rows are read once, and kept in the user's cache if all files are known.

    Raises
    ------
    DataError
        If a row cannot be read.
    """
    labels = _listed(reader.rows)
    if labels is not None and _agree(reader, labels):
        return labels
    kind, identity = type(reader.rows), reader.identity()
    if identity is None:  # a change of such rows would not be noticed
        return _read(reader)
    place = os.path.commonpath([Path(file).absolute() for file in reader.files or ("",)])
    key = (kind.__module__, kind.__qualname__, place, *identity)
    labels = cached_labels(key)
    if labels is None or not _agree(reader, labels):
        labels = _read(reader)
        cache_labels(key, labels)
    return labels


def _listed(rows: object) -> list[object] | None:
    """Return the labels that a data set lists as ``targets``, ``labels`` or ``tensors``."""
    if isinstance(rows, Subset):
        labels = _listed(rows.dataset)
        return None if labels is None else [labels[row] for row in rows.indices]
    if isinstance(rows, ConcatDataset):
        parts = [_listed(part) for part in rows.datasets]
        lists = [part for part in parts if part is not None]
        return [y for part in lists for y in part] if len(lists) == len(parts) else None
    tensors = getattr(rows, "tensors", ())
    pair = tensors if isinstance(tensors, tuple) and len(tensors) == PAIR else (None, None)
    for value in (pair[1], getattr(rows, "targets", None), getattr(rows, "labels", None)):
        listed = _as_list(value)
        if listed is not None and is_map_style(rows) and len(listed) == len(rows):
            return listed
    return None


def _as_list(value: object) -> list[object] | None:
    if isinstance(value, list | tuple):
        return [plain(label) for label in value]
    listed = plain(value)
    return listed if isinstance(listed, list) else None


def _agree(reader: MapRows, labels: Sequence[object]) -> bool:
    """Return whether listed labels are those of a few rows, which a transform may change."""
    if len(labels) != len(reader):
        return False
    rows = sample_of(len(reader), CHECKED).tolist()
    return str([labels[row] for row in rows]) == str(_read(reader, rows))  # NaN is not NaN


def _read(reader: MapRows, rows: Sequence[int] | None = None) -> list[object]:
    labels = []
    with own_draws(draws=reader.draws) as seed_row:
        for row in range(len(reader)) if rows is None else rows:
            seed_row(NO_SEED)
            try:
                labels.append(plain(reader.pair(row)[1]))
            except DataError:
                raise
            except Exception as error:  # a user's code may fail in any way
                problem = first_line(error)
                raise DataError(f"{reader.name}: row {row} cannot be read: {problem}") from error
    return labels


def plain(label: object) -> object:
    """Return a label or labels as Python numbers, texts or lists."""
    if isinstance(label, Tensor):
        return label.tolist()
    as_list = getattr(label, "tolist", None)
    return as_list() if callable(as_list) else label


def cached_labels(identity: Sequence[str]) -> list[object] | None:
    """Return the labels that were read once from files of this identity, or None."""
    try:
        labels = json.loads(_path(identity).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return labels if isinstance(labels, list) else None


def cache_labels(identity: Sequence[str], labels: Sequence[object]) -> None:
    """Keep labels in the user's cache for files of this identity, if it can be written."""
    with contextlib.suppress(OSError, TypeError):
        path = _path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(list(labels)), encoding="utf-8")
        part.replace(path)


def _path(identity: Sequence[str]) -> Path:
    name = hashlib.sha256("\n".join(identity).encode()).hexdigest()
    return user_cache_path("fedgist") / "labels" / f"{name[:32]}.json"
