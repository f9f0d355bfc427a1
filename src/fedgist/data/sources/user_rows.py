"""A user's map-style data sets as one data set: read into memory, or when they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from fedgist.core.objectives.target import Target
from fedgist.data.dataset import Dataset, check
from fedgist.data.division import Division
from fedgist.data.held_out_rows import held_out
from fedgist.data.lazy_rows import Inputs, LazyRows, check_repeatable, held
from fedgist.data.sources.hub_columns import NONE_STATED, HubOptions
from fedgist.data.sources.hub_given import hub_dataset, splits_given
from fedgist.data.sources.in_memory import split_in_memory
from fedgist.data.sources.map_rows import MapRows, MapStyle, files_of, is_map_style, labels_of
from fedgist.data.sources.read_choice import Notes, choice
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.splits import Values
from fedgist.errors import DataError

Split = tuple[MapStyle, MapStyle | None]  # training rows, and test rows if there are any


def lazy(
    train: object,
    test: object = None,
    *,
    targets: object = None,
    targets_test: object = None,
    files: Sequence[str] | None = None,
    files_test: Sequence[str] | None = None,
    target: Target = "class",
    name: str = "your data",
    label: str | list[str] | None = None,
    image: str | None = None,
    features: list[str] | None = None,
    client: str | None = None,
    image_size: int | list[int] | None = None,
) -> Dataset:
    """Return map-style torch data sets, or Hugging Face splits, read when their rows are used.

    A torch data set's row is a pair (x, y). Only the rows of a batch are in memory. Random
    transforms are drawn anew at each read in training: the generators of torch, NumPy and Python
    are seeded for each row.

    Parameters
    ----------
    train, test
        The training rows and the test rows, which may be left out.
    targets, targets_test
        The labels of all rows (rows, ...). The default is the data set's own ``targets`` or
        ``labels``. If it has neither, every row is read once.
    files, files_test
        All files behind the rows. Their names, sizes and times are compared when a run is resumed.
        If there is a file for each row, errors name it.
    target
        The form of the labels: :class:`fedgist.Dataset` describes them.
    name
        Name of the data, which begins error messages.
    label, image, features, client, image_size
        The columns of Hugging Face splits, as in the source ``huggingface``. ``train`` may then
        also be a mapping of names to splits, or a list or a mapping with a client each.

    Raises
    ------
    DataError
        If a row cannot be read, two reads of a row with the same seed differ, or the labels do not
        fit.
    """
    options = HubOptions(label, image, features, client, image_size)
    given = splits_given(train if test is None else (train, test), options)
    if given is not None:
        for key, value in (("targets", targets), ("files", files)):
            if value is not None:
                raise DataError(f"{key}= is about torch data sets; Hugging Face splits have theirs")
        return check(replace(hub_dataset(given, options, "lazy", target)[0], name=name))
    _refuse(options, "", type(train).__name__)
    parts: list[object] = []
    sets = ((train, targets, files, ""), (test, targets_test, files_test, " (test)"))
    for rows, labels, paths, suffix in sets:
        if rows is None and suffix:
            continue
        if not is_map_style(rows):
            raise DataError(
                f"{name}{suffix} is a {type(rows).__name__}; a map-style torch data set is needed"
            )
        all_files = files_of(rows) if paths is None else tuple(map(str, paths))
        reader = MapRows(rows, f"{name}{suffix}", all_files)
        x = LazyRows.of(reader)
        check_repeatable(x)
        parts += [x, labels_of(reader) if labels is None else labels]
    return replace(split_in_memory(tuple(parts), None, target)[0], name=name)


def user_rows(
    data: object,
    division: Division | None = None,
    read: Read = "auto",
    target: Target = "class",
    options: HubOptions = NONE_STATED,
    clients_of: Callable[[int], Values | None] = lambda _: None,
) -> tuple[Dataset, Values | None]:
    """Return a user's objects as a data set: arrays, a data set, map-style data sets, or splits.

    Map-style data sets are read into memory or lazily, as ``read`` says. A list of them holds a
    client each, ``train`` or ``(train, test)``. With a ``division`` test rows are held out.
    Booleans (rows,) then say which rows these are, unless ``data`` is a list. ``clients_of``
    returns the client of each of that many rows, if they are given beside. Splits of Hugging Face
    data sets may have ``options``: the columns and splits to use.

    Raises
    ------
    DataError
        If the objects are of other kinds, or a row cannot be read.
    """
    if (given := splits_given(data, options)) is not None:
        data_set, rows = hub_dataset(given, options, read, target, division=division)
        return check(replace(data_set, name="your data")), rows
    _refuse(options, "data.", type(data).__name__)
    if isinstance(data, list) and data and all(map(_split_of, data)):
        splits = [split for part in data if (split := _split_of(part)) is not None]
        return _of_clients(splits, division, read, target), None
    split = _split_of(data)
    if split is None:
        if read == "lazy" and not (isinstance(data, Dataset) and data.lazy is not None):
            raise DataError(
                f"data.read = 'lazy' reads map-style torch data sets, and data is a "
                f"{type(data).__name__}"
            )
        return split_in_memory(data, division, target, clients_of)
    names = ("data",) if split[1] is None else ("data: train", "data: test")
    sets = [rows for rows in split if rows is not None]
    readers = [MapRows(rows, name, files_of(rows)) for rows, name in zip(sets, names, strict=True)]
    is_lazy, note = _choice(readers, read)
    parts: object = tuple(sets)
    if is_lazy:
        parts = tuple(part for reader in readers for part in _lazy_pair(reader))
    data_set, held = split_in_memory(parts, division, target, clients_of)
    return replace(data_set, how_read=(*data_set.how_read, *note)), held


def _refuse(options: HubOptions, before: str, kind: str) -> None:
    """Raise DataError if options for Hugging Face splits are stated for other data."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name != "test_fraction" and value != getattr(NONE_STATED, field.name):
            raise DataError(
                f"{before}{field.name} = {value!r} is about Hugging Face data sets, and the data "
                f"are a {kind}: leave it out"
            )


