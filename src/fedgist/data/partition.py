"""Who has what: partitions of training and test rows over clients.

Every partition gives each client its test rows by the same assignment as its training rows, so that
a client is tested on the classes it knows. Draws come from a key; numpy's counter-based Philox
generator makes the Dirichlet ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.errors import DataError, did_you_mean

Ints = npt.NDArray[np.int64]
DRAWS = 100  # attempts at a Dirichlet partition whose smallest client is large enough


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of each client.

    To train on, to validate on (empty unless asked for) and to be tested on.
    """

    train: Rows
    validation: Rows
    test: Rows


def partition(
    data: Dataset,
    name: str,
    num_clients: int,
    key: Tensor,
    *,
    validation: float = 0.0,
    **options: Any,
) -> Partition:
    """Divide ``data`` among clients.

    Raises
    ------
    DataError
        If the partition is unknown or impossible, naming the key and the value.
    """
    if name not in PARTITIONS:
        msg = f"partition.name: unknown partition {name!r}{did_you_mean(name, PARTITIONS)}"
        raise DataError(msg)
    if num_clients < 1:
        msg = f"clients.num_clients must be at least 1, not {num_clients}"
        raise DataError(msg)
    if num_clients > len(data.y):
        msg = (
            f"clients.num_clients = {num_clients}, but {data.name} has only {len(data.y)} "
            "training samples"
        )
        raise DataError(msg)
    train, test = PARTITIONS[name](data, num_clients, key, **options)
    for client, rows in enumerate(train):
        if len(rows) == 0:
            msg = (
                f"partition.name = {name!r} leaves client {client} of {num_clients} without "
                "training rows"
            )
            raise DataError(msg)
    cut = [
        _hold_out(rows, validation, random.fold(key, "validation", i))
        for i, rows in enumerate(train)
    ]
    return Partition(
        Rows.of([a for a, _ in cut]),
        Rows.of([b for _, b in cut]),
        Rows.of([_tensor(r) for r in test]),
    )


def _hold_out(rows: Ints, share: float, key: Tensor) -> tuple[Tensor, Tensor]:
    size = int(share * len(rows))
    order = random.permutation(key, len(rows)) if size else torch.arange(len(rows))
    held, kept = order[:size].sort().values, order[size:].sort().values
    return _tensor(rows)[kept], _tensor(rows)[held]


def _tensor(rows: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))


def _generator(key: Tensor, *purpose: random.Word) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=int(random.fold(key, *purpose)) & (2**64 - 1)))


def _labels(data: Dataset) -> tuple[Ints, Ints]:
    return data.y.numpy(), data.y_test.numpy()


def iid(data: Dataset, num_clients: int, key: Tensor) -> tuple[list[Ints], list[Ints]]:
    """Shuffle the rows and cut them into equal parts."""
    train, test = (
        _generator(key, s).permutation(len(y))
        for s, y in zip(("train", "test"), _labels(data), strict=True)
    )
    return np.array_split(train, num_clients), np.array_split(test, num_clients)


def dirichlet(
    data: Dataset, num_clients: int, key: Tensor, *, alpha: float = 0.5, min_size: int = 1
) -> tuple[list[Ints], list[Ints]]:
    """Share classes out by Dirichlet(alpha), until nobody has fewer than ``min_size`` rows.

    Hsu, Qi, Brown 2019, "Measuring the effects of non-identical data distribution". Small alpha:
    few classes a client.
    """
    _positive(alpha, "partition.alpha")
    for attempt in range(DRAWS):
        draw = _generator(key, "dirichlet", attempt)
        shares = draw.dirichlet(np.full(num_clients, alpha), data.num_classes)
        train, test = (
            _share_out(y, shares, _generator(key, "rows", i)) for i, y in enumerate(_labels(data))
        )
        if min(len(rows) for rows in train) >= max(1, min_size):
            return train, test
    msg = (
        f"partition.min_size = {max(1, min_size)} was not reached in {DRAWS} draws with "
        f"partition.alpha = {alpha} and "
        f"{num_clients} clients; use a larger alpha, fewer clients or a smaller min_size"
    )
    raise DataError(msg)


def size(
    data: Dataset, num_clients: int, key: Tensor, *, alpha: float = 1.0
) -> tuple[list[Ints], list[Ints]]:
    """Give every client the same mixture of classes, but sizes drawn from Dirichlet(alpha).

    At least one row each.
    """
    _positive(alpha, "partition.alpha")
    shares = _generator(key, "sizes").dirichlet(np.full(num_clients, alpha))
    out = []
    for i, y in enumerate(_labels(data)):
        order = _generator(key, "rows", i).permutation(len(y))
        least = 1 if len(y) >= num_clients else 0
        bounds = np.round(np.cumsum(shares)[:-1] * (len(y) - least * num_clients)).astype(np.int64)
        out.append(np.split(order, bounds + least * np.arange(1, num_clients)))
    return out[0], out[1]


