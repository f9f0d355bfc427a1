"""From a user's arrays to a data set.

Test rows held out, labels and clients numbered, columns measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgist.core.random import key, permutation
from fedgist.data.dataset import Dataset
from fedgist.errors import DataError

Values = NDArray[Any]
_EXACT = 2**53  # whole numbers beyond are not exact in double precision


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples (rows, *shape), their labels, and their clients where known, as text."""

    x: Tensor
    labels: Values
    clients: Values | None = None

    def take(self, mask: Values) -> Examples:
        """Return the rows where ``mask`` is true."""
        clients = None if self.clients is None else self.clients[mask]
        return Examples(self.x[torch.from_numpy(mask)], self.labels[mask], clients)


def held_out(labels: Values, fraction: float) -> Values:
    """Mark a fixed random share of each class as test rows.

    Every class keeps at least one training row.
    """
    if not 0 <= fraction < 1:
        msg = f"test_fraction is {fraction}, outside 0 <= test_fraction < 1"
        raise DataError(msg)
    order = permutation(key(0, "test split"), len(labels)).numpy()
    _, classes, counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    groups = np.split(order[np.argsort(classes, kind="stable")], np.cumsum(counts)[:-1])
    mask = np.zeros(len(labels), dtype=bool)
    for group in groups:
        mask[group[: min(int(fraction * len(group) + 0.5), len(group) - 1)]] = True
    return mask


def split(rows: Examples, fraction: float) -> tuple[Examples, Examples]:
    """Split rows into training and test rows."""
    mask = held_out(rows.labels, fraction)
    return rows.take(~mask), rows.take(mask)


def names(values: Values, what: str) -> Values:
    """Return labels or clients (whole numbers, truth values or text) as text.

    Raises
    ------
    DataError
        If a value is something else, a fraction for one; ``what`` begins the message.
    """
    if values.ndim != 1:
        msg = f"{what} have shape {list(values.shape)}; one a row is needed"
        raise DataError(msg)
    if values.dtype.kind == "f":
        whole = (np.abs(values) < _EXACT) & (values == np.round(values))
        if not whole.all():
            row = int(np.argmin(whole))
            msg = (
                f"{what} must be whole numbers or text; row {row} (counted from 0) holds "
                f"{values[row]}"
            )
            raise DataError(msg)
        values = values.astype(np.int64)
    if values.dtype.kind not in "iubUO" or (
        values.dtype.kind == "O" and not all(isinstance(v, str) for v in values)
    ):
        msg = f"{what} must be whole numbers or text, not {values.dtype}"
        raise DataError(msg)
    found, index = np.unique(values, return_inverse=True)
    return np.array([str(value) for value in found], dtype=object)[index]


def in_order(texts: Iterable[str]) -> tuple[str, ...]:
    """Sort different texts, as numbers if all are whole numbers."""
    found = set(texts)
    try:
        return tuple(sorted(found, key=lambda text: (int(text), text)))
    except ValueError:
        return tuple(sorted(found))


def codes(texts: Values, known: tuple[str, ...]) -> Tensor:
    """Return the position of each text in ``known``."""
    index = {text: number for number, text in enumerate(known)}
    return torch.tensor([index[text] for text in texts], dtype=torch.int64)


def moments(x: Tensor, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of ``x / scale`` per channel or column.

    A constant one has deviation 1.
    """
    if (
        x.dtype == torch.uint8
    ):  # counted by value: exact, and no copy of the images in floating point
        levels = torch.arange(256, dtype=torch.float64) / scale
        share = torch.stack(
            [channel.reshape(-1).bincount(minlength=256) for channel in x.unbind(1)]
        ).double()
        share = share / share.sum(1, keepdim=True)
        mean, square = share @ levels, share @ levels**2
        std = (square - mean**2).clamp(min=0).sqrt()
        constant = (share > 0).sum(1) == 1
    else:
        columns = x.transpose(0, 1).flatten(1).double() / scale
        std, mean = torch.std_mean(columns, dim=1, correction=0)
        constant = columns.amin(1) == columns.amax(1)
    return tuple(mean.tolist()), tuple(torch.where(constant, 1.0, std).tolist())


def dataset(
    name: str, train: Examples, test: Examples, *, classes: tuple[str, ...] = ()
) -> Dataset:
    """Put a data set together: number labels and clients in sorted order, measure the rows.

    Clients without training rows come after the others. A source that has an order of its own gives
    ``classes``.
    """
    if not len(train.x) or not train.x[0].numel():
        msg = f"{name} has no training {'columns' if len(train.x) else 'rows'}"
        raise DataError(msg)
    classes = classes or in_order(train.labels)
    if new := sorted(set(test.labels) - set(classes)):
        msg = (
            f"{name}: the test label {new[0]!r} is not among the training labels: "
            f"{', '.join(classes)}"
        )
        raise DataError(msg)
    known = _different(train.clients)
    clients = in_order(known) + in_order(_different(test.clients) - known)
    scale = 255.0 if train.x.dtype == torch.uint8 else 1.0
    mean, std = moments(train.x, scale)
    return Dataset(
        name,
        train.x,
        codes(train.labels, classes),
        test.x,
        codes(test.labels, classes),
        len(classes),
        scale=scale,
        mean=mean,
        std=std,
        classes=classes,
        clients=None if train.clients is None else codes(train.clients, clients),
        clients_test=None if test.clients is None else codes(test.clients, clients),
    )


def _different(texts: Values | None) -> set[str]:
    return set() if texts is None else set(texts)
