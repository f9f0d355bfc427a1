"""Second moments of features as a message: what clients add up, and what a server reads from it.

The heads that follow from these sums are in methods/common/moment_heads.py.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.counts import COUNTS_FIRST
from fedgist.core.message import message
from fedgist.core.objectives.regression import Regression
from fedgist.core.task import Task
from fedgist.core.tree import tree
from fedgist.methods.common.linear_head import members, with_constant
from fedgist.methods.common.moment_heads import Moments
from fedgist.methods.common.triangles import symmetric, triangle


@message(reduce="sum", over="architecture")
class Statistics:
    """Sums over a client's rows, with the constant 1 put before the m features.

    ``counted`` (rows, m + 1) are sums of features, with numbers of rows first: of each class; of
    each label and then of all rows; or, of numbers, of all rows. ``second`` (rows, entries) are the
    triangles of ``z z^T``, of all rows or by class. Of numbers y, ``sum y (1, z)`` and ``sum y^2``
    follow.
    """

    counted: Tensor = field(metadata=COUNTS_FIRST)
    second: Tensor


@tree
class Sums:
    """What a client adds up: ``counted`` as it is sent, and whole matrices ``gram`` (1 or K, m, m).

    Of K numbers, ``cross`` (1, K (m + 2)) is what follows the triangle; else it is empty. All are
    float64.
    """

    counted: Tensor
    gram: Tensor
    cross: Tensor


def no_statistics(task: Task, m: int, like: Tensor, *, by_class: bool) -> Statistics:
    """Return the sums of no rows, for features of width m, in the type of ``like``."""
    k, entries = task.num_classes, m * (m + 1) // 2
    rows = {"numbers": 1, "labels": k + 1}.get(task.objective.target, k)
    crosses = k * (m + 2) if task.objective.target == "numbers" else 0
    second = like.new_zeros(k if by_class else 1, entries + crosses)
    return Statistics(like.new_zeros(rows, m + 1), second)


def weights_of(batch: Batch, like: Tensor) -> Tensor:
    """Return the weight of each row of a batch, (batch,), 0 of absent ones."""
    weight = batch.mask.to(like.dtype)
    return weight if batch.weight is None else weight * batch.weight


def targets_of(batch: Batch, task: Task, like: Tensor) -> Tensor:
    """Return t, (batch, K): 1 of a row's class or labels and 0 of others, or standardized y."""
    if task.objective.target == "numbers":
        assert isinstance(task.objective, Regression)
        return task.objective.standardized(batch.y.to(like.dtype))
    return members(batch, task).to(like.dtype)


def summed(z: Tensor, batch: Batch, task: Task, *, by_class: bool, first_only: bool) -> Sums:
    """Return the sums of features ``z`` (batch, m) over a batch.

    ``by_class`` asks for a matrix of each class, and ``first_only`` for none.
    """
    weighted = with_constant(z) * weights_of(batch, z).unsqueeze(1)
    t, every, cross = targets_of(batch, task, z), weighted.sum(0, keepdim=True), z.new_zeros(1, 0)
    of_target = t.mT @ weighted
    counted = of_target
    if task.objective.target == "numbers":
        squares = t.square().mT @ weighted[:, 0]
        counted, cross = every, torch.cat([of_target.flatten(), squares]).unsqueeze(0)
    elif task.objective.target == "labels":
        counted = torch.cat([of_target, every])
    if first_only:
        gram = z.new_zeros(1, 0, 0)
    elif by_class:
        gram = (t.mT.unsqueeze(2) * weighted[:, 1:]).mT @ z
    else:
        gram = (weighted[:, 1:].mT @ z).unsqueeze(0)
    return Sums(counted.double(), gram.double(), cross.expand(len(gram), -1).double())


def as_sent(sums: Sums, dtype: torch.dtype) -> Statistics:
    """Return the message: triangles in place of symmetric matrices."""
    second = torch.cat([triangle(sums.gram), sums.cross], dim=1)
    return Statistics(sums.counted.to(dtype), second.to(dtype))


def moments_of(statistics: Statistics, task: Task) -> Moments:
    """Return the sums by their names, with matrices in place of triangles."""
    counted, every = statistics.counted, statistics.counted[-1]
    k, m = task.num_classes, counted.shape[1] - 1
    entries = m * (m + 1) // 2
    gram = symmetric(statistics.second[:, :entries], m)
    if task.objective.target == "numbers":
        after = statistics.second[0, entries:]
        cross, squares = after[:-k].view(k, m + 1), after[-k:]
        return Moments(cross[:, 0], cross[:, 1:], every[0], every[1:], gram, squares)
    if task.objective.target == "labels":
        counts, of_labels = counted[:-1, 0], counted[:-1, 1:]
        return Moments(counts, of_labels, every[0], every[1:], gram, counts, overlap=True)
    counts, total = counted[:, 0], counted.sum(0)
    return Moments(counts, counted[:, 1:], total[0], total[1:], gram, counts)


def with_random_features(z: Tensor, key: Tensor, count: int) -> Tensor:
    """Return features (batch, m) with ``relu(R z / |z| + b / 2)`` behind, (batch, m + count).

    R and b are standard normal numbers of the key (), so nothing of other rows is needed.
    """
    matrix = random.normal(random.fold(key, 0), (z.shape[1], count)).to(z.dtype)
    shift = random.normal(random.fold(key, 1), (count,)).to(z.dtype)
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    unit = z / torch.where(length > 0, length, 1.0)
    return torch.cat([z, (unit @ matrix + shift / 2).relu()], dim=1)
