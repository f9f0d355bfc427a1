"""A learned projection before the head, so that models of different widths make equal features.

The projection is a linear layer at the end of the body. Its head is new, because the model's own
head takes features of another width. If dropout comes before the head, features are projected
first, and dropout then acts on the projected features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn


class ProjectedHead(nn.Module):
    """A projection (..., m) -> (..., width), and a head on its output, in place of a head."""

    def __init__(self, old: nn.Linear, width: int) -> None:
        super().__init__()
        device, dtype = old.weight.device, old.weight.dtype
        project = nn.Linear(old.in_features, width, device=device, dtype=dtype)
        self.project: nn.Module = project
        self.head: nn.Module = nn.Linear(width, old.out_features, device=device, dtype=dtype)

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits (..., classes) of features ``z`` (..., m)."""
        out: Tensor = self.head(self.project(z))
        return out


def projected(module: nn.Module, head: str, width: int) -> tuple[nn.Module, str]:
    """Return the module with features of ``width``, and the name of its head.

    ``head`` names the linear layer that is the head now. A module whose head already takes
    ``width`` features is returned unchanged. Otherwise the module is changed in place.
    """
    layer = module.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    if layer.in_features == width:
        return module, head
    if not head:  # the module is a linear layer alone, and its features are the input's numbers
        return nn.Sequential(nn.Flatten(), ProjectedHead(layer, width)), "1.head"
    outer, _, leaf = head.rpartition(".")
    setattr(module.get_submodule(outer), leaf, ProjectedHead(layer, width))
    return module, f"{head}.head"


def head_and_projection(module: nn.Module, head: str) -> str:
    """Return the name of the module that holds the head and its projection, if it has one."""
    outer = head.rpartition(".")[0]
    return outer if isinstance(module.get_submodule(outer), ProjectedHead) else head


@contextlib.contextmanager
def without_projection(body: nn.Module) -> Iterator[None]:
    """Inside this context, the body returns features before their projection."""
    heads = [layer for layer in body.modules() if isinstance(layer, ProjectedHead)]
    projections = [layer.project for layer in heads]
    for layer in heads:
        layer.project = nn.Identity()
    try:
        yield
    finally:
        for layer, project in zip(heads, projections, strict=True):
            layer.project = project
