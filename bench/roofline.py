"""How far W1 to W3 are from what the machine can do: FLOP, bytes, and measured peaks.

Peaks are of as many processes as a run has workers, all at once. The peak of arithmetic is the
larger of two: of torch's matrix product and of the compiled convolution, each in a good shape.
Bytes are those that a round of W3 must move if no array stays in a cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from workloads import W1, W2, W3, Workload, fedgist_rounds

from fedgist.core.nets.compiled.compiled_convolution import Settings, convolve
from fedgist.core.nets.compiled.kernel_library import library
from fedgist.engines.process_control import as_workers_do
from fedgist.engines.worker_pool import WorkerPool, default_workers

COPIES = "W3: round, times the seconds of its bytes"
SIDE = 1024  # of the matrices
COPIED = 1 << 24  # numbers: 64 MiB, more than caches hold
TIMES = 20
#: Passes over a client's weights in a round of one step of SGD: the gradients (1 write), the step
#: (1 read, 1 write), the weighted weights (1 read, 1 write) and their sum (1 read). The weights of
#: the start are one client's, and stay in a cache.
PASSES = 6


def roofline(repeats: int) -> dict[str, float]:
    """Return FLOP, bytes, peaks, and what share of them each workload reaches."""
    workers = default_workers("cpu")
    pool = WorkerPool(_peak, workers)
    try:
        peaks = {name: sum(pool.run([name] * workers)) for name in ("product", "layer", "copy")}
    finally:
        pool.close()
    peak = max(peaks["product"], peaks["layer"])
    figures = {
        "peak of matrix products, GFLOP/s": peaks["product"] / 1e9,
        "peak of compiled convolutions, GFLOP/s": peaks["layer"] / 1e9,
        "peak of copies, read and written, GB/s": peaks["copy"] / 1e9,
    }
    for work in (W1, W2, W3):
        with fedgist_rounds(work) as round_of:
            round_of()
            seconds = statistics.median(round_of() for _ in range(3 * repeats))
        reached = flop_of_round(work) / seconds
        figures[f"{work.name}: GFLOP a round"] = flop_of_round(work) / 1e9
        figures[f"{work.name}: GFLOP/s"] = reached / 1e9
        figures[f"{work.name}: share of the peak"] = reached / peak
    moved = bytes_of_round(W3)
    figures["W3: MB a round"] = moved / 1e6
    figures[COPIES] = seconds / (moved / peaks["copy"])
    return figures


def flop_of_round(work: Workload) -> float:
    """Return the floating point operations of a round's forward and backward passes."""
    module = work.module()
    x = torch.zeros(work.batch_size, *work.shape)
    with FlopCounterMode(display=False) as counter:
        y = torch.zeros(work.batch_size, dtype=torch.int64)
        torch.autograd.backward(functional.cross_entropy(module(x), y))
    steps = work.epochs * math.ceil(work.rows / work.batch_size)
    return float(counter.get_total_flops() * steps * work.sampled)


def bytes_of_round(work: Workload) -> float:
    """Return the bytes that a round with one step of SGD a client moves."""
    weights = sum(p.numel() for p in work.module().parameters())
    numbers = work.rows * math.prod(work.shape)
    # images: a byte is read and a float written, which two layers' passes read
    return float(work.sampled * (4 * PASSES * weights + numbers * (1 + 4 + 2 * 4)))


def _peak(name: str) -> float:
    """Return FLOP or bytes a second, in a worker."""
    with as_workers_do():
        a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
        if name == "product":
            return 2 * SIDE**3 / _best(lambda: torch.mm(a, b))
        if name == "layer":
            return _layer_peak()
        source, target = torch.zeros(COPIED), torch.zeros(COPIED)
        return 8 * COPIED / _best(lambda: target.copy_(source))


def _layer_peak() -> float:
    if library() is None:
        return 0.0
    x, weight = torch.randn(16, 20, 20, 20), torch.randn(20, 20, 5, 5)
    seconds = _best(lambda: convolve(x, weight, None, Settings()))
    return 2 * 16 * 16 * 16 * weight.numel() / seconds


def _best(work: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(TIMES):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best
