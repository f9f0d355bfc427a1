"""Types of torch's arguments to the functions of an ``autograd.Function``, which are untyped."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SavedTensors(Protocol):
    """The context: tensors that the forward pass saves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors; None is returned as None."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Mark the outputs through which no gradient flows."""


class Lot(Protocol):
    """The information that torch gives a batching rule."""

    batch_size: int
