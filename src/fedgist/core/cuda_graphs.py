"""CUDA graphs: work of a GPU that is captured once and replayed.

A step of a net is hundreds of kernels, and the CPU often needs longer to start them than the GPU to
run them. A replay starts them all at once. It does the same operations on the same memory: numbers
that Python gave them are fixed, and what changes must be copied into tensors that the graph reads.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.errors import first_line

#: The fewest repetitions of some work for which it is captured: a capture costs the time of two.
LEAST = 4
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)

Replay = Callable[[], object]


@dataclass(frozen=True, eq=False)
class Capturing:
    """The calls of torch that capture work; tests put functions of the CPU in their place.

    ``aside`` does work on a side stream, in order with all other work. ``record`` captures work,
    which it may or may not do, and returns a function that does it again.
    """

    aside: Callable[[Callable[[], object]], None]
    record: Callable[[Callable[[], object]], Replay]


def capturing_on(device: torch.device) -> Capturing | None:
    """Return how work is captured on a device, or None if it has no graphs."""
    if device.type != "cuda":
        return None
    side, pool = _side_stream(device), torch.cuda.graph_pool_handle()

    def aside(work: Callable[[], object]) -> None:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                work()
        finally:
            current.wait_stream(side)

    def record(work: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # the outer context: after a failed capture, torch's own leaves the side stream current
        with (
            torch.cuda.stream(torch.cuda.current_stream(device)),
            torch.cuda.graph(graph, pool=pool, stream=side),
        ):
            work()
        return graph.replay

    return Capturing(aside, record)


_new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # one for all captures: torch keeps the freed memory of each stream for that stream
    return _new_stream(device)


def recorded(
    capturing: Capturing, work: Callable[[], object], changed: Sequence[Tensor]
) -> Replay | None:
    """Capture work that was done aside before; return a function that does it again.

    ``changed`` are all tensors that it changes, of any shape; they stay as they are. If the capture
    fails, the result is None, and a warning says why.
    """
    before = [tensor.clone() for tensor in changed]
    try:
        return capturing.record(work)
    except FAILURES as error:
        warnings.warn(
            "training steps are started kernel by kernel, which is slower, because no CUDA graph "
            f"could be made of them: {first_line(_cause(error))}",
            stacklevel=2,
        )
        return None
    finally:
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)


def _cause(error: BaseException) -> BaseException:
    """Return the error that ended a capture; the end of a failed capture is an error, too."""
    earlier = error.__context__
    return earlier if isinstance(earlier, FAILURES) else error
