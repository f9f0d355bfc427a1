"""Training at the server: steps on batches of public rows, grouped into stages.

The server uses the clients' optimizers. A run can be stopped and saved between two stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedgist.core import cuda_graphs, optim
from fedgist.core.cuda_graphs import Capturing, Replay, recorded
from fedgist.core.message import are_finite, is_finite
from fedgist.core.nets.layers import Pass
from fedgist.core.nets.net import Net
from fedgist.core.optim import OptimizerState
from fedgist.core.task import Context, Task
from fedgist.core.training import Optimizer
from fedgist.core.tree import leaves, map_leaves
from fedgist.errors import MethodError

STAGE = "distill"
STEPS_AT_ONCE = 25  # steps per stage

State = TypeVar("State")
Lesson = TypeVar("Lesson")


def stages_of(steps: int) -> tuple[str, ...]:
    """Return the names of the stages for a number of steps."""
    return tuple(f"{STAGE}-{i}" for i in range(-(-steps // STEPS_AT_ONCE)))


def is_server_stage(stage: str) -> bool:
    """Return whether a stage consists of steps at the server."""
    return stage.startswith(STAGE)


def steps_in(stage: str, steps: int) -> range:
    """Return the numbers of a stage's steps, from 0 over all ``steps``."""
    begin = int(stage.removeprefix(f"{STAGE}-")) * STEPS_AT_ONCE
    return range(begin, min(begin + STEPS_AT_ONCE, steps))


def fresh_memory(params: Mapping[str, Tensor]) -> OptimizerState:
    """Return a fresh optimizer state; without parameters, an empty one.

    Parameters have any shape, by name. Their moments are (1, ...), and the count is (1,).
    """
    if not params:
        return OptimizerState({}, {}, torch.zeros(1, dtype=torch.int64))
    return optim.init(Optimizer("adam", lr=0.0), _stacked(params))


def gradient_step(
    net: Net, loss: Callable[[Net], Tensor], run: Pass, optimizer: Optimizer, memory: OptimizerState
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a net's arrays after one gradient step, and the loss, ().

    ``memory`` is updated in place. Its arrays are stacks of one, (1, ...).
    """
    values = {name: p.detach().clone().requires_grad_() for name, p in net.params.items()}
    with torch.enable_grad():
        value = loss(replace(net.with_arrays(values), run=run))
        gradients = torch.autograd.grad(value, list(values.values()), materialize_grads=True)
    params = {name: p.detach() for name, p in values.items()}
    grads = dict(zip(params, gradients, strict=True))
    with torch.no_grad():
        optim.step(optimizer, _stacked(params), _stacked(grads), memory)
    return params | net.buffers | dict(run.updates), value.detach()


def after_steps(
    step: Callable[[State, Lesson], State], state: State, lessons: Iterable[Lesson]
) -> State:
    """Return the state after a step with each lesson; on a GPU most steps are replays of graphs.

    A step makes the next state from a state and a lesson, which are trees of tensors of any shapes.
    States have one form. A step may change a tensor of its state, if it returns this tensor at the
    same place. It reads no number.
    """
    capturing = cuda_graphs.capturing_on(leaves(state)[0].device)
    if capturing is None:
        for lesson in lessons:
            state = step(state, lesson)
        return state
    steps = _Replayed(step, map_leaves(torch.clone, state), capturing)
    for lesson in lessons:
        steps.take(lesson)
    return steps.state


class _Replayed(Generic[State, Lesson]):
    """Steps on a state that stays in place, captured by the shapes of their lesson.

    The first step of a form is taken without a graph, and the second is captured.
    """

    def __init__(
        self, step: Callable[[State, Lesson], State], state: State, capturing: Capturing
    ) -> None:
        self.step, self.state, self.capturing = step, state, capturing
        self.graphs: dict[tuple[torch.Size, ...], tuple[Lesson, Replay] | None] = {}
        self.failed = False

    def take(self, lesson: Lesson) -> None:
        """Take a step."""
        form = tuple(leaf.shape for leaf in leaves(lesson))
        if form not in self.graphs:
            self.graphs[form] = None
            self.capturing.aside(lambda: self._take(lesson))
            return
        if not self.failed:
            self.graphs[form] = self.graphs[form] or self._captured(lesson)
        if graph := self.graphs[form]:
            slot, replay = graph
            map_leaves(Tensor.copy_, slot, lesson)
            replay()
        else:
            self._take(lesson)

    def _take(self, lesson: Lesson) -> None:
        map_leaves(Tensor.copy_, self.state, self.step(self.state, lesson))

    def _captured(self, lesson: Lesson) -> tuple[Lesson, Replay] | None:
        """Capture a step without taking it; return None, with a warning, if that fails."""
        slot = map_leaves(torch.clone, lesson)
        replay = recorded(self.capturing, lambda: self._take(slot), leaves(self.state))
        self.failed = replay is None
        return None if replay is None else (slot, replay)


def check_rows(task: Task, batch_size: int, *, rest: bool) -> None:
    """Raise MethodError if a batch of public rows has one row, and a model needs two.

    ``rest`` says whether rows that fill no batch make a smaller one.
    """
    needy = [name for name, arch in task.architectures.items() if arch.least_rows > 1]
    public = len(task.public_rows)
    least = min(batch_size, public) if not rest else public % batch_size or min(batch_size, public)
    if needy and least == 1:
        raise MethodError(
            f"method.distillation.batch_size = {batch_size}: {public} public rows make a batch of "
            f"one row, and the batch norm of {needy[0]} needs two: use another size"
        )


def check_finite(arrays: Mapping[str, Tensor], whose: str, ctx: Context) -> None:
    """Raise MethodError if the trained arrays, of any shape, hold numbers that are not finite."""
    if not are_finite(arrays.values()):
        lost = next(name for name, array in arrays.items() if not is_finite(array))
        raise MethodError(
            f"distillation in round {ctx.round}: {whose} came to numbers in {lost!r} that are "
            "not finite; a lower method.distillation.lr may help"
        )


def _stacked(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the arrays as a stack of one, (1, ...)."""
    return {name: array.unsqueeze(0) for name, array in arrays.items()}
