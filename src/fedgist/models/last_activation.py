"""Activation at the end of a model's body, before its head: it bounds the features."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from torch import nn

Last = Literal["relu", "tanh", "clamp", "none"]
LARGEST_BOUND = 1e30  # the largest allowed bound; float32 ends at 3e38
BOUND = 2.0  # default bound of "clamp": FedLog's b
LAYERS = MappingProxyType({"relu": nn.ReLU, "tanh": nn.Tanh, "none": nn.Identity})


def last_activation(last: Last, bound: float | None) -> nn.Module:
    """Return the activation ``last``: ReLU, tanh, the clamp to [-``bound``, ``bound``], or none.

    The clamp is not preceded by ReLU. The module maps any shape to the same shape.
    """
    if last != "clamp" and last not in LAYERS:
        raise ValueError(f"model.last must be 'relu', 'tanh', 'clamp' or 'none', not {last!r}")
    if bound is not None and last != "clamp":
        raise ValueError(
            f"model.last_bound = {bound!r}: model.last = {last!r} does not read it, 'clamp' does"
        )
    if bound is not None and (isinstance(bound, bool) or not 0 < bound <= LARGEST_BOUND):
        raise ValueError(
            f"model.last_bound must be above 0 and at most {LARGEST_BOUND:g}, not {bound!r}"
        )
    bound = BOUND if bound is None else bound
    return nn.Hardtanh(-bound, bound) if last == "clamp" else LAYERS[last]()
