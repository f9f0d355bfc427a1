"""Partition by a hierarchy of classes: TensorFlow Federated's split of CIFAR-100."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedgist.core.bounds import Positive
from fedgist.data.dataset import Dataset
from fedgist.data.partition_rules import Divided, Ints, generator
from fedgist.errors import DataError

Concentration = Positive


def pachinko(
    data: Dataset,
    num_clients: int,
    key: Tensor,
    *,
    alpha_coarse: Concentration = 0.1,
    alpha_fine: Concentration = 10.0,
) -> Divided:
    """Give each client the same number of rows, from few superclasses and most of their classes.

    A client draws shares of superclasses from Dirichlet(``alpha_coarse``), and of the classes in
    each from Dirichlet(``alpha_fine``). Client after client draws its rows without replacement: a
    superclass, a class in it, and a row of the class. Exhausted classes are skipped.

    Li and McCallum 2006, "Pachinko allocation"; Reddi et al. 2021, "Adaptive federated
    optimization", appendix C.1, with the same defaults.

    Parameters
    ----------
    alpha_coarse
        Concentration of the superclasses. A smaller value gives each client fewer superclasses.
    alpha_fine
        Concentration of the classes in a superclass. A larger value gives each client more of them.
    """
    if not data.superclasses:
        raise DataError(
            f"partition.name = 'pachinko' needs superclasses, which {data.name} does not name"
        )
    above = np.array(data.superclasses)
    members = [np.flatnonzero(above == group) for group in range(above.max() + 1)]
    draw = generator(key, "pachinko")
    coarse = draw.dirichlet(np.full(len(members), alpha_coarse), num_clients)
    fine = [draw.dirichlet(np.full(len(classes), alpha_fine), num_clients) for classes in members]
    shares = np.zeros((num_clients, data.num_classes))
    for group, classes in enumerate(members):
        shares[:, classes] = coarse[:, [group]] * fine[group]
    parts = []
    for split, y in (("train", data.y.numpy()), ("test", data.y_test.numpy())):
        parts.append(_drawn(y, shares, above, generator(key, "pachinko rows", split)))
    return parts[0], parts[1]


def _drawn(
    y: Ints, shares: NDArray[np.float64], above: Ints, draw: np.random.Generator
) -> list[Ints]:
    """Draw each client's rows without replacement, client after client."""
    left = [draw.permutation(np.flatnonzero(y == label)).tolist() for label in range(len(above))]
    counts = [len(part) for part in np.array_split(y, len(shares))]
    rows_of_clients = []
    for wanted, class_shares in zip(counts, shares, strict=True):
        rows = [left[_class(class_shares, above, left, draw)].pop() for _ in range(wanted)]
        rows_of_clients.append(np.sort(np.array(rows, dtype=np.int64)))
    return rows_of_clients


def _class(
    class_shares: NDArray[np.float64], above: Ints, left: list[list[int]], draw: np.random.Generator
) -> int:
    """Draw a superclass and a class in it among those with rows left."""
    there = np.array([len(rows) > 0 for rows in left])
    groups = np.bincount(above, class_shares)  # a superclass keeps its share until it is empty
    groups[np.bincount(above, there) == 0] = 0.0
    if groups.sum() == 0:  # every superclass of this client is exhausted
        return int(draw.choice(np.flatnonzero(there)))
    group = draw.choice(len(groups), p=groups / groups.sum())
    within = np.where(there & (above == group), class_shares, 0.0)
    if within.sum() == 0:
        within = (there & (above == group)).astype(np.float64)
    return int(draw.choice(len(class_shares), p=within / within.sum()))
