"""Training at the server: steps on batches of public rows, grouped into stages.

The server uses the clients' optimizers. A run can be stopped and saved between two stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedgist.core import optim
from fedgist.core.layers import Pass
from fedgist.core.message import is_finite
from fedgist.core.net import Net
from fedgist.core.optim import OptimizerState
from fedgist.core.task import Context
from fedgist.core.training import Optimizer
from fedgist.errors import MethodError

STAGE = "distill"
STEPS_AT_ONCE = 25  # steps per stage


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
    return optim.init(Optimizer(), _stacked(params))


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


def check_finite(arrays: Mapping[str, Tensor], whose: str, ctx: Context) -> None:
    """Raise MethodError if the trained arrays, of any shape, hold numbers that are not finite."""
    lost = next((name for name, array in arrays.items() if not is_finite(array)), None)
    if lost is not None:
        raise MethodError(
            f"distillation in round {ctx.round}: {whose} came to numbers in {lost!r} that are "
            "not finite; a lower method.distillation.lr may help"
        )


def _stacked(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the arrays as a stack of one, (1, ...)."""
    return {name: array.unsqueeze(0) for name, array in arrays.items()}
