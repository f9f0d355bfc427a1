"""Check of settings of the task's loss: a method that ignores them is refused."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedgist.core.method import Method, Task
from fedgist.core.tree import Tree
from fedgist.engines.method_check import Trial, trials
from fedgist.errors import MethodError


def check_loss_settings(method: Method, task: Task, server: Tree, key: Tensor) -> None:
    """Raise MethodError if the recipe has settings of the task's loss that the method ignores."""
    training = task.training
    given = ["train.class_weights = 'balanced'"] if training.balanced else []
    given += [f"train.label_smoothing = {training.smoothing}"] if training.smoothing else []
    if given and not any(_uses_task_loss(trial) for trial in trials(method, task, server, key)):
        raise MethodError(
            f"{given[0]} would have no effect: {type(method).__name__} does not learn by the "
            "task's loss, ctx.task.objective.loss(logits, batch), on the batch that it is given"
        )


def _uses_task_loss(trial: Trial) -> bool:
    """Return whether the loss of a phase changes with the weights of the rows."""
    trial.look()
    batch = trial.batch(0.0)
    weights = torch.arange(1.0, 1.0 + len(batch.y), device=batch.y.device)
    with torch.no_grad():
        plain, weighted = (
            trial.losses(trial.net, rows, trial.own)
            for rows in (batch, replace(batch, weight=weights))
        )
    return any(not torch.equal(a, b) for a, b in zip(plain, weighted, strict=True))
