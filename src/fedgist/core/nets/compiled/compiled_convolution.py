"""The compiled convolution of stacked clients, with bias, pooling and ReLU in the same pass."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedgist.core.autograd_types import Lot, SavedTensors
from fedgist.core.nets.compiled.kernel_library import library, remove
from fedgist.errors import InputError

IMAGE = 4  # dimensions of a batch of images
#: The order of dimensions in memory: the images of a batch are innermost.
_TO_MEMORY, _FROM_MEMORY = (0, 2, 3, 4, 1), (0, 4, 1, 2, 3)


@dataclass(frozen=True)
class Settings:
    """The settings of a layer: zeros around an image, 2x2 max-pooling, and ReLU at the end."""

    padding: tuple[int, int] = (0, 0)
    pool: bool = False
    relu: bool = False


class _Context(SavedTensors, Protocol):
    """What the layer's forward pass leaves for its backward pass."""

    settings: Settings


class _Layer(ctypes.Structure):
    """The struct ``layer`` of ``kernels.c``."""

    _fields_ = [
        (name, c_int64)
        for name in (
            *("clients", "batch", "in_", "height", "width", "out", "rows", "cols"),
            *("pad_rows", "pad_cols", "pool", "relu"),
            *("x_client", "x_batch", "x_in", "x_row", "x_col", "w_client", "b_client"),
        )
    ]


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    """Convolve ``x`` (batch, in, height, width) in float32 with stride 1 on a CPU.

    ``weight`` is (out, in, rows, columns) and ``bias`` (out,). The result is (batch, out, height',
    width'), after pooling.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _Convolution.apply
    return apply(x, weight, bias, settings)[0]


def check() -> None:
    """Compare a layer and its gradients with torch's.

    Raises
    ------
    InputError
        If they differ: the compiler has made wrong code. The library is deleted.
    """
    draw = torch.Generator().manual_seed(0)
    x, weight, bias, weights = (
        torch.randn(shape, generator=draw)
        for shape in ((19, 3, 12, 11), (7, 3, 5, 3), (7,), (19, 7, 5, 5))
    )
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    ours = convolve(x, weight, bias, Settings((1, 0), pool=True, relu=True))
    theirs = functional.max_pool2d(functional.conv2d(x, weight, bias, padding=(1, 0)), 2).relu()
    pairs = [(ours, theirs)]
    gradients = [
        torch.autograd.grad((out * weights[:, :, :, :4]).sum(), inputs) for out in pairs[0]
    ]
    pairs += list(zip(*gradients, strict=True))
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs):
        remove()
        raise InputError("the compiled kernels give wrong results: try another compiler (CC)")


def _numbers(settings: Settings) -> list[int]:
    return [*settings.padding, settings.pool, settings.relu]


def _settings(numbers: list[int]) -> Settings:
    rows, columns, pool, relu = numbers
    return Settings((rows, columns), bool(pool), bool(relu))


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, numbers: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the layer's images, and which of four numbers each maximum is."""
    settings = _settings(numbers)
    clients, w, b = _stacks(x, weight, bias)
    layer = _layer(clients, w, b, settings)
    shape = len(clients), w.shape[1], *_out_sides(clients, w, settings), clients.shape[1]
    out = torch.empty(shape)
    which = torch.empty(shape if settings.pool else (len(clients), 0), dtype=torch.uint8)
    _call("fedgist_convolve", layer, clients, w, b, out, which if settings.pool else None)
    lead = x.shape[:-IMAGE]
    return _unstacked(out, lead), which.view(*lead, *which.shape[1:])


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    which: Tensor,
    numbers: list[int],
    needs: list[bool],
) -> list[Tensor]:
    """Return the gradients of input, weight and bias: those that are needed."""
    settings = _settings(numbers)
    clients, w, _ = _stacks(x, weight, None)
    layer = _layer(clients, w, None, settings)
    grad, out = (
        a.reshape(-1, *a.shape[-IMAGE:]).permute(_TO_MEMORY).contiguous() for a in (grad, out)
    )
    lead, in_memory = x.shape[:-IMAGE], [clients.shape[i] for i in _TO_MEMORY]
    for_x = torch.empty(in_memory) if needs[0] else None
    for_w = torch.zeros(w.shape) if needs[1] else None
    for_b = torch.zeros(w.shape[:2]) if needs[2] else None
    pooled = which if settings.pool else None
    _call("fedgist_convolve_backward", layer, clients, w, out, pooled, grad, for_x, for_w, for_b)
    gradients = (
        None if for_x is None else _unstacked(for_x, lead),
        None if for_w is None else for_w.view(*lead, *w.shape[1:]),
        None if for_b is None else for_b.view(*lead, w.shape[1]),
    )
    return [tensor for tensor in gradients if tensor is not None]


