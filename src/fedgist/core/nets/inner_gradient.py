"""The gradient of a loss within a loss: for a model that takes steps of its own in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedgist.core.losses import proximal
from fedgist.core.nets.net import Net


def gradient_and_value(
    loss: Callable[[Net], Tensor], net: Net, params: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradient of ``loss`` of the net with these ``params``, by name, and its value, ().

    In training the net runs aside (:meth:`Net.aside`). No gradient of the loss around this one
    flows through the results.
    """
    start = {name: p.detach() for name, p in params.items()}
    if net.run is None or not net.run.whole:  # clients may be stacked

        def at(arrays: dict[str, Tensor]) -> Tensor:
            return loss(net.aside().with_arrays(arrays))

        found, value = torch.func.grad_and_value(at)(start)
        return {name: g.detach() for name, g in found.items()}, value.detach()
    for p in start.values():
        p.requires_grad_()
    value = loss(net.aside().with_arrays(start))
    slopes = torch.autograd.grad(value, list(start.values()), materialize_grads=True)
    return dict(zip(start, slopes, strict=True)), value.detach()


def landing(params: Mapping[str, Tensor], targets: Mapping[str, Tensor], rate: float) -> Tensor:
    """Return a loss, (), whose plain step of this ``rate`` takes ``params`` to ``targets``.

    Its value is 0. So a step can do what is no step along a gradient.
    """
    value = proximal(params, targets) / rate
    return value - value.detach()
