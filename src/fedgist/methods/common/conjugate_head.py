"""FedLog's exponential family, and its MAP head from class sums of features.

Yu, Zhang, Poupart, "FedLog: Personalized federated classification with less communication and more
flexibility" (https://arxiv.org/abs/2407.08337).

=========  =======================================================================================
paper      here
=========  =======================================================================================
phi        features with the constant 1 put first, m + 1 numbers
eta        the head: row y of (classes, m + 1); its first column is the bias
S, n       sum_i phi_i (x) e_{y_i} over all clients (eq. 2), and how many terms: S's first column
chi, nu    the prior's pseudo-sum and pseudo-count (eq. 9)
A(eta)     ``ln sum_y exp(|eta_y|^2 / 4)``, the log-partition (eq. 11)
=========  =======================================================================================
"""

from __future__ import annotations

import math
from dataclasses import field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedgist.core import random
from fedgist.core.batch import Batch
from fedgist.core.counts import COUNTS_FIRST
from fedgist.core.message import message
from fedgist.core.nets.net import Net
from fedgist.core.privacy import bounded, counted
from fedgist.core.task import Task
from fedgist.methods.common.linear_head import class_sums, with_constant

NEWTON_STEPS = 20  # 9 suffice for a hundred classes, 12 for 5000, whatever the features' size


@message(reduce="sum")
class ClassSums:
    """S, (classes, m + 1): class sums of features, class counts in the first column.

    Of numbers and labels they are other statistics, with numbers of rows in the first column too.
    """

    total: Tensor = field(metadata=COUNTS_FIRST)


def feature_sums(net: Net, batch: Batch, task: Task) -> ClassSums:
    """Return S, (classes, m + 1), over a batch (eq. 2); private records have clipped terms."""
    z = net.features(batch.x)
    phi, rows = with_constant(bounded(z, task.privacy)), counted(z, batch, task.privacy)
    return ClassSums(class_sums(phi, rows.y, rows.mask, task.num_classes, rows.weight))


def log_posterior(eta: Tensor, s: Tensor, nu: float) -> Tensor:
    """Return <eta, chi + S> - (nu + n) A(eta), the objective of eq. 14, with chi = 0: ().

    ``eta`` and ``s`` are (classes, m + 1).
    """
    a = torch.logsumexp(eta.square().sum(1) / 4, dim=0)  # eq. 11
    return (eta * s).sum() - (nu + s[:, 0].sum()) * a


def map_head(s: Tensor, nu: float) -> Tensor:
    """Return the exact solution of eq. 14: eta for ``s``, both (classes, m + 1), double precision.

    With T = nu + n, ``c_y = |S_y|^2 / T^2`` and ``p = softmax(|eta|^2 / 4)``, stationarity says
    eta_y = 2 S_y / (T p_y), so ln p_y - c_y / p_y^2 = -L with one L = A(eta) for all classes. Its
    solution is p_y^2 = 2 c_y / w_y, where w_y + ln w_y = ln(2 c_y) + 2 L (w is Lambert's W of
    2 c_y e^{2L}, which overflows); and L is the root of sum_y p_y = 1, whose left side falls as L
    grows. So ``|eta_y|^2 = 2 w_y``; classes without rows get eta_y = 0, and all do if T <= 0.

    ln sum_y p_y is convex in L and falls, with derivative -sum_y p_y / (1 + w_y) / sum_y p_y, so
    Newton's steps from below the root rise to it and never pass it. Below it are A(0) = ln(classes)
    and each c_y, where p_y alone is 1. The number of steps is fixed: there is no branch on numbers,
    and the head can be solved under vmap, on any device, and on tensors without numbers.
    """
    t = nu + s[:, 0].sum()
    ln_2c = torch.log(2 * s.square().sum(1) / torch.where(t > 0, t, 1.0) ** 2)  # -inf: no rows
    level = (ln_2c.max().exp() / 2).clamp(min=math.log(len(s)))
    for _ in range(NEWTON_STEPS):
        ln_p, w = _log_p(ln_2c, level)
        excess = torch.logsumexp(ln_p, dim=0)
        level = level + excess / (torch.softmax(ln_p, dim=0) / (1 + w)).sum()
    length = (2 * _log_p(ln_2c, level)[1]).sqrt().unsqueeze(1)
    return torch.where(t > 0, F.normalize(s, dim=1, eps=1e-300) * length, 0.0)


def _log_p(ln_2c: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln p and w, both (classes,), for a given L."""
    w = _omega(ln_2c + 2 * level)
    # the same number written twice: the first cancels for large w, the second is undefined for an
    # empty class
    return torch.where(w < 1, w / 2 - level, (ln_2c - torch.log(w.clamp(min=1.0))) / 2), w


def random_pseudo_sums(key: Tensor, shape: tuple[int, int], nu: float) -> Tensor:
    """Return a pseudo-sum chi, (classes, m + 1), with a random MAP head and zero counts.

    Row y of that head has a random direction, no bias, and the length of m normal numbers. All rows
    have the same length, so p_y = 1 / classes and chi_y = nu eta_y / (2 classes), by stationarity.
    """
    classes, width = shape[0], shape[1] - 1
    eta = math.sqrt(width) * F.normalize(random.normal(key, (classes, width)), dim=1)
    return torch.cat([torch.zeros_like(eta[:, :1]), nu * eta / (2 * classes)], dim=1)


def _omega(z: Tensor) -> Tensor:
    """Solve w + ln w = z for w > 0 (Wright's omega function), elementwise, in double precision.

    The result is 0 if z is -inf.
    """
    w = torch.where(z > 1, z - torch.log(z.clamp(min=1.0)), torch.exp(z.clamp(max=1.0)))
    for _ in range(8):  # Newton's method on f(ln w) = w + ln w - z: quadratic from this start
        ln_w = torch.log(w)
        w = torch.where(w > 0, torch.exp(ln_w - (w + ln_w - z) / (1 + w)), w)
    return w