def shards(
    data: Dataset, num_clients: int, key: Tensor, *, classes_per_client: int = 2
) -> tuple[list[Ints], list[Ints]]:
    """Give each client ``classes_per_client`` contiguous shards: at most so many classes.

    Liang et al. 2020, "Think locally, act globally" (LG-FedAvg), the split that the FedLog paper
    uses: each label's rows, in data-set order, are cut into ``int(classes_per_client * clients /
    classes)`` equal shards, leftovers one each to the first shards; a client may draw the same
    class twice. The test rows are cut with the same draw of classes.
    """
    per_class = int(classes_per_client * num_clients / data.num_classes)
    if per_class < 1 or (per_class * data.num_classes) % num_clients:
        msg = (
            f"partition.classes_per_client = {classes_per_client} with {num_clients} clients "
            f"makes {per_class} shards "
            f"of each of {data.num_classes} classes, which cannot be dealt out evenly"
        )
        raise DataError(msg)
    deck = np.tile(np.arange(data.num_classes), per_class)
    hands = _generator(key, "classes").permutation(deck).reshape(num_clients, -1)
    out = []
    for i, y in enumerate(_labels(data)):
        draw = _generator(key, "shards", i)
        piles = [
            [piece[j] for j in draw.permutation(per_class)]
            for piece in _pieces(y, data.num_classes, per_class)
        ]
        out.append([np.concatenate([piles[c].pop() for c in hand]) for hand in hands])
    return out[0], out[1]


def _pieces(y: Ints, num_classes: int, per_class: int) -> list[list[Ints]]:
    out = []
    for c in range(num_classes):
        rows = np.flatnonzero(y == c)
        length = len(rows) // per_class
        pieces = [rows[k * length : (k + 1) * length] for k in range(per_class)]
        for k, row in enumerate(rows[per_class * length :]):
            pieces[k] = np.append(pieces[k], row)
        out.append(pieces)
    return out


def pathological(
    data: Dataset, num_clients: int, key: Tensor, *, classes_per_client: int = 2
) -> tuple[list[Ints], list[Ints]]:
    """Give each client exactly ``classes_per_client`` classes, each to about as many clients."""
    if not 1 <= classes_per_client <= data.num_classes:
        msg = (
            f"partition.classes_per_client must be 1..{data.num_classes}, not {classes_per_client}"
        )
        raise DataError(msg)
    draw = _generator(key, "classes")
    holders = np.zeros(data.num_classes, dtype=np.int64)
    shares = np.zeros((data.num_classes, num_clients))
    for client in range(num_clients):
        chosen = np.lexsort((draw.random(data.num_classes), holders))[
            :classes_per_client
        ]  # the least held, ties at random
        holders[chosen] += 1
        shares[chosen, client] = 1.0
    empty = shares.sum(1) == 0  # a class that nobody drew stays unused
    shares[~empty] /= shares[~empty].sum(1, keepdims=True)
    train, test = (
        _share_out(y, shares, _generator(key, "rows", i)) for i, y in enumerate(_labels(data))
    )
    return train, test


def natural(data: Dataset, num_clients: int, key: Tensor) -> tuple[list[Ints], list[Ints]]:
    """Follow the data's own client column; test rows without one are shared out evenly."""
    if data.clients is None:
        msg = (
            f"partition.name = 'natural' needs a client column, which {data.name} does not have "
            "(data.client = ...)"
        )
        raise DataError(msg)
    found = int(data.clients.max()) + 1
    if found != num_clients:
        msg = f"clients.num_clients = {num_clients}, but {data.name} has {found} natural clients"
        raise DataError(msg)
    train = [np.flatnonzero(data.clients.numpy() == c) for c in range(num_clients)]
    if data.clients_test is None:
        return train, iid(data, num_clients, key)[1]
    return train, [np.flatnonzero(data.clients_test.numpy() == c) for c in range(num_clients)]


def _positive(alpha: float, key: str) -> None:
    if not alpha > 0:
        msg = f"{key} must be greater than 0, not {alpha}"
        raise DataError(msg)


def _share_out(y: Ints, shares: npt.NDArray[np.float64], draw: np.random.Generator) -> list[Ints]:
    """Cut the shuffled rows of each class by its line of ``shares`` (classes, clients)."""
    out: list[list[Ints]] = [[] for _ in range(shares.shape[1])]
    for c, line in enumerate(shares):
        rows = draw.permutation(np.flatnonzero(y == c))
        if line.sum() == 0:
            continue
        bounds = np.round(np.cumsum(line)[:-1] * len(rows)).astype(np.int64)
        for client, part in enumerate(np.split(rows, bounds)):
            out[client].append(part)
    return [
        np.sort(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64) for parts in out
    ]


Divide = Callable[..., tuple[list[Ints], list[Ints]]]
PARTITIONS: MappingProxyType[str, Divide] = MappingProxyType(
    {
        "iid": iid,
        "dirichlet": dirichlet,
        "size": size,
        "shards": shards,
        "pathological": pathological,
        "natural": natural,
    }
)
