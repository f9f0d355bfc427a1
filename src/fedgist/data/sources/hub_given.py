"""Hugging Face splits that are given in Python, as one data set.

Labels and clients go by the names that the data set gives its classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from fedgist.core.objectives.target import NUMERIC, Target
from fedgist.data.dataset import Dataset
from fedgist.data.division import Division
from fedgist.data.held_out_rows import held_out
from fedgist.data.lazy_rows import CHECKED, Inputs, sample_of
from fedgist.data.row_seeds import NO_SEED, own_draws
from fedgist.data.sources.hub_columns import HubColumns, HubOptions
from fedgist.data.sources.hub_rows import HubReader, files_of, hub_inputs
from fedgist.data.sources.hub_splits import HubPart, is_split, is_splits, split_of
from fedgist.data.sources.image_pixels import size_of
from fedgist.data.sources.map_rows import plain
from fedgist.data.sources.read_modes import Read
from fedgist.data.sources.splits import (
    Split,
    Values,
    as_texts,
    dataset,
    note_on_left_out,
    refuse_group,
)
from fedgist.data.sources.stored_labels import stored_labels
from fedgist.errors import DataError, first_line, listed

_PAIR = 2
_LEAVE_OUT = "leave such rows out with filter, or name another split by data.test"


@dataclass(frozen=True, eq=False)
class Given:
    """Splits that a user gave: of training rows, and of test rows.

    They are those of each client if ``by_client``; ``names`` are the clients' names, if they have
    any. ``unread`` are names of splits that are not used. ``unlabelled`` and ``ownerless`` are the
    numbers of rows that were left out because they have no class, or no client.
    """

    name: str
    train: tuple[HubPart, ...]
    test: tuple[HubPart | None, ...]
    by_client: bool = False
    names: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    unlabelled: int = 0
    ownerless: int = 0

    @property
    def tests(self) -> list[HubPart]:
        """The splits of test rows that there are."""
        return [part for part in self.test if part is not None]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on splits and rows that are not used."""
        text = "; data.train and data.test name the splits to read"
        note = (f"splits that are not read: {listed(self.unread)}{text}",) if self.unread else ()
        left_out = (*note_on_left_out(self.unlabelled), *note_on_left_out(self.ownerless, "client"))
        return (*note, *left_out)


def splits_given(data: object, options: HubOptions) -> Given | None:
    """Return the splits in what a user gave; None if there is none of the library's.

    ``data`` is a split, (train, test), a mapping of names to splits, or a list or a mapping of
    these with a client each. A mapping with the name of the training split has splits, any other
    has clients.

    Raises
    ------
    DataError
        If something else is among the splits, or a named split does not exist.
    """
    data = split_of(data)
    if not any(map(is_split, _leaves(data))):
        return None
    if isinstance(data, list):
        pairs = [(f"data: client {client}", part) for client, part in enumerate(data)]
        return _of_clients(pairs, (), options)
    if isinstance(data, Mapping) and not is_split(data) and _has_clients(data, options):
        pairs = [(f"data: client {client!r}", part) for client, part in data.items()]
        return _of_clients(pairs, tuple(map(str, data)), options)
    return named_splits(data, "data", options)


