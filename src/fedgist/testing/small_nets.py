"""A small net whose layers look at the rows of a pass: batch norm and dropout."""

from __future__ import annotations

import math

from torch import nn

FACTORY = f"{__name__}:normed"
#: Two architectures with features of one width, for a recipe's ``clients.architectures``.
NORMED: dict[str, dict[str, object]] = {
    "wide": {"model": FACTORY, "width": 7, "share": 0.4},
    "flat": {"model": FACTORY, "width": 6, "share": 0.6},
}


def normed(input_shape: tuple[int, ...], num_classes: int, *, width: int = 4) -> nn.Module:
    """Return a net with batch norm and dropout in its body, and dropout before its head."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), width, bias=False),  # batch norm takes a bias off
        nn.BatchNorm1d(width),
        nn.Dropout(0.2),
        nn.Linear(width, 5),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(5, num_classes),
    )
