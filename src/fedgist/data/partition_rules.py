"""Partition rules: functions that divide the rows of a data set among clients.

Each takes a data set, the number of clients, a key and its own options, and returns the row numbers
of every client. All draws come from the key, through NumPy's counter-based generator Philox.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedgist.core import random
from fedgist.core.bounds import Positive, PositiveInt
from fedgist.data.dataset import Dataset
from fedgist.errors import DataError

Ints = npt.NDArray[np.int64]
Divided = tuple[list[Ints], list[Ints]]  # each client's training rows, and each client's test rows
TINY = 1e-12  # of a client's size, below which a draw of a small alpha is 0
DRAWS = 100  # attempts at a Dirichlet partition whose smallest client is large enough


def generator(key: Tensor, *purpose: random.Word) -> np.random.Generator:
    """Return a NumPy generator for one purpose, seeded by a key."""
    return np.random.Generator(np.random.Philox(key=int(random.fold(key, *purpose)) & (2**64 - 1)))


def _labels(data: Dataset) -> tuple[Ints, Ints]:
    return data.y.numpy(), data.y_test.numpy()


def iid(data: Dataset, num_clients: int, key: Tensor) -> Divided:
    """Shuffle the rows and cut them into parts whose sizes differ by at most one row."""
    train, test = (
        generator(key, split).permutation(len(y))
        for split, y in zip(("train", "test"), _labels(data), strict=True)
    )
    return np.array_split(train, num_clients), np.array_split(test, num_clients)


def dirichlet(
    data: Dataset,
    num_clients: int,
    key: Tensor,
    *,
    alpha: Positive = 0.5,
    min_size: PositiveInt = 1,
    alpha_sizes: Positive | None = None,
) -> Divided:
    """Divide each class among the clients by proportions drawn from Dirichlet(alpha).

    The smaller ``alpha``, the fewer clients share most of a class. All proportions are redrawn
    until every client has at least ``min_size`` training rows.

    Yurochkin et al. 2019, "Bayesian nonparametric federated learning of neural networks",
    section 4. Hsu, Qi, Brown 2019, "Measuring the effects of non-identical data distribution for
    federated visual classification", draw proportions of classes for each client instead.

    Parameters
    ----------
    alpha
        Concentration of the classes. A smaller value gives each client fewer classes.
    min_size
        Minimum number of training rows per client.
    alpha_sizes
        Concentration of the clients' sizes, which then multiply their proportions. A smaller value
        makes sizes differ more.
    """
    _positive(alpha, "partition.alpha")
    for attempt in range(DRAWS):
        draw = generator(key, "dirichlet", attempt)
        shares = draw.dirichlet(np.full(num_clients, alpha), data.num_classes)
        shares = _with_sizes(shares, alpha_sizes, generator(key, "sizes", attempt))
        train, test = _divided_by(shares, data, key)
        if min(len(rows) for rows in train) >= max(1, min_size):
            return train, test
    raise DataError(
        f"partition.min_size = {max(1, min_size)} was not reached in {DRAWS} draws with "
        f"partition.alpha = {alpha} and {num_clients} clients; use a larger alpha, fewer clients "
        "or a smaller min_size"
    )


def size(data: Dataset, num_clients: int, key: Tensor, *, alpha: Positive = 1.0) -> Divided:
    """Give every client the same mixture of classes, with sizes drawn from Dirichlet(alpha).

    Every client gets at least one training row, and one test row if there are enough of them.

    Parameters
    ----------
    alpha
        Concentration of the sizes. A smaller value makes clients' sizes differ more.
    """
    _positive(alpha, "partition.alpha")
    shares = generator(key, "sizes").dirichlet(np.full(num_clients, alpha))
    divided = []
    for split, y in enumerate(_labels(data)):
        order = generator(key, "rows", split).permutation(len(y))
        least = 1 if len(y) >= num_clients else 0
        bounds = _bounds(shares, len(y) - least * num_clients)
        divided.append(np.split(order, bounds + least * np.arange(1, num_clients)))
    return divided[0], divided[1]


def shards(
    data: Dataset, num_clients: int, key: Tensor, *, classes_per_client: PositiveInt = 2
) -> Divided:
    """Give each client ``classes_per_client`` shards, and so at most that number of classes.

    Each class's rows, in the order of the data set, are cut into ``int(classes_per_client *
    num_clients / num_classes)`` equal shards; remaining rows go to the first shards, one to each.
    The classes of a client's shards are drawn once, for training and test rows. A client may draw a
    class twice.

    Liang et al. 2020, "Think locally, act globally: federated learning with local and global
    representations" (LG-FedAvg); FedLog's experiments use this split too.

    Parameters
    ----------
    classes_per_client
        Number of shards per client, and so its maximum number of classes.
    """
    per_class = int(classes_per_client * num_clients / data.num_classes)
    if per_class < 1 or (per_class * data.num_classes) % num_clients:
        raise DataError(
            f"partition.classes_per_client = {classes_per_client} with {num_clients} clients "
            f"makes {per_class} shards of each of {data.num_classes} classes, which cannot be "
            "divided evenly"
        )
    all_shards = np.tile(np.arange(data.num_classes), per_class)  # the class of each shard
    classes_of = generator(key, "classes").permutation(all_shards).reshape(num_clients, -1)
    divided = []
    for split, y in enumerate(_labels(data)):
        draw = generator(key, "shards", split)
        unused = [
            [shards_of_class[i] for i in draw.permutation(per_class)]
            for shards_of_class in _shards_by_class(y, data.num_classes, per_class)
        ]
        divided.append(
            [np.concatenate([unused[label].pop() for label in labels]) for labels in classes_of]
        )
    return divided[0], divided[1]


def _shards_by_class(y: Ints, num_classes: int, per_class: int) -> list[list[Ints]]:
    by_class = []
    for label in range(num_classes):
        rows = np.flatnonzero(y == label)
        length = len(rows) // per_class
        equal = [rows[i * length : (i + 1) * length] for i in range(per_class)]
        for i, row in enumerate(rows[per_class * length :]):
            equal[i] = np.append(equal[i], row)
        by_class.append(equal)
    return by_class


def pathological(
    data: Dataset,
    num_clients: int,
    key: Tensor,
    *,
    classes_per_client: PositiveInt = 2,
    alpha_sizes: Positive | None = None,
) -> Divided:
    """Give each client exactly ``classes_per_client`` classes, balanced over the classes.

    A class is divided equally among its clients, or by their sizes if ``alpha_sizes`` is given. The
    rows of a class without clients are not used.

    The name is that of McMahan et al. 2017, "Communication-efficient learning of deep networks from
    decentralized data", section 3, whose clients have at most two classes.

    Parameters
    ----------
    classes_per_client
        Exact number of classes per client.
    alpha_sizes
        Concentration of the clients' sizes, by which a class is then divided. A smaller value makes
        sizes differ more.
    """
    if not 1 <= classes_per_client <= data.num_classes:
        raise DataError(
            f"partition.classes_per_client must be 1..{data.num_classes}, not {classes_per_client}"
        )
    draw = generator(key, "classes")
    holders = np.zeros(data.num_classes, dtype=np.int64)
    shares = np.zeros((data.num_classes, num_clients))
    for client in range(num_clients):
        by_holders = np.lexsort((draw.random(data.num_classes), holders))  # ties at random
        chosen = by_holders[:classes_per_client]
        holders[chosen] += 1
        shares[chosen, client] = 1.0
    held = holders > 0
    shares[held] /= shares[held].sum(1, keepdims=True)
    return _divided_by(_with_sizes(shares, alpha_sizes, generator(key, "sizes")), data, key)


def natural(data: Dataset, num_clients: int, key: Tensor) -> Divided:
    """Give each client the rows that the data set assigns to it.

    Test rows without assigned clients are divided as by :func:`iid`.
    """
    if data.clients is None:
        raise DataError(
            f"partition.name = 'natural' needs the client of each row, which {data.name} does not "
            "have (data.client = a column, or an array 'client')"
        )
    count = int(data.clients.max()) + 1
    if count != num_clients:
        raise DataError(
            f"clients.num_clients = {num_clients}, but {data.name} has {count} natural clients"
        )
    train = [np.flatnonzero(data.clients.numpy() == client) for client in range(num_clients)]
    if data.clients_test is None:
        return train, iid(data, num_clients, key)[1]
    clients_test = data.clients_test.numpy()
    return train, [np.flatnonzero(clients_test == client) for client in range(num_clients)]


def _with_sizes(
    shares: npt.NDArray[np.float64], alpha: float | None, draw: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return shares (classes, clients), multiplied by sizes of clients drawn from Dirichlet(alpha).

    Label and quantity skew are mixed in this way (Li, Diao, Chen, He 2022, "Federated learning on
    non-IID data silos: an experimental study").
    """
    if alpha is None:
        return shares
    _positive(alpha, "partition.alpha_sizes")
    sizes = draw.dirichlet(np.full(shares.shape[1], alpha))
    both = shares * np.maximum(sizes, TINY)
    mixed: npt.NDArray[np.float64] = both / np.maximum(both.sum(1, keepdims=True), TINY**2)
    return mixed


