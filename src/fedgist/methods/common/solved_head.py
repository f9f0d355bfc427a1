"""Heads that a server solves for, by the task's target: what clients sum, and the solution.

==========  ===========================================================  =========================
target      statistics of a row with features phi (a constant 1 first)   head
==========  ===========================================================  =========================
class       phi in the row of its class                                  FedLog's, eq. 14
numbers     phi phi^T and y phi                                          ridge regression
labels      phi in the row of each label that it has, and in the total   L heads of two classes
==========  ===========================================================  =========================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.batch import Batch
from fedgist.core.nets.net import Net
from fedgist.core.objectives.regression import Regression
from fedgist.core.privacy import bounded, counted
from fedgist.core.task import Task
from fedgist.errors import MethodError
from fedgist.methods.common.conjugate_head import map_head
from fedgist.methods.common.gaussian_head import gaussian_sums, packed_width, ridge_head
from fedgist.methods.common.linear_head import class_sums, unit_rows, weights_of, with_constant


@dataclass(frozen=True)
class SolvedHead:
    """A kind of head: the shape of its statistics, their sum over a batch, and the solution.

    ``shape`` is (rows, entries); the first entry of each row of the statistics is a number of rows.
    ``sums`` maps features with a constant (batch, m + 1) and the batch to statistics, and ``solve``
    statistics in double precision and nu to eta (outputs, m + 1), the bias first.
    """

    shape: tuple[int, int]
    sums: Callable[[Tensor, Batch], Tensor]
    solve: Callable[[Tensor, float], Tensor]


def statistics(net: Net, batch: Batch, task: Task, *, alike: bool = False) -> Tensor:
    """Return the statistics of a batch, in the shape of the task's head.

    Rows have the weights of ``batch.weight``, if any. Private records have clipped features. With
    ``alike``, all of them have the length of the clip.
    """
    z = net.features(batch.x)
    if alike and task.privacy is not None:
        z = task.privacy.clip * unit_rows(z)
    phi = with_constant(bounded(z, task.privacy))
    return solved_head(task, phi.shape[1] - 1).sums(phi, counted(z, batch, task.privacy))


def solved_head(task: Task, m: int) -> SolvedHead:
    """Return the kind of head of a task, for features of width m."""
    count, apart = task.num_classes, task.missing_labels
    if task.objective.target == "numbers":
        return _of_numbers(task, m, apart=apart)
    if task.objective.target == "labels":
        return SolvedHead(
            (2 * count if apart else count + 1, m + 1),
            lambda phi, batch: _label_sums(phi, batch, apart=apart),
            lambda sums, nu: _binary_heads(sums, count, nu, apart=apart),
        )

    def of_classes(phi: Tensor, batch: Batch) -> Tensor:
        return class_sums(phi, batch.y, batch.mask, count, batch.weight)

    return SolvedHead((count, m + 1), of_classes, map_head)


def check_target(task: Task, method: str) -> None:
    """Raise MethodError if the head of numbers or labels is not exact for this task."""
    target = task.objective.target
    if target == "class":
        return
    if task.privacy is not None:
        raise MethodError(
            f"method {method}: the sensitivity of its sums is not known for objective "
            f"{task.objective.name}; privacy needs one class for each row"
        )
    if target == "numbers" and getattr(task.objective, "error", "") != "squared":
        raise MethodError(
            f"method {method}: its head is that of squared errors; set objective.error = 'squared'"
        )


def _of_numbers(task: Task, m: int, *, apart: bool) -> SolvedHead:
    objective, count = task.objective, task.num_classes
    assert isinstance(objective, Regression)  # its target is numbers

    def sums(phi: Tensor, batch: Batch) -> Tensor:
        weight = weights_of(batch, phi.double())
        y = objective.standardized(batch.y.double())
        return gaussian_sums(phi.double(), y, weight, apart=apart)

    shape = (count, packed_width(m, 1)) if apart else (1, packed_width(m, count))
    return SolvedHead(shape, sums, lambda total, nu: ridge_head(total, m, nu))


def _label_sums(phi: Tensor, batch: Batch, *, apart: bool) -> Tensor:
    """Return sums of features (rows, m + 1): of each label, then of all rows.

    With missing labels (``apart``), the second part is of the rows without each label.
    """
    weighted = phi * weights_of(batch, phi).unsqueeze(1)
    has = (batch.y > 0).to(phi.dtype)
    if not apart:
        return torch.cat([has.mT @ weighted, weighted.sum(0, keepdim=True)])
    lacks = (batch.y == 0).to(phi.dtype)
    return torch.cat([has.mT @ weighted, lacks.mT @ weighted])


def _binary_heads(sums: Tensor, labels: int, nu: float, *, apart: bool) -> Tensor:
    """Return eta (labels, m + 1): for each label, the difference of a head's two rows.

    Each label has FedLog's head of two classes, rows with and without it (eq. 14). The logit of a
    label is the difference of the two classes' logits.
    """
    having, others = sums[:labels], sums[labels:]
    lacking = others if apart else others - having
    both = torch.stack([having, lacking], dim=1)  # (labels, 2, m + 1)
    eta = torch.vmap(lambda s: map_head(s, nu))(both)
    return eta[:, 0] - eta[:, 1]
