"""Mean and standard deviation of rows that are read lazily, from a seeded sample of the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.data.dataset import Dataset
from fedgist.data.lazy_rows import PIECE, Inputs, LazyRows
from fedgist.data.sources.labelled_rows import moments

MOST = 2048  # rows of a sample
_AT_ONCE = 4 * PIECE  # bytes of a sample that is measured in one piece
Moments = tuple[tuple[float, ...], tuple[float, ...]]


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