def hub_dataset(
    given: Given,
    options: HubOptions,
    read: Read,
    target: Target,
    *,
    classes: Sequence[str] = (),
    stored: bool = False,
    division: Division | None = None,
) -> tuple[Dataset, Values | None]:
    """Return splits as a data set, and which rows are held out as test rows, Booleans (rows,).

    These are None without a ``division``, and if each client has a split. ``classes`` are the
    names of all classes in order. ``stored`` says that the splits are those of files, unchanged.

    Raises
    ------
    DataError
        If a column, a row or a label cannot be used.
    """
    if given.tests:
        refuse_group(options.group, "the data have test rows of their own")
    columns = HubColumns.of(given.train[0], options, target)
    for part in (*given.train[1:], *given.tests):
        columns.expect(part)
    if given.by_client and columns.client is not None:
        raise DataError(f"data has a split for each client: leave out client = {columns.client!r}")
    size = size_of(options.image_size)
    readers = [HubReader.of(given.name, given.train, columns, size, options.missing)]
    readers += [readers[0].over(f"{given.name}: test", given.tests)] if given.tests else []
    if stored:
        readers = [replace(reader, files=files_of(reader.parts)) for reader in readers]
    inputs, how_read = hub_inputs(readers, read, 1 if stored else 2)
    train = labelled(given.train, inputs[0], columns, target)
    held = _held_out(given, train, division)
    if given.tests:
        parts = train, labelled(given.tests, inputs[1], columns, target)
    else:
        parts = train.take(~held), train.take(held)
    own = class_names([*given.train, *given.tests], columns, target)
    names = own if target in NUMERIC else classes or own
    data = dataset(
        given.name,
        *parts,
        classes=names,
        missing=options.missing,
        target=target,
        drawn=division is not None,
    )
    notes = (*given.notes, *columns.notes, *readers[0].notes, *data.notes)
    data = replace(_with_clients(data, given, held), notes=notes, how_read=how_read)
    is_drawn = division is not None and not given.by_client
    return data, held if is_drawn else None


def with_a_class(given: Given, columns: HubColumns) -> Given:
    """Return the splits without the rows that have no class."""
    kept, count = _only(given, partial(has_value, column=columns.labels[0]))
    return replace(kept, unlabelled=count)


def with_a_client(given: Given, columns: HubColumns) -> Given:
    """Return the splits without the rows that have no client."""
    if columns.client is None:
        return given
    kept, count = _only(given, partial(_has_name, column=columns.client))
    return replace(kept, ownerless=count)


def _only(given: Given, usable: Callable[[HubPart], Values]) -> tuple[Given, int]:
    """Return the splits with the rows that are ``usable``, and the number of the others."""
    train = tuple(_usable_part(part, usable(part)) for part in given.train)
    test = tuple(None if part is None else _usable_part(part, usable(part)) for part in given.test)
    count = sum(map(len, given.train)) + sum(map(len, given.tests))
    kept = replace(given, train=train, test=tuple(part or None for part in test))
    return kept, count - sum(map(len, train)) - sum(map(len, kept.tests))


def _usable_part(part: HubPart, rows: Values) -> HubPart:
    return (
        part if rows.all() else replace(part, split=part.split.select(rows.nonzero()[0].tolist()))
    )


def labelled(parts: Sequence[HubPart], x: Inputs, columns: HubColumns, target: Target) -> Split:
    """Return the rows of some splits, one after the other, with their labels and clients."""
    labels = np.concatenate([labels_of(part, columns, target) for part in parts])
    names = [clients_of(part, columns) for part in parts]
    clients = [part for part in names if part is not None]
    groups = None
    if (name := columns.group) is not None:
        cells = [_texts(p, name, _cells(p, name), f"{p.name}: the groups {name!r}") for p in parts]
        groups = np.concatenate(cells)
    return Split(x, labels, np.concatenate(clients) if clients else None, groups)


def _held_out(given: Given, train: Split, division: Division | None) -> Values:
    """Return which training rows are test rows, Booleans (rows,); each split by itself."""
    if division is None:
        return np.zeros(len(train.labels), dtype=bool)
    if given.tests:
        division.refuse("a client has test rows" if given.by_client else "data= has some")
    if not given.by_client:
        return held_out(division, train.labels, train.clients, train.groups)
    ends = np.cumsum([len(part) for part in given.train])
    masks = []
    for begin, end in zip([0, *ends], ends, strict=False):
        own = None if train.groups is None else train.groups[begin:end]
        masks.append(held_out(division, train.labels[begin:end], groups=own))
    return np.concatenate(masks)


def _with_clients(data: Dataset, given: Given, held: Values) -> Dataset:
    """Return the data with the client of each row, if each client has a split."""
    if not given.by_client:
        return data
    owner = np.repeat(np.arange(len(given.train)), [len(part) for part in given.train])
    tests = [0 if part is None else len(part) for part in given.test]
    tested = np.repeat(np.arange(len(tests)), tests) if given.tests else owner[held]
    clients, clients_test = (torch.from_numpy(own) for own in (owner[~held], tested))
    own_tests = clients_test if len(clients_test) else None
    return replace(data, clients=clients, clients_test=own_tests, client_names=given.names)


