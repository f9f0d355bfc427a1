"""Models with the layout and the kernels of their execution plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedgist.core.nets.net import Architecture
from fedgist.core.task import Task
from fedgist.engines.plans.plan import Plan
from fedgist.errors import RecipeError


def with_layout(arch: Architecture, plan: Plan) -> Architecture:
    """Return the architecture with the plan's layout of convolutions.

    Raises
    ------
    RecipeError
        If the plan names a kernel that is not on this machine, or an unknown layer.
    """
    try:
        each = plan.stack and plan.convolutions == "each"
        return arch.with_layout(each=each, kernels=plan.kernels)
    except ValueError as error:
        raise RecipeError(f"engine.plans.{arch.name}: {error}") from error


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
