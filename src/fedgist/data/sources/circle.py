"""Points in a square, labelled by a circle, drawn from the run's seed for two clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data.dataset import Dataset

TRAINING, TEST = 80, 1000  # numbers of points
HALF_SIDE, RADIUS = 5.0, 26 / 7  # half the side of the square, radius of the circle


def circle(*, seed: int = 0) -> Dataset:
    """Draw 80 points of a square, with two clients. The class says whether a point is in a circle.

    Notes
    -----
    Points are uniform in the square from -5 to 5. The circle has radius 26/7, and 43 % of the
    points lie inside on average. The client on the left has the 40 training points with the smaller
    first coordinate. 1,000 test points are divided at the same place; the paper does not say how
    many it uses. All points are drawn from the run's seed, so every seed has different points.
    Pooled normalization: none, coordinates are left as they are.

    Examples
    --------
    A recipe's section::

        [data]
        name = "circle"

        [partition]
        name = "natural"

    References
    ----------
    Yu, Zhang, Poupart, "FedLog: Personalized federated classification with less communication and
    more flexibility", section 5 and fig. 1.
    """
    key = random.key(seed, "circle")
    x, x_test = (_points(random.fold(key, word), n) for word, n in _SPLITS)
    border = x[:, 0].sort().values[TRAINING // 2]
    return Dataset(
        "circle",
        x,
        _inside(x),
        x_test,
        _inside(x_test),
        2,
        classes=("outside", "inside"),
        clients=(x[:, 0] >= border).long(),
        clients_test=(x_test[:, 0] >= border).long(),
        client_names=("left", "right"),
    )


_SPLITS = (("training", TRAINING), ("test", TEST))


def _points(key: Tensor, count: int) -> Tensor:
    return HALF_SIDE * (2 * random.uniform(key, (count, 2)) - 1)


def _inside(x: Tensor) -> Tensor:
    return (x.double().square().sum(1) < RADIUS**2).to(torch.int64)
