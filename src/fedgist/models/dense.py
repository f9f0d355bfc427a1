"""Fully connected nets, for inputs of any shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


def logistic(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Return logistic regression: a linear layer on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    hidden: Sequence[int] = (64,),
    dropout: float = 0.0,
) -> nn.Module:
    """Return linear layers of widths ``hidden`` with ReLU, then dropout and the last layer.

    Raises
    ------
    ValueError
        If a width is below 1, or dropout is not at least 0 and below 1.
    """
    if isinstance(dropout, bool) or not 0 <= dropout < 1:
        msg = f"dropout must be at least 0 and below 1, not {dropout!r}"
        raise ValueError(msg)
    if bad := [size for size in hidden if isinstance(size, bool) or size < 1]:
        msg = f"hidden must hold widths of at least 1, not {bad[0]!r}"
        raise ValueError(msg)
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(width, num_classes))