# as operations of torch, so that a recorded program has them (core/recorded.py)
_OPERATIONS = torch.library.Library("fedgist", "FRAGMENT")
_OPERATIONS.define(
    "convolve(Tensor x, Tensor weight, Tensor? bias, int[] numbers) -> (Tensor, Tensor)"
)
_OPERATIONS.define(
    "convolve_backward(Tensor grad, Tensor x, Tensor weight, Tensor out, Tensor which, "
    "int[] numbers, bool[] needs) -> Tensor[]"
)
_OPERATIONS.impl("convolve", _forward, "CPU")
_OPERATIONS.impl("convolve_backward", _backward, "CPU")
_FORWARD: Callable[..., tuple[Tensor, Tensor]] = torch.ops.fedgist.convolve.default
_BACKWARD: Callable[..., list[Tensor]] = torch.ops.fedgist.convolve_backward.default


class _Convolution(torch.autograd.Function):
    """The layer; its second output says which of four numbers each maximum is."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = _FORWARD(x, weight, bias, _numbers(settings))
        return out

    @staticmethod
    def setup_context(
        ctx: _Context,
        inputs: tuple[Tensor, Tensor, Tensor | None, Settings],
        output: tuple[Tensor, Tensor],
    ) -> None:
        x, weight, _, ctx.settings = inputs
        ctx.save_for_backward(x, weight, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        apply: Callable[..., tuple[Tensor, ...]] = _Gradient.apply
        needs = tuple(ctx.needs_input_grad[:3])
        wanted = iter(apply(grads[0], *ctx.saved_tensors, ctx.settings, needs))
        return *(next(wanted) if need else None for need in needs), None

    @staticmethod
    def vmap(
        info: Lot,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        x, weight = _first(info, in_dims[:2], x, weight)
        if bias is not None:
            (bias,) = _first(info, in_dims[2:3], bias)
        apply: Callable[..., tuple[Tensor, Tensor]] = _Convolution.apply
        return apply(x, weight, bias, settings), (0, 0)


class _Gradient(torch.autograd.Function):
    """The gradients of the layer's input, weight and bias: those that are needed.

    It is a function of its own because it needs a batching rule, for gradients of single rows.
    """

    @staticmethod
    def forward(
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        which: Tensor,
        settings: Settings,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor, ...]:
        return tuple(_BACKWARD(grad, x, weight, out, which, _numbers(settings), list(needs)))

    @staticmethod
    def setup_context(ctx: SavedTensors, inputs: tuple[object, ...], output: object) -> None:
        """Save nothing: there are no second derivatives."""

    @staticmethod
    def vmap(
        info: Lot,
        in_dims: tuple[int | None, ...],
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        which: Tensor,
        *rest: object,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        apply: Callable[..., tuple[Tensor, ...]] = _Gradient.apply
        gradients = apply(*_first(info, in_dims[:5], grad, x, weight, out, which), *rest)
        return gradients, (0,) * len(gradients)


def _first(info: Lot, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors with the batched dimension first; shared ones are repeated without a copy."""
    return tuple(
        a.expand(info.batch_size, *a.shape) if d is None else a.movedim(d, 0)
        for a, d in zip(tensors, in_dims, strict=True)
    )


def _stacks(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return images (K, batch, ...), weights (K, ...) and biases (K, out) with dense weights."""
    x = x.reshape(-1, *x.shape[-IMAGE:])
    weight = weight.reshape(-1, *weight.shape[-IMAGE:])
    if not weight[:1].is_contiguous():
        weight = weight.contiguous()
    if bias is None:
        return x, weight, None
    bias = bias.reshape(-1, bias.shape[-1])
    return x, weight, bias if bias[:1].is_contiguous() else bias.contiguous()


def _out_sides(x: Tensor, weight: Tensor, settings: Settings) -> tuple[int, int]:
    sides = (
        side + 2 * pad - taps + 1
        for side, pad, taps in zip(x.shape[-2:], settings.padding, weight.shape[-2:], strict=True)
    )
    height, width = (side // 2 if settings.pool else side for side in sides)
    return height, width


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> _Layer:
    clients, batch, channels, height, width = x.shape
    sizes = (clients, batch, channels, height, width, weight.shape[1], *weight.shape[-2:])
    flags = (*settings.padding, settings.pool, settings.relu)
    between = weight.stride(0), 0 if bias is None else bias.stride(0)
    return _Layer(*sizes, *flags, *x.stride(), *between)


def _unstacked(memory: Tensor, lead: torch.Size) -> Tensor:
    """Return images (K, channels, height, width, batch) as (*lead, batch, channels, ...)."""
    images = memory.permute(_FROM_MEMORY)
    return images.view(*lead, *images.shape[1:]) if math.prod(lead) == len(memory) else images


def _call(name: str, layer: _Layer, *tensors: Tensor | None) -> None:
    kernels = library()
    assert kernels is not None  # checked when the layer was laid out
    pointers = [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in tensors]
    threads = c_int64(torch.get_num_threads())  # one, in a worker
    if getattr(kernels, name)(ctypes.byref(layer), threads, *pointers):
        raise MemoryError(f"no memory for a convolution of {layer.clients} clients")
