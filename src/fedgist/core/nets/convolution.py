"""Convolution and 2x2 max-pooling for stacked clients, on a CPU about twice as fast as torch's own.

:func:`fedgist.core.nets.layers.replace_layers` replaces torch's layers with these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedgist.core.autograd_types import Lot, SavedTensors
from fedgist.core.nets.compiled.compiled_convolution import Settings, convolve
from fedgist.core.nets.compiled.kernel_library import Kernel

# Measured bounds on channels in and out: joint convolution and pooling is faster up to these.
IMAGE, NARROW = 4, 16

# It keeps the gradient at entries of x above t, and puts zeros elsewhere, in one pass. A comparison
# and a product would take three passes.
threshold_backward = torch.ops.aten.threshold_backward


class Conv2d(nn.Module):
    """A convolution, with the max-pooling and the ReLU after it if they are done in one pass.

    Stacked clients run one by one (``each``), as one ``grouped`` convolution, or by the
    ``compiled`` kernels. The first two compute torch's own max-pooling ``pool`` as :func:`pooled`.
    """

    def __init__(self, old: nn.Conv2d, pool: nn.MaxPool2d | None = None) -> None:
        super().__init__()
        self.weight, self.bias = old.weight, old.bias
        self.pool: nn.MaxPool2d | MaxPool2d | None = pool
        self.kernel: Kernel = "grouped"
        self.relu = False
        self.settings = (old.stride, old.padding, old.dilation, old.groups)
        self.compilable = _compiled_settings(old)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x`` (batch, channels, height, width), and pool and cut as the layer does."""
        if self.compilable and self.kernel == "compiled" and is_plain(x):
            settings = replace(self.compilable, pool=self.pool is not None, relu=self.relu)
            return convolve(x, self.weight, self.bias, settings)
        out = self._by_torch(x)
        return out.relu() if self.relu else out

    def _by_torch(self, x: Tensor) -> Tensor:
        by_torch: Callable[..., Tensor] = _EachConv.apply if self.kernel == "each" else F.conv2d
        if self.pool is None:
            return by_torch(x, self.weight, self.bias, *self.settings)
        if type(self.pool) is nn.MaxPool2d and x.device.type == "cpu":
            return pooled(by_torch, x, self.weight, self.bias, self.settings[1])
        out: Tensor = self.pool(by_torch(x, self.weight, self.bias, *self.settings))
        return out


def _compiled_settings(conv: nn.Conv2d) -> Settings | None:
    """Return a layer's settings for the compiled kernels, or None if they do not have it."""
    plain = conv.stride == conv.dilation == (1, 1) and conv.groups == 1
    if not plain or isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        return None
    rows, columns = conv.padding
    return Settings((rows, columns))


def is_plain(x: Tensor) -> bool:
    """Return whether the compiled kernels can read ``x``: float32 in this machine's memory.

    What torch traces when it exports a program has no memory.
    """
    in_memory = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return type(x) is Tensor and in_memory and x.dtype == torch.float32


def pooled(
    convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any
) -> Tensor:
    """Convolve ``x`` (batch, channels, height, width) and max-pool 2x2 windows.

    ``weight`` is (out, in, height, width) and ``bias`` (out,). The four positions of a window are
    four kernels: the given kernel shifted by a pixel down, right or both. One convolution of stride
    2 computes all four, and the maximum is taken over whole channels. Four times the channels fill
    the vector units, which a convolution of an image to few channels leaves idle, and no step works
    on every other pixel.
    """
    shifted = [
        F.pad(weight, (right, 1 - right, down, 1 - down)) for down in (0, 1) for right in (0, 1)
    ]
    four = convolve(
        x, torch.cat(shifted), None if bias is None else bias.repeat(4), (2, 2), padding, (1, 1), 1
    )
    out: Tensor = _MaxOfFour.apply(four)  # type: ignore[no-untyped-call]
    return out


