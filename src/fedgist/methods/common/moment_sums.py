"""Second moments of features as a message: what clients add up, and what a server reads from it.

The heads that follow from these sums are in methods/common/moment_heads.py.

Private rows have unit length, and their sums are multiplied by four constants before they are sent.
A row of class k with features u then adds to the numbers of a message, in 64ths::

    20 for the count,  67 u for the sums,  57 u_i^2 on the diagonal,  81 u_i u_j beside it

With ``s = sum u_i^4 <= 1`` the squared norm of a row's term is ``(20^2 + 67^2 + 57^2 s +
81^2 (1 - s) / 2) / 64^2 < 2``, which is the sensitivity that fedgist.core.privacy states for rows
of length 1. The constants are shares of about 0.05, 0.55 and 0.40 of the budget, and multiples of a
power of two, so that sums stay on the grid of the system's noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.counts import COUNTS_FIRST
from fedgist.core.message import message
from fedgist.core.objectives.regression import Regression
from fedgist.core.privacy import Privacy, bounded, of_records
from fedgist.core.rounded_numbers import Rounded, rounded_rows, rounded_triangles
from fedgist.core.task import Task
from fedgist.core.tree import tree
from fedgist.core.wire_form import form_of
from fedgist.methods.common.linear_head import members, unit_rows, weights_of, with_constant
from fedgist.methods.common.moment_heads import Moments
from fedgist.methods.common.triangles import symmetric, triangle

#: Numbers of a message: of 32 or 64 bits, or codes of 8 or 16 bits beside float32 scales.
Wire = Literal["float32", "float64", "float16", "bfloat16", "int8"]

_COUNT, _SUMS, _DIAGONAL, _BESIDE = 20 / 64, 67 / 64, 57 / 64, 81 / 64
_SUMS_ALONE = 88 / 64
_STEPS = 6  # bits of these constants behind the point


@message(reduce="sum", over="architecture")
class Statistics:
    """Sums over a client's rows, with the constant 1 put before the m features.

    ``counted`` (rows, m + 1) are sums of features, with numbers of rows first: of each class; of
    each label and then of all rows; or, of numbers, of all rows. ``second`` (rows, entries) are the
    triangles of ``z z^T``, of all rows or by class, or empty. Of K numbers y, ``cross``
    (K (m + 2),) is ``sum y (1, z)`` and ``sum y^2``; else it is empty.
    """

    counted: Tensor = field(metadata=COUNTS_FIRST)
    second: Tensor
    cross: Tensor


@message(reduce="sum", over="architecture")
class Statistics16:
    """:class:`Statistics` in float16."""

    counted: Tensor = field(metadata=COUNTS_FIRST | rounded_rows("float16"))
    second: Tensor = field(metadata=rounded_triangles("float16"))
    cross: Tensor


@message(reduce="sum", over="architecture")
class StatisticsB16:
    """:class:`Statistics` in bfloat16."""

    counted: Tensor = field(metadata=COUNTS_FIRST | rounded_rows("bfloat16"))
    second: Tensor = field(metadata=rounded_triangles("bfloat16"))
    cross: Tensor


@message(reduce="sum", over="architecture")
class Statistics8:
    """:class:`Statistics` in int8."""

    counted: Tensor = field(metadata=COUNTS_FIRST | rounded_rows("int8"))
    second: Tensor = field(metadata=rounded_triangles("int8"))
    cross: Tensor


Sent = Statistics | Statistics16 | StatisticsB16 | Statistics8
_CODED: Mapping[str, type[Statistics16 | StatisticsB16 | Statistics8]] = MappingProxyType(
    {"float16": Statistics16, "bfloat16": StatisticsB16, "int8": Statistics8},
)


@tree
class Sums:
    """What a client adds up: ``counted`` as it is sent, and whole matrices ``gram`` (1 or K, m, m).

    ``cross`` is as it is sent. All are float64.
    """

    counted: Tensor
    gram: Tensor
    cross: Tensor


def no_statistics(
    task: Task, m: int, like: Tensor, *, by_class: bool, first_only: bool
) -> Statistics:
    """Return the sums of no rows, for features of width m, in the type of ``like``."""
    k, entries = task.num_classes, m * (m + 1) // 2
    rows = {"numbers": 1, "labels": k + 1}.get(task.objective.target, k)
    crosses = k * (m + 2) if task.objective.target == "numbers" else 0
    second = like.new_zeros(k if by_class else 1, 0 if first_only else entries)
    return Statistics(like.new_zeros(rows, m + 1), second, like.new_zeros(crosses))


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
    t, every, cross = targets_of(batch, task, z), weighted.sum(0, keepdim=True), z.new_zeros(0)
    of_target = t.mT @ weighted
    of_rows = of_target
    if task.objective.target == "numbers":
        squares = t.square().mT @ weighted[:, 0]
        of_rows, cross = every, torch.cat([of_target.flatten(), squares])
    elif task.objective.target == "labels":
        of_rows = torch.cat([of_target, every])
    if first_only:
        gram = z.new_zeros(1, 0, 0)
    elif by_class:
        gram = (t.mT.unsqueeze(2) * weighted[:, 1:]).mT @ z
    else:
        gram = (weighted[:, 1:].mT @ z).unsqueeze(0)
    return Sums(of_rows.double(), gram.double(), cross.double())


def as_sent(sums: Sums, wire: Wire, *, private: bool) -> Sent:
    """Return the message: triangles in place of symmetric matrices, in the numbers of the wire."""
    dtype = torch.float64 if wire == "float64" else torch.float32
    plain = Statistics(sums.counted, triangle(sums.gram), sums.cross)
    if private:
        plain = _multiplied(plain, inverse=False)
    rows, second, cross = (a.to(dtype) for a in (plain.counted, plain.second, plain.cross))
    if wire not in _CODED:
        return Statistics(rows, second, cross)
    kind = _CODED[wire]
    return kind(_coded(kind, "counted", rows), _coded(kind, "second", second), cross)


def _coded(kind: type, name: str, values: Tensor) -> Tensor:
    form = form_of(kind, name)
    assert isinstance(form, Rounded)
    return form.rounded(values)


def received(total: Sent, *, private: bool) -> Statistics:
    """Return the sums of a total of messages, in float64."""
    sums = Statistics(total.counted.double(), total.second.double(), total.cross.double())
    return _multiplied(sums, inverse=True) if private else sums


def _multiplied(sums: Statistics, *, inverse: bool) -> Statistics:
    """Return the sums times the constants of private rows, or divided by them."""
    entries, (m, like) = sums.second.shape[-1], (sums.counted.shape[-1] - 1, sums.counted)
    beside = torch.ones(m, m).to(like) * _BESIDE
    beside.diagonal().fill_(_DIAGONAL)
    of_second = triangle(beside) if entries else like.new_zeros(0)
    of_rows = like.new_full((m + 1,), _SUMS if entries else _SUMS_ALONE)
    of_rows = torch.where(torch.arange(m + 1, device=like.device) > 0, of_rows, _COUNT)
    if inverse:
        of_rows, of_second = 1 / of_rows, 1 / of_second
    return replace(sums, counted=sums.counted * of_rows, second=sums.second * of_second)


def noise_radius(privacy: Privacy | None, noises: Tensor, m: int) -> Tensor:
    """Return the largest eigenvalue that noise alone gives second moments of m features, ().

    ``noises`` () is the number of releases in the sums. A symmetric matrix with noise of deviation
    s beside its diagonal has eigenvalues up to ``2 s sqrt(m)`` (Wigner's semicircle).
    """
    if privacy is None:
        return torch.zeros_like(noises)
    scale = _BESIDE if of_records(privacy) else 1.0
    return 2.0 * privacy.deviation / scale * math.sqrt(m) * noises.sqrt()


def private_rows(z: Tensor, privacy: Privacy) -> Tensor:
    """Return features (batch, m) of length 1 at most, for sums under the system's noise, too.

    Then products of features times the constants of a release are multiples of the grid.
    """
    grid = privacy.grid
    if grid:
        grid = 2.0 ** math.ceil((math.log2(grid) + _STEPS) / 2)
    return bounded(unit_rows(z), replace(privacy, clip=1.0, grid=grid))


def moments_of(statistics: Statistics, task: Task) -> Moments:
    """Return the sums by their names, with matrices in place of triangles.

    Noisy counts are at least 1: a class without rows is not told from a small one.
    """
    rows, every = statistics.counted, statistics.counted[-1]
    k, m = task.num_classes, rows.shape[1] - 1
    if task.privacy is not None:
        rows = torch.cat([rows[:, :1].clamp(min=1.0), rows[:, 1:]], dim=1)
    gram = symmetric(statistics.second, m) if statistics.second.shape[-1] else statistics.second
    noisy = task.privacy is not None
    if task.objective.target == "numbers":
        cross, squares = statistics.cross[:-k].view(k, m + 1), statistics.cross[-k:]
        return Moments(cross[:, 0], cross[:, 1:], every[0], every[1:], gram, squares, noisy=noisy)
    if task.objective.target == "labels":
        counts, of_labels = rows[:-1, 0], rows[:-1, 1:]
        about = (counts, of_labels, every[0], every[1:], gram, counts)
        return Moments(*about, overlap=True, noisy=noisy)
    counts, total = rows[:, 0], rows.sum(0)
    return Moments(counts, rows[:, 1:], total[0], total[1:], gram, counts, noisy=noisy)


def projected(z: Tensor, key: Tensor, count: int) -> Tensor:
    """Return ``P z / sqrt(count)``, (batch, count), with P standard normal numbers of the key."""
    matrix = random.normal(random.fold(key, 2), (z.shape[1], count)).to(z.dtype)
    return z @ matrix / math.sqrt(count)


def widened(z: Tensor, key: Tensor, project: int, count: int, *, roots: bool) -> Tensor:
    """Return features (batch, m), or ``project`` projections of them, and what is put behind.

    That is the signed square root of each, and ``count`` random ones, ``relu(R z / |z| + b / 2)``.
    The projections, R and b are standard normal numbers of the key (1,), so nothing of other rows
    is needed; with an empty key there are none, and ``z`` stays.
    """
    z = projected(z, key.view(()), project) if project and len(key) else z
    behind = [z.abs().sqrt() * z.sign()] if roots else []
    if count and len(key):
        matrix = random.normal(random.fold(key.view(()), 0), (z.shape[1], count)).to(z.dtype)
        shift = random.normal(random.fold(key.view(()), 1), (count,)).to(z.dtype)
        length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
        unit = z / torch.where(length > 0, length, 1.0)
        behind.append((unit @ matrix + shift / 2).relu())
    return torch.cat([z, *behind], dim=1) if behind else z
