"""Batch norm over the present rows of a batch, for stacked clients or for one client at a time.

Both functions return the normalized batch with the mean and the (biased) variance of its rows,
(channels,). No gradient flows through mean and variance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fedgist.core.autograd_types import Lot, SavedTensors

Normed = tuple[Tensor, Tensor, Tensor]
_SPATIAL = 2  # the first dimension after rows and channels

gradients = torch.ops.aten.native_batch_norm_backward  # torch's own function has no public name


def of_stack(
    x: Tensor, mask: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Normed:
    """Normalize ``x`` (batch, channels, ...) by the rows with ``mask`` (batch,) true.

    ``weight`` and ``bias`` are (channels,). Under ``vmap``, one operation covers all clients.
    """
    shape, present = by_channel(x), mask.to(x.dtype).unsqueeze(1)
    count = (present.sum() * x[0, 0].numel()).clamp(min=1.0)
    mean = (_row_sums(x) * present).sum(0) / count
    apart = x - mean.view(shape)
    var = (_row_sums(apart.square()) * present).sum(0) / count
    scale = torch.rsqrt(var + eps)
    if weight is None or bias is None:
        out = apart * scale.view(shape)
    else:
        out = torch.addcmul(bias.view(shape), apart, (scale * weight).view(shape))
    return out, mean.detach(), var.detach()


def of_each(
    x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Normed:
    """Normalize as :func:`of_stack` does, with torch's own batch norm, one client at a time.

    ``x`` is (batch, channels, ...), ``mask`` (batch,), ``weight`` and ``bias`` (channels,).
    ``mask`` None means that all rows are present. Absent rows are left out and are 0 in the result.
    This is faster on a CPU if clients have many numbers.
    """
    out, mean, rsqrt = _norm_each(x, mask, weight, bias, eps)
    return out, mean, (rsqrt**-2 - eps).clamp(min=0.0)


def by_channel(x: Tensor) -> tuple[int, ...]:
    """Return the shape that broadcasts (channels,) against ``x`` (batch, channels, ...)."""
    return (1, -1, *(1 for _ in x.shape[_SPATIAL:]))


def _row_sums(x: Tensor) -> Tensor:
    """Return the sums over all dimensions but rows and channels, (batch, channels)."""
    return x.flatten(_SPATIAL).sum(_SPATIAL) if x.dim() > _SPATIAL else x


class _Kept(SavedTensors, Protocol):
    eps: float


class _Each(torch.autograd.Function):
    """Torch's batch norm of the present rows, with a batching rule that calls it per client.

    It returns means and reciprocal deviations with the batch, as torch does.
    """

    @staticmethod
    def forward(
        x: Tensor, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Normed:
        some = _some(mask)
        seen = x if some is None else x[some]
        out, mean, rsqrt = torch.native_batch_norm(
            seen, weight, bias, None, None, training=True, momentum=0.0, eps=eps
        )
        return _placed(out, x, some), mean, rsqrt

    @staticmethod
    def setup_context(
        ctx: _Kept,
        inputs: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float],
        output: Normed,
    ) -> None:
        x, mask, weight, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, mask, weight, *output[1:])

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mask, weight, mean, rsqrt = ctx.saved_tensors
        some, learned = _some(mask), weight is not None
        seen, grad = (a if some is None else a[some] for a in (x, grads[0].contiguous()))
        about = weight, None, None, mean, rsqrt, True, ctx.eps, [True, learned, learned]
        for_x, for_weight, for_bias = gradients(grad, seen, *about)
        return _placed(for_x, x, some), None, for_weight, for_bias, None

    @staticmethod
    def vmap(
        info: Lot, in_dims: tuple[int | None, ...], *args: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
        *arrays, eps = args
        rows = [
            (a,) * info.batch_size if a is None or d is None else a.unbind(d)
            for a, d in zip(arrays, in_dims[:-1], strict=True)
        ]
        normed = [_norm_each(*client, eps) for client in zip(*rows, strict=True)]
        return tuple(torch.stack(outputs) for outputs in zip(*normed, strict=True)), (0, 0, 0)


_norm_each: Callable[..., Normed] = _Each.apply


def _some(mask: Tensor | None) -> Tensor | None:
    """Return the mask if only some rows are present, else None."""
    if mask is None or bool(mask.all()) or not bool(mask.any()):
        return None
    return mask


def _placed(rows: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return rows at their positions in ``x``, with zeros at the other positions."""
    if mask is None:
        return rows
    out = rows.new_zeros(x.shape)
    out[mask] = rows
    return out