def can_pool(conv: nn.Conv2d, pool: nn.MaxPool2d) -> bool:
    """Return whether a convolution and the ``pool`` after it are faster as one operation.

    They are for a convolution of stride 1 from an image to few channels.
    """
    return (
        pools_by_two(pool)
        and not pool.ceil_mode
        and conv.in_channels <= IMAGE
        and conv.out_channels <= NARROW
        and conv.groups == 1
        and conv.stride == conv.dilation == (1, 1)
        and isinstance(conv.padding, tuple)
        and conv.padding_mode == "zeros"
    )


def pools_by_two(pool: nn.MaxPool2d) -> bool:
    """Return whether a pooling takes adjacent windows of 2x2."""

    def both(value: Any) -> tuple[int, int]:
        return value if isinstance(value, tuple) else (value, value)

    plain = (
        not pool.return_indices and both(pool.padding) == (0, 0) and both(pool.dilation) == (1, 1)
    )
    return plain and both(pool.kernel_size) == both(pool.stride) == (2, 2)


class _Saved(SavedTensors, Protocol):
    """The context of a convolution: its settings as well."""

    settings: tuple[object, ...]


class _EachConv(torch.autograd.Function):
    """F.conv2d with a batching rule that calls it once per client.

    On a CPU this is faster than one grouped convolution. Gradients flow through these calls, except
    where a loss takes the gradient of a loss: that meets the function before its batching rule.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        return F.conv2d(x, weight, bias, *settings)

    @staticmethod
    def setup_context(ctx: _Saved, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.settings = inputs[3:]
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: _Saved, *grads: Tensor) -> tuple[Tensor | None, ...]:
        convolve: Callable[..., Tensor] = F.conv2d
        given = [tensor for tensor in ctx.saved_tensors if tensor is not None]
        without = [None] * (3 - len(given))  # a layer without a bias
        back = torch.func.vjp(lambda *t: convolve(*t, *without, *ctx.settings), *given)[1]
        return *back(grads[0]), *without, *(None for _ in ctx.settings)

    @staticmethod
    def vmap(info: Lot, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        rows = [
            a.unbind(d) if d is not None else (a,) * info.batch_size
            for a, d in zip(args[:3], in_dims[:3], strict=True)
        ]
        return torch.stack(
            [F.conv2d(*tensors, *args[3:]) for tensors in zip(*rows, strict=True)]
        ), 0


class _Images(Protocol):
    """The context of a mean: the shape of its images."""

    shape: torch.Size


class _MaxOfFour(torch.autograd.Function):
    """The largest of four groups of channels (..., 4 x channels, height, width).

    If several are equal, the first of them gets the whole gradient.
    """

    @staticmethod
    def forward(four: Tensor) -> Tensor:
        a, b, c, d = four.chunk(4, -3)
        return torch.maximum(torch.maximum(a, b), torch.maximum(c, d))

    @staticmethod
    def setup_context(ctx: SavedTensors, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: SavedTensors, *grads: Tensor) -> Tensor:
        return _gradient(_of_four, ctx.saved_tensors[0], grads[0])

    @staticmethod
    def vmap(info: Lot, in_dims: tuple[int], four: Tensor) -> tuple[Tensor, int]:
        del info
        out: Tensor = _MaxOfFour.apply(four.movedim(in_dims[0], 0))  # type: ignore[no-untyped-call]
        return out, 0


class MaxPool2d(nn.Module):
    """Max-pooling of 2x2 windows, for images of even size."""

    def __init__(self, old: nn.MaxPool2d) -> None:
        super().__init__()
        self.old = old

    def forward(self, x: Tensor) -> Tensor:
        """Pool ``x`` (batch, channels, height, width)."""
        if x.device.type != "cpu" or x.shape[-1] % 2 or x.shape[-2] % 2:
            out: Tensor = self.old(x)
            return out
        pooled: Tensor = _MaxPool.apply(x)  # type: ignore[no-untyped-call]
        return pooled


class _MaxPool(torch.autograd.Function):
    """The larger of two rows, then the larger of two columns.

    The gradient goes to the selected pixel, and to exactly one among equal pixels.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        rows = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
        return torch.maximum(rows[..., ::2], rows[..., 1::2])

    @staticmethod
    def setup_context(ctx: SavedTensors, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: SavedTensors, *grads: Tensor) -> Tensor:
        return _gradient(_of_pool, ctx.saved_tensors[0], grads[0])

    @staticmethod
    def vmap(info: Lot, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        del info
        # forward works for any leading dimensions
        out: Tensor = _MaxPool.apply(x.movedim(in_dims[0], 0))  # type: ignore[no-untyped-call]
        return out, 0


class AveragePool2d(nn.Module):
    """The mean of each channel of an image, torch's adaptive pooling to one pixel."""

    def __init__(self, old: nn.AdaptiveAvgPool2d) -> None:
        super().__init__()
        self.old = old

    def forward(self, x: Tensor) -> Tensor:
        """Return the means (batch, channels, 1, 1) of ``x`` (batch, channels, height, width)."""
        mean: Callable[..., Tensor] = _Mean.apply if is_plain(x) else self.old
        return mean(x)


class _Mean(torch.autograd.Function):
    """The mean of a channel's numbers.

    The compiled convolutions leave the images of a batch innermost. From there torch's own mean
    takes ten times as long, because it does not write its result in the same order.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        images = x.movedim(-IMAGE, -1)
        if x.shape[-IMAGE] > 1 and images.is_contiguous():
            return images.mean((-3, -2)).mT.contiguous()[..., None, None]
        return x.mean((-2, -1), keepdim=True)

    @staticmethod
    def setup_context(ctx: _Images, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: _Images, *grads: Tensor) -> Tensor:
        return (grads[0] / (ctx.shape[-2] * ctx.shape[-1])).expand(ctx.shape)

    @staticmethod
    def vmap(info: Lot, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        del info
        # forward works for any leading dimensions
        mean: Callable[..., Tensor] = _Mean.apply
        return mean(x.movedim(in_dims[0], 0)), 0


class _Gradient(torch.autograd.Function):
    """The gradient of a pooling, written into its place: torch must not see a gradient in it.

    So a loss may take the gradient of another loss. There are no second derivatives.
    """

    @staticmethod
    def forward(rule: Callable[[Tensor, Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
        return rule(x, grad)

    @staticmethod
    def setup_context(ctx: SavedTensors, inputs: tuple[object, ...], output: Tensor) -> None:
        """Save nothing: there are no second derivatives."""

    @staticmethod
    def vmap(
        info: Lot, in_dims: tuple[int | None, ...], rule: object, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        # the rules work for any leading dimensions
        x, grad = (
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, in_dims[1:], strict=True)
        )
        return _gradient(rule, x, grad), 0


_gradient: Callable[..., Tensor] = _Gradient.apply


def _of_four(four: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the largest of four groups of channels."""
    a, b, c, d = four.chunk(4, -3)
    out = torch.empty_like(four)
    for_a, for_b, for_c, for_d = out.chunk(4, -3)
    below = threshold_backward(grad, torch.maximum(c, d) - torch.maximum(a, b), 0)
    above = grad - below
    threshold_backward.grad_input(above, b - a, 0, grad_input=for_b)
    torch.sub(above, for_b, out=for_a)
    threshold_backward.grad_input(below, d - c, 0, grad_input=for_d)
    torch.sub(below, for_d, out=for_c)
    return out


def _of_pool(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the larger of two rows, then of two columns."""
    top, bottom = x[..., ::2, :], x[..., 1::2, :]
    rows = torch.maximum(top, bottom)
    by_row, out = torch.empty_like(rows), torch.empty_like(x)
    left = torch.mul(grad, rows[..., ::2] >= rows[..., 1::2], out=by_row[..., ::2])
    torch.sub(grad, left, out=by_row[..., 1::2])
    above = torch.mul(by_row, top >= bottom, out=out[..., ::2, :])
    torch.sub(by_row, above, out=out[..., 1::2, :])
    return out
