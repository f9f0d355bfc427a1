"""Single convolutions with pooling and ReLU: the compiled kernel against torch's, client by client.

Forward and backward passes of a stack of ten clients, in turns, on one thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from workloads import W1, W2, Workload

from fedgist.core.nets.compiled.compiled_convolution import Settings, convolve
from fedgist.core.nets.compiled.kernel_library import library
from fedgist.engines.process_control import as_workers_do, keep_memory

CLIENTS = 10
#: Channels in and out and the side of the images of conv1 and conv2, by workload.
LAYERS = {"W1": ((1, 10, 28), (10, 20, 12)), "W2": ((3, 6, 32), (6, 16, 14))}
TAPS = 5


def layers(repeats: int) -> dict[str, float]:
    """Return how many times as fast as torch the compiled kernel runs the layers of W1 and W2."""
    if library() is None:
        return {}
    figures = {}
    keep_memory()  # as a run's workers do
    with as_workers_do():
        for work in (W1, W2):
            for place, (channels, out, side) in enumerate(LAYERS[work.name]):
                passes = _passes(work, channels, out, side, first=place == 0)
                best = dict.fromkeys(passes, math.inf)
                for _ in range(5 * repeats):
                    for name, do_pass in passes.items():
                        best[name] = min(best[name], _seconds(do_pass))
                ratio = best["torch"] / best["compiled"]
                figures[f"{work.name}: conv{place + 1}, torch / compiled"] = ratio
    return figures


def _passes(
    work: Workload, channels: int, out: int, side: int, *, first: bool
) -> dict[str, Callable[[], object]]:
    x = torch.randn(CLIENTS, work.batch_size, channels, side, side).requires_grad_(not first)
    weight = torch.randn(CLIENTS, out, channels, TAPS, TAPS, requires_grad=True)
    bias = torch.randn(CLIENTS, out, requires_grad=True)
    settings = Settings(pool=True, relu=True)
    stacked = torch.func.vmap(lambda images, w, b: convolve(images, w, b, settings))
    learned = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]

    def by_torch(images: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
        each = zip(images, weights, biases, strict=True)
        return torch.stack(
            [functional.max_pool2d(functional.conv2d(*arrays), 2).relu() for arrays in each]
        )

    def passing(layer: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(x, weight, bias).sum(), learned)

    return {"torch": passing(by_torch), "compiled": passing(stacked)}


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