def _of_clients(
    parts: Sequence[tuple[str, object]], names: tuple[str, ...], options: HubOptions
) -> Given:
    if len(set(names)) < len(names):
        raise DataError(f"data names a client twice: {listed(names)}")
    clients = [named_splits(part, name, options) for name, part in parts]
    unread = dict.fromkeys(name for client in clients for name in client.unread)
    train = tuple(part for client in clients for part in client.train)
    test = tuple(part for client in clients for part in client.test)
    return Given("data", train, test, by_client=True, names=names, unread=tuple(unread))


def named_splits(data: object, name: str, options: HubOptions) -> Given:
    """Return a split, (train, test), or a mapping of names to splits, as one client's splits.

    ``name`` begins error messages.

    Raises
    ------
    DataError
        If the mapping lacks a split, or something else is among the splits.
    """
    data = split_of(data)
    pairs, unread = [(name, data)], tuple[str, ...]()
    if isinstance(data, Mapping) and not is_split(data):
        chosen = [options.train, options.test or ("test" if "test" in data else None)]
        if lost := [split for split in chosen if split is not None and split not in data]:
            raise DataError(
                f"{name} has no split {lost[0]!r}; it has {listed(map(str, data))}: name the "
                "splits by data.train and data.test, or give two of them, (train, test)"
            )
        unread = tuple(str(split) for split in data if split not in chosen)
        pairs = [(f"{name}: {split}", data[split]) for split in chosen if split is not None]
    elif isinstance(data, tuple):
        pairs = [(f"{name}: {'test' if i else 'train'}", part) for i, part in enumerate(data)]
    parts = [(about, split_of(part)) for about, part in pairs]
    splits = [HubPart(about, part) for about, part in parts if is_split(part)]
    if len(splits) < len(parts) or len(splits) > _PAIR:
        raise DataError(
            f"{name} mixes Hugging Face splits with other objects; it must be a split, "
            "(train, test), or a mapping of names to splits"
        )
    test = splits[1] if len(splits) == _PAIR and len(splits[1]) else None
    only = replace(splits[0], name=name) if len(splits) == 1 else splits[0]
    return Given(name, (only,), (test,), unread=unread)


def _has_clients(data: Mapping[str, object], options: HubOptions) -> bool:
    """Return whether a mapping has a client for each name, not a split: the library's never has."""
    return options.train not in data and not is_splits(data)


def _leaves(data: object) -> Iterator[object]:
    """Yield the objects in a list, a tuple or a mapping, and in its tuples and mappings."""
    for part in data if isinstance(data, list) else _entries(data):
        yield from map(split_of, _entries(split_of(part)))


def _entries(data: object) -> Iterable[object]:
    if isinstance(data, Mapping):
        return data.values()
    return data if isinstance(data, tuple) else (data,)


def labels_of(part: HubPart, columns: HubColumns, target: Target) -> Values:
    """Return the labels of a split: texts (rows,), numbers (rows, outputs), or pixels.

    Raises
    ------
    DataError
        If a row has no class, or the labels are others than the target needs.
    """
    if target in NUMERIC:
        return np.concatenate([_numbers(part, name, target) for name in columns.labels], axis=1)
    name = columns.labels[0]
    subject = f"{part.name}: the labels {name!r}"
    cells = _cells(part, name)
    if target == "class":
        return _texts(part, name, cells, subject)
    return stored_labels(_stacked([np.asarray(cell) for cell in cells], subject), subject, target)


def clients_of(part: HubPart, columns: HubColumns) -> Values | None:
    """Return the name of the client of each row, texts (rows,); None without such a column."""
    if (name := columns.client) is None:
        return None
    return _texts(part, name, _cells(part, name), f"{part.name}: the clients {name!r}")


def class_names(parts: Sequence[HubPart], columns: HubColumns, target: Target) -> tuple[str, ...]:
    """Return the names of all classes or labels, in the data set's order; empty if it has none."""
    if target in NUMERIC and len(columns.labels) > 1:
        return columns.labels
    names = chain(*(names_of(part, columns.labels[0]) for part in parts))
    return tuple(dict.fromkeys(names)) or (columns.labels if target in NUMERIC else ())


