"""Test rows are chosen among rows whose source has none: by class, within clients, in groups."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgist.core.random import key, permutation
from fedgist.data.division import Division
from fedgist.errors import DataError

Values = NDArray[Any]


def held_out(
    division: Division,
    labels: Values,
    clients: Values | None = None,
    groups: Values | None = None,
) -> Values:
    """Choose test rows: Booleans (rows,), true for a test row.

    Parameters
    ----------
    division
        The share or the fold, and whether each client's rows are divided by themselves.
    labels
        The label of each row (rows,); each class is divided alike. Labels of more dimensions are
        numbers or pixels and have no classes.
    clients
        The client of each row (rows,), if known.
    groups
        The group of each row (rows,), such as a patient: all its rows are test rows, or none.

    Raises
    ------
    DataError
        If a group has rows of several clients, whose rows are divided by themselves.
    """
    if labels.ndim > 1:
        labels = np.zeros(len(labels))
    if clients is not None and groups is not None and division.within == "client":
        _check_groups(groups, clients)
    mask = np.zeros(len(labels), dtype=bool)
    together = [np.arange(len(labels))]
    parts = together if clients is None or division.within == "pooled" else _places(clients)
    for rows in parts:
        own = None if groups is None else groups[rows]
        mask[rows] = _of_rows(division, labels[rows], own)
    return mask


def _check_groups(groups: Values, clients: Values) -> None:
    for rows in _places(groups):
        if len(owners := np.unique(clients[rows])) > 1:
            raise DataError(
                f"data.group: {groups[rows[0]]!s:.80} has rows of the clients {owners[0]!s:.80} "
                f"and {owners[1]!s:.80}, whose test rows are chosen client by client: data.divide "
                "= 'pooled' chooses among all rows; if it means two groups, name them apart"
            )


def _of_rows(division: Division, labels: Values, groups: Values | None) -> Values:
    if groups is None:
        return _of_units(division, labels, np.ones(len(labels)))
    _, group = np.unique(groups, return_inverse=True)
    members = _places(group)
    classes = np.array([_most_frequent(labels[rows]) for rows in members])
    chosen = _of_units(division, classes, np.array([len(rows) for rows in members]))
    return np.asarray(chosen[group], dtype=bool)


def _of_units(division: Division, labels: Values, sizes: Values) -> Values:
    """Choose among rows, or groups of rows, by the class and the size of each (units,)."""
    if division.folds is not None:
        return _in_fold(division, division.folds, labels, sizes)
    mask, order = _share_of_each(labels, division.share, division.repeat)
    if division.within == "client" and division.share and len(labels) > 1:
        _fill_up(mask, labels, order, max(1, int(division.share * len(labels))))
    return mask


def _in_fold(division: Division, folds: int, labels: Values, sizes: Values) -> Values:
    """Deal the units of each class in turn into the folds, large ones first."""
    order = permutation(key(division.repeat, "folds"), len(labels)).numpy()
    dealt = order[np.argsort(-sizes[order], kind="stable")]
    dealt = dealt[np.argsort(labels[dealt], kind="stable")]
    first = int(key(division.repeat, "first fold", len(labels))) % folds
    fold = np.empty(len(labels), dtype=np.int64)
    fold[dealt] = (np.arange(len(labels)) + first) % folds
    return np.asarray(fold == division.fold, dtype=bool)


def _share_of_each(labels: Values, share: float, repeat: int) -> tuple[Values, Values]:
    """Choose a share of each class by a random order; every class keeps a training unit.

    Return Booleans (units,) and the order.
    """
    order = permutation(key(repeat, "test split"), len(labels)).numpy()
    mask = np.zeros(len(labels), dtype=bool)
    for members in _places(labels[order]):
        chosen = min(int(share * len(members) + 0.5), len(members) - 1)
        mask[order[members[:chosen]]] = True
    return mask, order


def _fill_up(mask: Values, labels: Values, order: Values, least: int) -> None:
    """Choose more units until there are ``least``, if the shares of small classes are rounded off.

    Every class keeps a training unit.
    """
    for unit in order:
        if mask.sum() >= least:
            return
        if ((labels == labels[unit]) & ~mask).sum() > 1:
            mask[unit] = True


def _places(values: Values) -> list[Values]:
    """Return the places (members,) of each distinct value, in the order of the values."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.split(np.argsort(index, kind="stable"), np.cumsum(counts)[:-1])


def _most_frequent(labels: Values) -> object:
    distinct, counts = np.unique(labels, return_counts=True)
    return distinct[np.argmax(counts)]
