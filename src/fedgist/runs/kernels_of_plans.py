"""The models of a task, with the kernels of its execution plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedgist.core.task import Task
from fedgist.engines.client_host import with_layout
from fedgist.training.stacking_plan import Plan


def with_kernels(task: Task, plans: Mapping[str, Plan]) -> Task:
    """Return the task with the kernels of its plans: the server's own models use them, too."""
    laid_out = {
        name: with_layout(task.architectures[name], replace(plan, stack=False))
        for name, plan in plans.items()
        if plan.kernels
    }
    starts = {name: replace(task.starts[name], arch=arch) for name, arch in laid_out.items()}
    architectures = {**task.architectures, **laid_out}
    return replace(task, architectures=architectures, starts={**task.starts, **starts})