def _positive(alpha: float, key: str) -> None:
    if not alpha > 0:
        raise DataError(f"{key} must be greater than 0, not {alpha}")


def _divided_by(shares: npt.NDArray[np.float64], data: Dataset, key: Tensor) -> Divided:
    """Divide the rows of each class by its row of ``shares`` (classes, clients)."""
    train, test = (
        _split_by(y, shares, generator(key, "rows", split)) for split, y in enumerate(_labels(data))
    )
    return train, test


def _split_by(y: Ints, shares: npt.NDArray[np.float64], draw: np.random.Generator) -> list[Ints]:
    """Shuffle the rows of each class and cut them; classes with zero shares are left out."""
    parts: list[list[Ints]] = [[] for _ in range(shares.shape[1])]
    for label, class_shares in enumerate(shares):
        rows = draw.permutation(np.flatnonzero(y == label))
        if class_shares.sum() == 0:
            continue
        cut = np.split(rows, _bounds(class_shares, len(rows)))
        for client, part in enumerate(cut):
            parts[client].append(part)
    nothing = np.zeros(0, dtype=np.int64)
    return [np.sort(np.concatenate([nothing, *of_client])) for of_client in parts]


def _bounds(shares: npt.NDArray[np.float64], count: int) -> Ints:
    """Return the cut positions of ``count`` rows by ``shares`` (clients,), rounded."""
    return np.round(np.cumsum(shares)[:-1] * count).astype(np.int64)