def _lazy_pair(reader: MapRows) -> tuple[LazyRows, list[object]]:
    x = LazyRows.of(reader)
    check_repeatable(x)
    return x, labels_of(reader)


def _split_of(data: object) -> Split | None:
    """Return training and test set of ``train`` or ``(train, test)``; None if it is neither."""
    parts = data if isinstance(data, tuple) else (data,)
    if len(parts) not in {1, 2} or not all(map(is_map_style, parts)):
        return None
    train, test = (*parts, None)[:2]
    assert is_map_style(train)
    return train, test if is_map_style(test) and len(test) else None


def _choice(readers: Sequence[MapRows], read: Read) -> tuple[bool, Notes]:
    """Return whether rows are read lazily, and a note on it for the user."""
    try:
        return choice([LazyRows.of(reader) for reader in readers], read, 2)
    except DataError:
        if read == "lazy":
            raise
        return False, ()  # reading all rows reports the error


def _of_clients(
    splits: Sequence[Split], division: Division | None, read: Read, target: Target
) -> Dataset:
    """Return the rows of all clients, one split each, with the client of each row."""
    sets = [rows for split in splits for rows in split if rows is not None]
    torch_sets = cast("Sequence[torch.utils.data.Dataset[object]]", sets)
    whole: ConcatDataset[object] = ConcatDataset(torch_sets)
    reader = MapRows(whole, "data", files_of(whole))
    is_lazy, note = _choice([reader], read)
    x, y = _lazy_pair(reader)
    train, test, begin = list[torch.Tensor](), list[torch.Tensor](), 0
    for split in splits:
        own = [torch.arange(len(rows)) for rows in split if rows is not None]
        own = [rows + begin + i * len(own[0]) for i, rows in enumerate(own)]
        begin += sum(map(len, own))
        if len(own) == 1:
            own = _with_test_rows(own[0], y if target == "class" else None, division)
        elif division is not None:
            division.refuse("a client has test rows")
        train.append(own[0])
        test.append(own[1])
    inputs = x if is_lazy else held(x, "data")
    parts = [part for rows in (train, test) for part in _picked(inputs, y, torch.cat(rows))]
    whole_parts = tuple(parts if sum(map(len, test)) else parts[:2])
    data = split_in_memory(whole_parts, None, target)[0]
    owner, owner_test = (
        torch.arange(len(rows)).repeat_interleave(torch.tensor([len(own) for own in rows]))
        for rows in (train, test)
    )
    tested = owner_test if len(owner_test) else None
    return check(
        replace(data, clients=owner, clients_test=tested, how_read=(*data.how_read, *note))
    )


def _with_test_rows(
    rows: torch.Tensor, y: Sequence[object] | None, division: Division | None
) -> list[torch.Tensor]:
    """Return a client's training rows and test rows among its ``rows`` (rows,).

    ``y`` are the classes of all clients' rows, or None if rows have no class.
    """
    if division is None:
        return [rows, rows[:0]]
    classes = np.array(["" if y is None else str(y[row]) for row in rows.tolist()])
    mask = torch.from_numpy(held_out(division, classes))
    return [rows[~mask], rows[mask]]


def _picked(x: Inputs, y: Sequence[object], rows: torch.Tensor) -> tuple[Inputs, list[object]]:
    return x[rows], [y[row] for row in rows.tolist()]
