"""Fully connected networks, for inputs of any shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from fedgist.models.last_activation import Last, last_activation


def logistic(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Return logistic regression: a linear layer on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    hidden: Sequence[int] = (64,),
    dropout: float = 0.0,
    last: Last = "relu",
    last_bound: float | None = None,
) -> nn.Module:
    """Return a multilayer perceptron: ReLU layers of widths ``hidden``, dropout, a linear layer.

    Parameters
    ----------
    hidden
        Widths of the hidden layers.
    dropout
        Dropout rate before the last layer.
    last
        Activation at the end of the body, before the head. ``clamp`` cuts features to
        [-``last_bound``, ``last_bound``] without ReLU.
    last_bound
        Bound of ``clamp``. The default is 2.
    """
    if isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout!r}")
    if bad := [size for size in hidden if isinstance(size, bool) or size < 1]:
        raise ValueError(f"hidden must hold widths of at least 1, not {bad[0]!r}")
    end = last_activation(last, last_bound)
    if last != "relu" and not hidden:
        raise ValueError(
            f"model.last = {last!r} needs a hidden layer: set model.hidden, or remove model.last"
        )
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for place, size in enumerate(hidden, 1):
        layers += [nn.Linear(width, size), end if place == len(hidden) else nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(width, num_classes))
