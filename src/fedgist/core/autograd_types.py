"""What torch hands to the functions of an ``autograd.Function``, as types: its own are untyped."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Saved(Protocol):
    """The context: what the forward pass keeps for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors; those that are None come back as None."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Say through which outputs no gradient flows."""


class Lot(Protocol):
    """What a batching rule is told."""

    batch_size: int
