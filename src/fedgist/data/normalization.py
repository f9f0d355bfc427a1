"""Normalization of inputs: by all training rows, by each client's training rows, or not at all.

The mean and deviation of rows that are read lazily are those of a seeded sample of the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.far_numbers import LOST, far_columns, far_moments
from fedgist.data.client_rows import Rows
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import PIECE, Inputs, LazyRows, sample_of
from fedgist.data.sources.splits import moments
from fedgist.errors import DataError

_LOOKED_AT = 64  # lazy rows that decide whether float32 holds a column
Normalize = Literal["pooled", "client", "none"]
MOST = 2048  # rows of a sample
_AT_ONCE = 4 * PIECE  # bytes of a sample that is measured in one piece
Moments = tuple[tuple[float, ...], tuple[float, ...]]


def with_moments(
    data: Dataset, normalize: Normalize, mean: Sequence[float] = (), std: Sequence[float] = ()
) -> Dataset:
    """Return the data with the recipe's mean and std, with none, or unchanged.

    ``mean`` and ``std`` refer to ``x / scale``: one number for each channel or numeric column, or
    one for all. The 0/1 columns of categories are not normalized.
    """
    if normalize == "none":
        if mean or std:
            raise DataError(
                "data.normalize = 'none' leaves inputs as they are: leave out data.mean and std"
            )
        _check_held(data, far_columns(_looked_at(data), LOST))
        return replace(data, mean=(0.0,), std=(1.0,), measured=data.measured - {"moments"})
    if not mean and not std:
        return data if normalize == "client" else with_sampled_moments(data)
    used = _numbers(data)
    stated = (
        spread_over_columns("mean", mean, used, data.name),
        spread_over_columns("std", std, used, data.name),
    )
    if data.x.dtype == torch.float32:
        _check_held(data, far_moments(*stated, LOST))
    return replace(data, mean=stated[0], std=stated[1], measured=data.measured - {"moments"})


def _looked_at(data: Dataset) -> Tensor:
    """Return the training rows that are in float64, of lazy rows a few; else no rows."""
    if data.x.dtype != torch.float64:
        return data.x[:0]
    few = sample_of(len(data.y), _LOOKED_AT)
    return data.x if data.lazy is None else data.lazy.read(few)


def _check_held(data: Dataset, places: Sequence[int]) -> None:
    """Raise DataError if there are columns whose spread float32 does not hold, at ``places``."""
    if not places:
        return
    names = [name for column in data.columns for name in column.inputs]
    name = repr(names[places[0]]) if names else f"{places[0]} (counted from 0)"
    raise DataError(
        f"{data.name}: the mean of column {name} is more than {LOST:,.0f} times its standard "
        "deviation, and 32-bit numbers do not hold such a small spread: subtract a number from the "
        "column"
    )


def client_moments(data: Dataset, train: Rows) -> tuple[Tensor, Tensor]:
    """Return the mean and std of each client's training rows: (clients, channels) each."""
    by_client = [own_moments(data, train[client]) for client in range(len(train))]
    mean, std = (torch.tensor(part, dtype=torch.float64) for part in zip(*by_client, strict=True))
    return mean, std


def own_moments(data: Dataset, rows: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and std of the training rows ``rows`` (rows,) by channel or column."""
    used = _numbers(data)
    mean, std = input_moments(data.inputs[rows], data.scale)
    numbers = [i for i, is_number in enumerate(used) if is_number]
    return (
        _spread([mean[i] for i in numbers], used, 0.0),
        _spread([std[i] for i in numbers], used, 1.0),
    )


def stated_moments(data: Dataset, rows: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the moments of :func:`own_moments` as a recipe states them: of numbers alone."""
    used = _numbers(data)
    mean, std = own_moments(data, rows)
    return tuple(itertools.compress(mean, used)), tuple(itertools.compress(std, used))


def _numbers(data: Dataset) -> tuple[bool, ...]:
    """Return for each channel or column whether it is normalized."""
    numeric = tuple(column.categories is None for column in data.columns for _ in column.inputs)
    return numeric or (True,) * data.input_shape[0]


def spread_over_columns(
    key: Literal["mean", "std"], values: Sequence[float], used: Sequence[bool], name: str
) -> tuple[float, ...]:
    """Return the recipe's ``data.mean`` or ``data.std`` by channel or column.

    ``used`` says which are normalized. ``name`` is the name of the data.
    """
    if len(values) not in {1, sum(used)}:
        raise DataError(
            f"data.{key} has {len(values)} numbers; {name} needs {sum(used)}, or 1 for all"
        )
    return _spread(values, used, 0.0 if key == "mean" else 1.0)


def _spread(values: Sequence[float], used: Sequence[bool], else_: float) -> tuple[float, ...]:
    """Return one number per channel or column: a given one where ``used``, else ``else_``."""
    given = iter([values[0]] * sum(used) if len(values) == 1 else values)
    return tuple(next(given) if is_used else else_ for is_used in used)


def input_moments(x: Inputs, scale: float) -> Moments:
    """Return mean and standard deviation of ``x / scale`` by channel or column.

    ``x`` is ``(rows, channels, ...)``. Of lazy rows at most 2,048 are read.
    """
    return moments(x, scale) if isinstance(x, Tensor) else _sampled(x, scale)


def with_sampled_moments(data: Dataset) -> Dataset:
    """Return lazy data with the moments of a sample of the training rows; others unchanged."""
    if data.lazy is None or "moments" not in data.measured:
        return data
    mean, std = _sampled(data.lazy, data.scale)
    count = len(data.x)
    note = f"mean and std are those of {min(count, MOST):,} of {count:,} training rows"
    return replace(data, mean=mean, std=std, how_read=(*data.how_read, note))


def _sampled(x: LazyRows, scale: float) -> Moments:
    drawn = random.choice(random.key(0, "moments"), len(x), MOST)
    sample = x[torch.tensor(drawn, dtype=torch.int64)]
    if len(sample) * x.source.row_bytes <= _AT_ONCE:
        return moments(sample.read(torch.arange(len(sample))), scale)
    return _merged((rows for _, rows in sample.pieces()), scale)


def _merged(pieces: Iterator[Tensor], scale: float) -> Moments:
    """Return the moments of rows that come in pieces ``(rows, channels, ...)``.

    Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
    variances".
    """
    count, mean, square = 0, torch.zeros(1), torch.zeros(1)
    least, most = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    for rows in pieces:
        values = rows.transpose(0, 1).flatten(1).double() / scale
        new, spread = values.shape[1], values.var(1, correction=0)
        step = values.mean(1) - mean
        square = square + spread * new + step.square() * (count * new / (count + new))
        mean, count = mean + step * (new / (count + new)), count + new
        least, most = torch.minimum(least, values.amin(1)), torch.maximum(most, values.amax(1))
    std = torch.where(least == most, 1.0, (square / count).sqrt())
    return tuple(mean.tolist()), tuple(std.tolist())
