"""Numbers whose spread 32 bits cannot hold stay in 64 bits until they are normalized.

A float32 number has about 7 digits. Times in seconds since 1970 that differ by a second are then
all equal. So if some column's mean is more than 1,000 times its standard deviation, all inputs (or
all predicted numbers) are kept in float64. They are centred and scaled in float64, and only then
become float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FAR = 1e3  # up to here float32 holds the spread to 6e-5 of a standard deviation, or better
LOST = 1e5  # beyond, to less than two digits
_AT_ONCE = 1 << 24  # numbers that are measured together, to bound copies


def narrowed(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return training and test numbers (rows, columns, ...) in float32, if it holds their spread.

    The first part decides, and NaN is ignored. Bytes and words stay as they are.
    """
    first = parts[0]
    if not first.is_floating_point() or first.is_meta:
        return parts
    exact = first.dtype == torch.float64 and is_far(first)
    return tuple(part.to(torch.float64 if exact else torch.float32) for part in parts)


def in_float32(x: Tensor) -> Tensor:
    """Return numbers in float32, whatever they are; bytes and words as they are."""
    return x.float() if x.dtype == torch.float64 else x


def far_moments(mean: Sequence[float], std: Sequence[float], times: float = FAR) -> list[int]:
    """Return the places in which ``mean`` is more than ``times`` as large as ``std``."""
    width = max(len(mean), len(std))  # one number stands for all
    pairs = zip([*mean] * (width // len(mean)), [*std] * (width // len(std)), strict=True)
    return [place for place, (m, s) in enumerate(pairs) if abs(m) > times * s]


def is_far(x: Tensor) -> bool:
    """Return whether a column of ``x`` (rows, columns, ...) is too far from 0 for its spread."""
    return bool(far_columns(x, FAR))


def far_columns(x: Tensor, times: float) -> list[int]:
    """Return the columns of ``x`` (rows, columns, ...) that vary, and whose mean is far from 0.

    It is more than ``times`` as large as the standard deviation.
    """
    if not len(x) or x.is_meta:
        return []
    at_once = max(1, _AT_ONCE // max(1, x[:, 0].numel()))
    pieces = torch.split(x.transpose(0, 1), at_once)
    far = torch.cat([_are_far(piece.flatten(1), times) for piece in pieces])
    places: list[int] = far.nonzero().flatten().tolist()
    return places


def _are_far(columns: Tensor, times: float) -> Tensor:
    """Return Booleans (columns,): which ``columns`` (columns, rows) are far from 0."""
    values = columns.double()
    mean = values.nanmean(1, keepdim=True)
    std = (values - mean).square().nanmean(1).sqrt()
    gone = values.isnan()  # a constant's mean may be off by a rounding
    least, most = (values.where(~gone, end) for end in (torch.inf, -torch.inf))
    varies = most.amax(1) > least.amin(1)
    return varies & std.isfinite() & (mean.squeeze(1).abs() > times * std)
