"""Partition the rows of a data set among clients.

Every partition divides the test rows in the same way as the training rows, so that a client is
tested on its training classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data import PARTITIONS
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.data.partition_rules import Ints
from fedgist.errors import DataError, did_you_mean

#: Returns a number from 0 to 1 for each row (rows,), given the row numbers (rows,) of each client.
Draw = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, eq=False)
class Partition:
    """Rows of each client for training, validation (empty by default) and testing.

    ``names`` are the clients' names, if the data name them and the partition is natural.
    """

    train: Rows
    validation: Rows
    test: Rows
    names: tuple[str, ...] = ()


def partition(
    data: Dataset,
    name: str,
    num_clients: int,
    key: Tensor,
    *,
    validation: float = 0.0,
    draw: Draw | None = None,
    **options: Any,
) -> Partition:
    """Divide the rows of ``data`` among clients.

    ``name`` is one of :data:`PARTITIONS`, and ``options`` are its options. All draws come from
    ``key``. ``validation`` is the share of each client's training rows to hold out, rounded down.
    With ``draw``, every row is held out by itself; groups of the data stay together (see
    :func:`hold_out`).
    """
    if name not in PARTITIONS:
        raise DataError(
            f"partition.name: unknown partition {name!r}{did_you_mean(name, PARTITIONS)}"
        )
    if num_clients < 1:
        raise DataError(f"clients.num_clients must be at least 1, not {num_clients}")
    if num_clients > len(data.y):
        raise DataError(
            f"clients.num_clients = {num_clients}, but {data.name} has only {len(data.y)} "
            "training samples"
        )
    train, test = PARTITIONS[name](data, num_clients, key, **options)
    for client, rows in enumerate(train):
        if len(rows) == 0:
            raise DataError(
                f"partition.name = {name!r} leaves client {client} of {num_clients} without "
                "training rows"
            )
    tensors = [_tensor(rows) for rows in train]
    kept, held = hold_out(tensors, validation, key, draw, data.groups)
    names = data.client_names[:num_clients] if name == "natural" else ()
    return Partition(kept, held, Rows.of([_tensor(rows) for rows in test]), names)


def hold_out(
    train: Sequence[Tensor],
    share: float,
    key: Tensor,
    draw: Draw | None = None,
    groups: Tensor | None = None,
    *,
    first: int = 0,
) -> tuple[Rows, Rows]:
    """Return each client's training rows and validation rows.

    ``train`` holds the row numbers of each client, (rows,), from client number ``first`` on. The
    validation rows are a share of the client's rows, rounded down. With ``groups``, the group of
    each row of the data, they are whole groups, as many as fit. With ``draw``, each row whose
    number is below ``share`` is held out: one row more or less moves no other row.
    """
    if share == 0.0:  # with many clients the general case would take seconds
        return Rows.of(train), Rows.of([rows[:0] for rows in train])
    if draw is not None:
        pairs = _parted(train, draw(train) < share)
    else:
        keys = [random.fold(key, "validation", first + client) for client in range(len(train))]
        if groups is not None:
            pairs = _parted(train, _held_groups(train, share, keys, groups))
        else:
            pairs = [_held_out(rows, share, own) for rows, own in zip(train, keys, strict=True)]
    return Rows.of([kept for kept, _ in pairs]), Rows.of([held for _, held in pairs])


def owner_of_rows(parts: Iterable[Tensor], count: int) -> Tensor:
    """Return the client of each of ``count`` rows, (count,), -1 for a row of no client."""
    owner = torch.full((count,), -1)
    for client, rows in enumerate(parts):
        owner[rows] = client
    return owner


def _held_out(rows: Tensor, share: float, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the training and validation rows, each in the order of ``rows``."""
    size = int(share * len(rows))
    order = random.permutation(key, len(rows)) if size else torch.arange(len(rows))
    return rows[order[size:].sort().values], rows[order[:size].sort().values]


def _parted(train: Sequence[Tensor], held: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each client's rows that are not held, and those that are: Booleans (all rows,)."""
    return [(rows[~held[rows]], rows[held[rows]]) for rows in train]


def _held_groups(
    train: Sequence[Tensor], share: float, keys: Sequence[Tensor], groups: Tensor
) -> Tensor:
    """Return which rows of the data (all rows,) are held out: groups in random order, if they fit.

    A group that several clients have is held out by all of them, or by none.
    """
    room = [int(share * len(rows)) for rows in train]
    own = [torch.unique(groups[rows], return_counts=True) for rows in train]
    sizes = dict[int, list[tuple[int, int]]]()  # of each group: clients, and their rows
    for client, pair in enumerate(own):
        for group, count in zip(*(values.tolist() for values in pair), strict=True):
            sizes.setdefault(group, []).append((client, count))
    held = list[int]()
    for (some, _), key in zip(own, keys, strict=True):
        for group in some[random.permutation(key, len(some))].tolist():
            parts = sizes.pop(group, [])  # none: an earlier client has decided
            if parts and all(count <= room[client] for client, count in parts):
                held.append(group)
                for client, count in parts:
                    room[client] -= count
    return torch.isin(groups, torch.tensor(held, dtype=torch.int64))


def _tensor(rows: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
