"""What a server may know of a model whose body stays at the site: an outline.

The width of its features, its classes, its head, and the shapes of whatever else the method shares;
nothing of how the features are made. It stands where an architecture stands, so that the server can
work out what a valid message looks like. Its features are of the right shape and say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedgist.core.net import Architecture, Net


@dataclass(frozen=True)
class Outline:
    """What is told of an architecture: sizes, the head's name, and shapes of shared arrays."""

    name: str
    input_shape: tuple[int, ...]
    num_classes: int
    feature_width: int
    head: str = "head"
    head_bias: bool = True
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(arch: Architecture) -> Outline:
        """Return what is told of an architecture whose head alone may be known."""
        return Outline(
            arch.name,
            arch.input_shape,
            arch.num_classes,
            arch.feature_width,
            arch.head,
            arch.head_bias,
        )

    def architecture(self) -> Architecture:
        """Return an architecture that stands for the real one at the server."""
        shapes = {f"{self.head}.weight": (self.num_classes, self.feature_width), **self.shared}
        if self.head_bias:
            shapes[f"{self.head}.bias"] = (self.num_classes,)

        def start(seed: int) -> Net:
            del seed  # the server does not know the real start either
            return Net({name: torch.zeros(shape) for name, shape in shapes.items()}, {}, arch)

        arch = Architecture(
            name=self.name,
            module=_Blank(self.feature_width),
            head=self.head,
            feature_width=self.feature_width,
            num_classes=self.num_classes,
            head_bias=self.head_bias,
            input_shape=self.input_shape,
            start=start,
        )
        return arch


class _Blank(nn.Module):
    """A body without parameters, whose features have the right width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, *input) to (batch, width)."""
        return x.flatten(1)[:, :1].expand(-1, self.width) * 1.0