def has_value(part: HubPart, column: str) -> Values:
    """Return Booleans (rows,): whether a row has a value, such as a class, in a column."""
    coded = bool(names_of(part, column))
    return np.array([not _is_missing(c, coded=coded) for c in _cells(part, column)], dtype=bool)


def names_of(part: HubPart, column: str) -> tuple[str, ...]:
    """Return the names of the classes of a column, or of the labels in its lists."""
    kind = part.split.features.get(column)
    inner = getattr(kind, "feature", None)
    return tuple(getattr(kind if inner is None else inner, "names", None) or ())


def _is_missing(cell: object, *, coded: bool) -> bool:
    return cell is None or (coded and cell == -1)  # the library's sign of rows without a label


def _has_name(part: HubPart, column: str) -> Values:
    """Return Booleans (rows,): whether a row has a value in a column that is no empty text."""
    coded = bool(names_of(part, column))
    named = [not _is_missing(c, coded=coded) and str(c).strip() != "" for c in _cells(part, column)]
    return np.array(named, dtype=bool)


def _texts(part: HubPart, name: str, cells: Sequence[object], subject: str) -> Values:
    """Return cells as texts: names of classes, texts, whole numbers or Booleans."""
    names = names_of(part, name)
    empty = [row for row, cell in enumerate(cells) if _is_missing(cell, coded=bool(names))]
    if empty:
        rows = "every row" if len(empty) == len(cells) else f"row {empty[0]} (counted from 0)"
        raise DataError(
            f"{subject} are missing ({cells[empty[0]]}) in {rows}, in {len(empty)} of {len(cells)} "
            f"rows: {_LEAVE_OUT}"
        )
    for row, code in enumerate(cells if names else ()):
        if isinstance(code, int) and not 0 <= code < len(names):
            raise DataError(
                f"{subject} hold {code} in row {row} (counted from 0), outside 0..{len(names) - 1}"
            )
    if names:
        cells = [names[code] if isinstance(code, int) else code for code in cells]
    if any(isinstance(cell, str) for cell in cells):
        return as_texts(np.array([*cells, None], dtype=object)[:-1], subject)
    return as_texts(_stacked(cells, subject), subject)


def _numbers(part: HubPart, name: str, target: Target) -> Values:
    """Return a column of numbers or of several labels, float32 (rows, outputs)."""
    cells, names = _cells(part, name), names_of(part, name)
    subject = f"{part.name}: the labels {name!r}"
    is_list = hasattr(part.split.features.get(name), "feature")
    if target == "labels" and names and is_list:  # lists of the labels that a row has
        numbers = np.zeros((len(cells), len(names)))
        for row, own in enumerate(cells):
            assert isinstance(own, list)
            numbers[row, own] = 1
        return stored_labels(numbers, subject, target)
    filled = [np.nan if cell is None else cell for cell in cells]
    values = _stacked(filled, subject)
    return stored_labels(
        values.astype(float) if values.dtype == object else values, subject, target
    )


def _stacked(cells: Sequence[object], subject: str) -> Values:
    try:
        return np.asarray(cells)
    except ValueError as error:
        raise DataError(f"{subject} differ in shape: {first_line(error)}") from error


def _cells(part: HubPart, column: str) -> list[object]:
    """Return a column's values. A user's function is asked for all rows only if it changes some."""
    own = part.only([column])
    if not part.is_transformed:
        return [cell for block in own.blocks() for cell in block[column]]
    with own_draws(draws=True) as seed_row:
        seed_row(NO_SEED)
        if column in part.split.column_names:
            stored = HubPart(part.name, part.split.with_format(None)).only([column])
            cells = [cell for block in stored.blocks() for cell in block[column]]
            rows = sample_of(len(part), CHECKED).tolist()
            if str([cells[row] for row in rows]) == str([_cell(part, row, column) for row in rows]):
                return cells
        return [_cell(part, row, column) for row in range(len(part))]


def _cell(part: HubPart, row: int, column: str) -> object:
    cells = part.row(row)
    if column not in cells:
        raise DataError(f"{part.name}: row {row} (counted from 0) has no column {column!r}")
    return plain(cells[column])
