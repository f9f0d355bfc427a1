"""The activation at the end of a model's body, before its head: it says how large features are."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from torch import nn

Last = Literal["relu", "tanh", "clamp", "none"]
LARGEST = 1e30  # float32 ends at 3e38
BOUND = 2.0  # of "clamp", where a recipe does not say: FedLog's b
LAYERS = MappingProxyType({"relu": nn.ReLU, "tanh": nn.Tanh, "none": nn.Identity})


def last_activation(last: Last, bound: float | None) -> nn.Module:
    """Return ReLU, tanh, the clamp to [-``bound``, ``bound``], or nothing: ``last`` says which.

    Before the clamp there is no ReLU.
    """
    if last != "clamp" and last not in LAYERS:
        raise ValueError(f"model.last must be 'relu', 'tanh', 'clamp' or 'none', not {last!r}")
    if bound is not None and last != "clamp":
        raise ValueError(
            f"model.last_bound = {bound!r}: model.last = {last!r} does not read it, 'clamp' does"
        )
    if bound is not None and (isinstance(bound, bool) or not 0 < bound <= LARGEST):
        raise ValueError(f"model.last_bound must be above 0 and at most {LARGEST:g}, not {bound!r}")
    bound = BOUND if bound is None else bound
    return nn.Hardtanh(-bound, bound) if last == "clamp" else LAYERS[last]()
