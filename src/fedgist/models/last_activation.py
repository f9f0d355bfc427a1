"""The activation at the end of a model's body, before its head: it says how large features are."""

from __future__ import annotations

from typing import Literal

from torch import nn

Last = Literal["relu", "tanh", "clamp"]
BOUND = 2.0  # of "clamp", where a recipe does not say: FedLog's b


def last_activation(last: Last, bound: float | None) -> nn.Module:
    """Return ReLU, tanh, or the clamp to [-``bound``, ``bound``], before which there is no ReLU.

    Raises
    ------
    ValueError
        If ``last`` is none of them, or ``bound`` is not above 0, or is given without a clamp.
    """
    layers = {"relu": nn.ReLU, "tanh": nn.Tanh}
    if last != "clamp" and last not in layers:
        msg = f"model.last must be 'relu', 'tanh' or 'clamp', not {last!r}"
        raise ValueError(msg)
    if bound is not None and last != "clamp":
        msg = f"model.last_bound = {bound!r}: model.last = {last!r} does not read it, 'clamp' does"
        raise ValueError(msg)
    if bound is not None and (isinstance(bound, bool) or not bound > 0):
        msg = f"model.last_bound must be above 0, not {bound!r}"
        raise ValueError(msg)
    bound = BOUND if bound is None else bound
    return nn.Hardtanh(-bound, bound) if last == "clamp" else layers[last]()
