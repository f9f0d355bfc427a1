"""Training steps as CUDA graphs: a step is captured once for each of its forms, then replayed.

Parameters, moments and running statistics stay in place for a whole phase, so a graph works on them
directly. The batch and the keys of each step are copied into tensors that the graph reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from fedgist.core import cuda_graphs
from fedgist.core.batch import Batch
from fedgist.core.cuda_graphs import LEAST, Capturing, Replay, recorded
from fedgist.core.tree import leaves, map_leaves
from fedgist.training.cohort import Cohort
from fedgist.training.timetable import Turn

#: A step of the clients of a turn: their batch and their keys (count,) give their losses (count,).
TakeStep: TypeAlias = Callable[[Batch, Tensor, Turn], Tensor]


class StackedStep(Protocol):
    """A step of stacked clients that works in place on tensors which stay the same."""

    def __call__(self, batch: Batch, keys: Tensor, turn: Turn) -> Tensor:
        """Take a step with a batch (count, batch, ...) and keys (count,); return the losses."""

    def changed(self, count: int) -> list[Tensor]:
        """Return all tensors that a step of the first ``count`` clients changes, (count, ...)."""


def captured(step: StackedStep, cohort: Cohort, turns: Sequence[Turn]) -> TakeStep:
    """Return a function that takes the steps of a phase, by graphs if that is possible."""
    capturing = cuda_graphs.capturing_on(cohort.table.device)
    fits = cohort.stack and cohort.private_steps is None and isinstance(cohort.examples.x, Tensor)
    often = Counter((turn.count, turn.together) for turn in turns)
    if capturing is None or not fits or max(often.values(), default=0) < LEAST:
        return step
    return _CapturedSteps(step, capturing, often)


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured step: its batch (count, batch, ...), keys (count,) and losses (count,)."""

    batch: Batch
    keys: Tensor
    losses: Tensor
    replay: Replay

    def __call__(self, batch: Batch, keys: Tensor) -> Tensor:
        map_leaves(Tensor.copy_, self.batch, batch)
        self.keys.copy_(keys)
        self.replay()
        return self.losses.clone()  # the next replay overwrites them


class _CapturedSteps:
    """The steps of one phase, captured by form: clients, optimizer rule and shapes of the batch.

    The first step of a form is taken without a graph, on the stream of captures, where it loads
    kernels and makes their workspaces. The second is captured.
    """

    def __init__(
        self, step: StackedStep, capturing: Capturing, often: Counter[tuple[int, bool | None]]
    ) -> None:
        self.step, self.capturing, self.often = step, capturing, often
        self.graphs: dict[tuple[object, ...], _Graph | None] = {}
        self.failed = False

    def __call__(self, batch: Batch, keys: Tensor, turn: Turn) -> Tensor:
        if self.failed or self.often[turn.count, turn.together] < LEAST:
            return self.step(batch, keys, turn)
        form = (turn.count, turn.together, *(leaf.shape for leaf in leaves(batch)))
        if form not in self.graphs:
            self.graphs[form] = None
            return self._aside(batch, keys, turn)
        graph = self.graphs[form] = self.graphs[form] or self._captured(batch, keys, turn)
        return self.step(batch, keys, turn) if graph is None else graph(batch, keys)

    def _aside(self, batch: Batch, keys: Tensor, turn: Turn) -> Tensor:
        losses = torch.empty(turn.count, device=keys.device)
        self.capturing.aside(lambda: losses.copy_(self.step(batch, keys, turn)))
        return losses

    def _captured(self, batch: Batch, keys: Tensor, turn: Turn) -> _Graph | None:
        """Capture a step without taking it; return None, with a warning, if that fails."""
        batch, keys = map_leaves(torch.clone, batch), keys.clone()
        losses = torch.empty(turn.count, device=keys.device)

        def work() -> None:
            losses.copy_(self.step(batch, keys, turn))

        replay = recorded(self.capturing, work, self.step.changed(turn.count))
        self.failed = replay is None
        return None if replay is None else _Graph(batch, keys, losses, replay)
