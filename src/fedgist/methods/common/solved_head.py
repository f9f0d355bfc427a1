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
from fedgist.methods.common.linear_head import class_sums, with_constant

RANK = 1e-7  # relative size of an eigenvalue that counts as 0: the rounding of single precision


def packed_width(m: int, crosses: int) -> int:
    """Return the number of entries of a row: a triangle of m + 1, and ``crosses`` vectors C."""
    return (m + 1) * (m + 2) // 2 + crosses * (m + 1)


def gaussian_sums(phi: Tensor, y: Tensor, weight: Tensor, *, apart: bool) -> Tensor:
    """Return the packed statistics, (1, entries), or (numbers, entries) if ``apart``.

    ``phi`` is (batch, m + 1), ``y`` (batch, numbers) with NaN for missing ones, and ``weight``
    (batch,) is 0 for absent rows.
    """
    present = ~y.isnan()
    y = torch.where(present, y, 0.0)
    if not apart:
        return _packed(phi, y, weight).unsqueeze(0)
    weights = present * weight.unsqueeze(1)
    pairs = zip(y.mT.unsqueeze(2).unbind(0), weights.unbind(1), strict=True)
    return torch.stack([_packed(phi, of_number, own) for of_number, own in pairs])


def _packed(phi: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return a packed row (entries,) by one product, which holds no pairs of a single row."""
    product = (phi * weight.unsqueeze(1)).mT @ torch.cat([phi, y], dim=1)
    m = phi.shape[1]
    row, column = torch.triu_indices(m, m, device=phi.device)
    return torch.cat([product[row, column], product[:, m:].mT.flatten()])


def ridge_head(sums: Tensor, m: int, nu: float) -> Tensor:
    """Return the MAP head (numbers, m + 1) of packed statistics, in their precision.

    Each number's eta maximizes ``-|y - eta phi|^2 / 2 - nu |w|^2 / 2``, with w its weights without
    the bias: (G + nu D) eta = C, where D is the identity with 0 for the bias. Without rows, eta
    is 0. With nu = 0, G may be singular: then it is the solution of least norm.
    """
    row, column = torch.triu_indices(m + 1, m + 1, device=sums.device)
    triangle, cross = sums[:, : len(row)], sums[:, len(row) :]
    gram = sums.new_zeros(len(sums), m + 1, m + 1)
    gram[:, row, column] = triangle
    gram[:, column, row] = triangle
    penalty = torch.full((m + 1,), nu, dtype=sums.dtype, device=sums.device)
    penalty[0] = 0.0
    # the bias of no rows would be undetermined: any penalty gives 0
    penalty = penalty + torch.eye(m + 1, dtype=sums.dtype, device=sums.device)[0] * (
        triangle[:, :1] <= 0
    )
    system, right = gram + torch.diag_embed(penalty), cross.reshape(len(sums), -1, m + 1).mT
    if nu > 0:
        eta: Tensor = torch.linalg.solve(system, right)
    else:
        eta = torch.linalg.pinv(system, rtol=RANK, hermitian=True) @ right
    return eta.mT.reshape(-1, m + 1)


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


def statistics(net: Net, batch: Batch, task: Task) -> Tensor:
    """Return the statistics of a batch, in the shape of the task's head.

    Rows have the weights of ``batch.weight``, if any. Private records have clipped features.
    """
    z = net.features(batch.x)
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
        if batch.weight is not None:
            phi = phi * batch.weight.unsqueeze(1)
        return class_sums(phi, batch.y, batch.mask, count)

    return SolvedHead((count, m + 1), of_classes, map_head)


def check_target(task: Task, method: str, *, solver: str) -> None:
    """Raise MethodError if the head of numbers or labels is not exact for this task."""
    target = task.objective.target
    if target == "class":
        return
    if task.privacy is not None:
        raise MethodError(
            f"method {method}: the sensitivity of its sums is not known for objective "
            f"{task.objective.name}; privacy needs one class for each row"
        )
    if solver != "exact":
        raise MethodError(
            f"method.solver = {solver!r} is that of classes: objective {task.objective.name} "
            "needs 'exact'"
        )
    if target == "numbers" and getattr(task.objective, "error", "") != "squared":
        raise MethodError(
            f"method {method}: its head is that of squared errors; set objective.error = 'squared'"
        )


def _of_numbers(task: Task, m: int, *, apart: bool) -> SolvedHead:
    objective, count = task.objective, task.num_classes
    assert isinstance(objective, Regression)  # its target is numbers

    def sums(phi: Tensor, batch: Batch) -> Tensor:
        weight = batch.mask.to(torch.float64)
        if batch.weight is not None:
            weight = weight * batch.weight
        y = objective.standardized(batch.y.double())
        return gaussian_sums(phi.double(), y, weight, apart=apart)

    shape = (count, packed_width(m, 1)) if apart else (1, packed_width(m, count))
    return SolvedHead(shape, sums, lambda total, nu: ridge_head(total, m, nu))


def _label_sums(phi: Tensor, batch: Batch, *, apart: bool) -> Tensor:
    """Return sums of features (rows, m + 1): of each label, then of all rows.

    With missing labels (``apart``), the second part is of the rows without each label.
    """
    weight = batch.mask.to(phi.dtype)
    if batch.weight is not None:
        weight = weight * batch.weight
    weighted = phi * weight.unsqueeze(1)
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
