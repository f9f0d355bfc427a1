"""Outlines: the server's view of a model whose body stays at the site.

An outline holds the width of the features, the number of classes, the head, and the shapes of the
other shared arrays. It holds no information about the body. The server uses it in place of an
architecture to derive the form of a valid message. Its features have the right shape but no
meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedgist.core.nets.net import Architecture, Net
from fedgist.core.nets.parts import Layers


@dataclass(frozen=True)
class Outline:
    """The server's view of an architecture: sizes, the head's name, shapes of shared arrays."""

    name: str
    input_shape: tuple[int, ...]
    num_classes: int
    feature_width: int
    head: str = "head"
    head_bias: bool = True
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    words: int = 0
    places: tuple[int, ...] = ()
    projects: bool = False

    @staticmethod
    def of(arch: Architecture) -> Outline:
        """Return the outline of an architecture that shows only its head."""
        return Outline(
            arch.name,
            arch.input_shape,
            arch.num_classes,
            arch.feature_width,
            arch.head,
            arch.head_bias,
            words=arch.words,
            places=arch.places,
            projects=arch.projects,
        )

    def architecture(self) -> Architecture:
        """Return an architecture that the server uses in place of the real one."""
        shapes = {f"{self.head}.weight": (self.num_classes, self.feature_width), **self.shared}
        if self.head_bias:
            shapes[f"{self.head}.bias"] = (self.num_classes,)
        if self.projects:
            hidden = f"{self.head}.hidden"
            shapes[f"{hidden}.weight"] = (self.feature_width, self.feature_width)
            shapes[f"{hidden}.bias"] = (self.feature_width,)

        def start(seed: int) -> Net:
            del seed  # the server does not know the real start either
            return Net({name: torch.zeros(shape) for name, shape in shapes.items()}, {}, arch)

        arch = Architecture(
            name=self.name,
            module=_Blank(self.feature_width, self.places),
            layers=_layers(shapes),
            head=self.head,
            feature_width=self.feature_width,
            num_classes=self.num_classes,
            head_bias=self.head_bias,
            input_shape=self.input_shape,
            start=start,
            words=self.words,
            places=self.places,
            projects=self.projects,
        )
        return arch


def _layers(names: Iterable[str]) -> Layers:
    """Return arrays as layers, one layer per module; the first named one is the head."""
    layers: dict[str, list[str]] = {}
    for name in names:
        owner = name.rpartition(".")[0]
        first = next(iter(layers), owner)
        layers.setdefault(first if owner.startswith(f"{first}.") else owner, []).append(name)
    head, *rest = (tuple(layer) for layer in layers.values())
    return Layers((*rest, head))


class _Blank(nn.Module):
    """A body without parameters, with features of the right width."""

    def __init__(self, width: int, places: tuple[int, ...]) -> None:
        super().__init__()
        self.width, self.places = width, places

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, *input) to (batch, *places, width)."""
        first = x.flatten(1)[:, :1].view(-1, *(1 for _ in self.places), 1)
        return first.expand(-1, *self.places, self.width) * 1.0
