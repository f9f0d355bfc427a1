"""Training steps as CUDA graphs: a step is captured once for each of its forms, then replayed.

A small net's step is hundreds of short kernels, and the CPU needs longer to start them than the GPU
to run them. A replay starts them all at once. Parameters, moments and running statistics stay in
place for a whole phase, so a graph works on them directly. The batch and the keys of each step are
copied into tensors that the graph reads.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from fedgist.core.batch import Batch
from fedgist.core.tree import leaves, map_leaves
from fedgist.errors import first_line
from fedgist.training.cohort import Cohort
from fedgist.training.timetable import Turn

#: The fewest steps of a form that are captured: a capture costs the time of two steps.
LEAST = 4
WARM_UPS = 1  # steps before a capture, which load kernels and allocate their workspaces
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)

#: A step of the clients of a turn: their batch and their keys (count,) give their losses (count,).
TakeStep: TypeAlias = Callable[[Batch, Tensor, Turn], Tensor]


class StackedStep(Protocol):
    """A step of stacked clients that works in place on tensors which stay the same."""

    def __call__(self, batch: Batch, keys: Tensor, turn: Turn) -> Tensor:
        """Take a step with a batch (count, batch, ...) and keys (count,); return the losses."""

    def changed(self, count: int) -> list[Tensor]:
        """Return all tensors that a step of the first ``count`` clients changes, (count, ...)."""


@dataclass(frozen=True, eq=False)
class Recording:
    """Captured work: ``replay`` does it again and writes the same ``losses`` (count,)."""

    losses: Tensor
    replay: Callable[[], object]


@dataclass(frozen=True, eq=False)
class Capturing:
    """The calls of torch that capture work; tests put functions of the CPU in their place.

    ``aside`` does work on a side stream, in order with all other work. ``record`` captures work,
    which may or may not do it.
    """

    aside: Callable[[Callable[[], object]], None]
    record: Callable[[Callable[[], Tensor]], Recording]


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

    def record(work: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # the outer context: after a failed capture, torch's own leaves the side stream current
        with (
            torch.cuda.stream(torch.cuda.current_stream(device)),
            torch.cuda.graph(graph, pool=pool, stream=side),
        ):
            losses = work()
        return Recording(losses, graph.replay)

    return Capturing(aside, record)


_new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # one for all phases: torch keeps the freed memory of each stream for that stream
    return _new_stream(device)


def captured(step: StackedStep, cohort: Cohort, turns: Sequence[Turn]) -> TakeStep:
    """Return a function that takes the steps of a phase, by graphs if that is possible."""
    capturing = capturing_on(cohort.table.device)
    fits = cohort.stack and cohort.private_steps is None and isinstance(cohort.examples.x, Tensor)
    often = Counter((turn.count, turn.together) for turn in turns)
    if capturing is None or not fits or max(often.values(), default=0) < LEAST:
        return step
    return _CapturedSteps(step, capturing, often)


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured step with its inputs: a batch (count, batch, ...) and keys (count,)."""

    batch: Batch
    keys: Tensor
    recording: Recording

    def __call__(self, batch: Batch, keys: Tensor) -> Tensor:
        map_leaves(Tensor.copy_, self.batch, batch)
        self.keys.copy_(keys)
        self.recording.replay()
        return self.recording.losses.clone()  # the next replay overwrites them


class _CapturedSteps:
    """The steps of one phase, captured by form: clients, optimizer rule and shapes of the batch."""

    def __init__(
        self, step: StackedStep, capturing: Capturing, often: Counter[tuple[int, bool | None]]
    ) -> None:
        self.step, self.capturing, self.often = step, capturing, often
        self.graphs: dict[tuple[object, ...], _Graph] = {}
        self.failed = False

    def __call__(self, batch: Batch, keys: Tensor, turn: Turn) -> Tensor:
        if self.failed or self.often[turn.count, turn.together] < LEAST:
            return self.step(batch, keys, turn)
        form = (turn.count, turn.together, *(leaf.shape for leaf in leaves(batch)))
        if form not in self.graphs:
            graph = self._capture(batch, keys, turn)
            if graph is None:
                return self.step(batch, keys, turn)
            self.graphs[form] = graph
        return self.graphs[form](batch, keys)

    def _capture(self, batch: Batch, keys: Tensor, turn: Turn) -> _Graph | None:
        """Capture a step without taking it; return None, with a warning, if that fails."""
        batch, keys = map_leaves(torch.clone, batch), keys.clone()
        changed = self.step.changed(turn.count)
        before = [tensor.clone() for tensor in changed]

        def work() -> Tensor:
            return self.step(batch, keys, turn)

        try:
            for _ in range(WARM_UPS):
                self.capturing.aside(work)
            return _Graph(batch, keys, self.capturing.record(work))
        except FAILURES as error:
            self.failed = True
            warnings.warn(
                "training steps are started kernel by kernel, which is slower, because no CUDA "
                f"graph could be made of them: {first_line(_cause(error))}",
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
