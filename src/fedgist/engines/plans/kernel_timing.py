"""Which layers of a model the compiled kernels run faster than torch does, by timing each alone.

A layer is timed with the pooling and the ReLU that the compiled kernel does in the same pass.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call

from fedgist.core import random
from fedgist.core.batch import fake_rows
from fedgist.core.nets.compiled.kernel_library import Compiled, Kernel
from fedgist.core.nets.convolution import Conv2d
from fedgist.core.nets.kernel_choice import compilable, use_kernels
from fedgist.core.nets.net import Architecture

CLIENTS = 4  # clients in the timed stack: both kinds of kernels take them one by one
TRIES = 3  # measurements of each kernel; the fastest one counts
PATIENCE_S = 1.0  # layers that would be timed after this long keep torch's kernel
# A layer with pooling or ReLU may take so much longer: the next layer reads its images without a
# copy, and without gradients it is faster than torch's.
NEAR = 1.15
MOST = 1 << 24  # numbers of a timed stack's images: larger layers keep torch's kernel
TORCHS: tuple[Kernel, ...] = ("each", "grouped")


def faster_layers(arch: Architecture, rows: int) -> dict[str, Compiled]:
    """Return the kernels of an architecture's layers, by name, where they are not clearly slower.

    ``rows`` is the number of rows in a batch. Layers of the same sizes are timed once. Large layers
    are not timed.
    """
    deadline = time.perf_counter() + PATIENCE_S
    chosen: dict[str, Compiled] = {}
    faster: dict[object, bool] = {}
    for name, (layer, shape, is_first) in _layers(arch, rows).items():
        alike = repr(layer), layer.relu, tuple(layer.weight.shape), shape, is_first
        if alike not in faster:
            if time.perf_counter() > deadline or _numbers(layer, shape) > MOST:
                continue
            x = torch.zeros(CLIENTS, *shape, requires_grad=not is_first)
            by_torch = min(_seconds(layer, x, kernel) for kernel in TORCHS)
            joined = layer.relu or layer.pool is not None
            most = NEAR * by_torch if joined else by_torch
            faster[alike] = _seconds(layer, x, "compiled") < most
        if faster[alike]:
            chosen[name] = "compiled"
    return chosen


def _numbers(layer: Conv2d, shape: torch.Size) -> int:
    """Return the numbers in the timed images of a layer, (rows, in, ...), or behind it."""
    out_size, in_size = layer.weight.shape[:2]
    return CLIENTS * shape.numel() // in_size * max(out_size, in_size)


def _layers(arch: Architecture, rows: int) -> dict[str, tuple[Conv2d, torch.Size, bool]]:
    """Return each convolution with its input's shape (rows, ...), and whether it comes first."""
    seen: dict[str, tuple[Conv2d, torch.Size, bool]] = {}
    net = arch.start(0)
    module = copy.deepcopy(arch.module)

    def remember(name: str, layer: Conv2d, inputs: tuple[Tensor, ...]) -> None:
        seen.setdefault(name, (layer, inputs[0].shape, not seen))

    layers = compilable(module)
    use_kernels(module, dict.fromkeys(layers, "compiled"))
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda at, inputs, name=name: remember(name, at, inputs))
    x = fake_rows(random.key(0), rows, arch.input_shape, arch.num_classes, words=arch.words)[0]
    with torch.no_grad():
        functional_call(module.eval(), {**net.body, **net.buffers}, (x,))
    return seen


def _seconds(layer: Conv2d, x: Tensor, kernel: Kernel) -> float:
    """Return the seconds of a forward and backward pass of stacked clients."""
    layer = copy.deepcopy(layer)
    layer.kernel = kernel
    if kernel == "compiled" and x.requires_grad:  # as a compiled layer before it leaves them
        x = x.detach().permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3).requires_grad_()
    arrays = {
        name: array.detach().expand(CLIENTS, *array.shape).clone().requires_grad_()
        for name, array in layer.named_parameters()
    }

    def run(values: Mapping[str, Tensor], images: Tensor) -> Tensor:
        out: Tensor = functional_call(layer, dict(values), (images,))
        return out

    best = math.inf
    for _ in range(TRIES + 1):  # the first one warms up
        begin = time.perf_counter()
        torch.autograd.backward(torch.func.vmap(run)(arrays, x).sum())
        best = min(best, time.perf_counter() - begin)
    return best
