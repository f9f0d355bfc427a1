"""Steps after the exchange of second moments: calibration, and rounds of logistic regression.

The server has a head from the sums of all clients (methods/common/moment_heads.py). Calibration
multiplies its scores by the factor of the least log loss. Refinement moves it toward logistic
regression by gradients, with the second moments as preconditioner. See docs/methods/analytic.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from fedgist.core.batch import Batch
from fedgist.core.counts import COUNTS
from fedgist.core.message import Nothing, message
from fedgist.core.task import Task
from fedgist.core.tree import tree
from fedgist.methods.common.latest_messages import LatestMessages
from fedgist.methods.common.left_out_rows import Spread
from fedgist.methods.common.moment_heads import ABSENT, SCALES, Moments, Scores, log_shares
from fedgist.methods.common.moment_sums import Statistics, moments_of, targets_of

FACTORS = 41  # of scores, tried by calibration: 1/20 to 20
LEAST_SIZE = 1e-12  # of squared weights: less is none


@message(reduce="sum")
class Key:
    """The key (1,) of the random features, which clients need before they send anything."""

    key: Tensor


@message(reduce="sum")
class Head:
    """A head and its prior: what clients predict by if a net cannot hold it.

    ``eta`` (K, m + 1) has the biases first, without the prior (K,), which is added to the scores.
    Of QDA, ``bend`` (K, m (m + 1) / 2) are triangles, and ``center`` (m,) is subtracted from
    features; both are empty otherwise. ``key`` (1,) is that of random numbers, empty without.
    """

    eta: Tensor
    prior: Tensor
    bend: Tensor
    center: Tensor
    key: Tensor


@message(reduce="sum", over="architecture")
class Losses:
    """The log loss of a client's rows, summed, for each factor of the scores: (FACTORS,)."""

    total: Tensor
    rows: Tensor = field(metadata=COUNTS)


@message(reduce="sum", over="architecture")
class Gradient:
    """The gradient of a client's log loss in the head, (K, m + 1), and its number of rows, (1,)."""

    total: Tensor
    rows: Tensor = field(metadata=COUNTS)


@tree
class Known:
    """What the server has of one architecture: the head, and all sums so far in float64.

    For ``head = "means"``, ``newest`` has each client's class sums in place of the total ``sums``.
    ``ahead`` (K, m + 1) is the head with its prior, moved on by momentum: where the next gradient
    is asked for. ``steps`` () counts gradients, and ``ridge`` () is the penalty of these steps.
    ``noises`` () counts the draws of noise in the sums. ``spread`` serves calibration by left-out
    rows.
    """

    head: Head
    ahead: Tensor
    steps: Tensor
    ridge: Tensor
    noises: Tensor
    sums: Statistics | None = None
    newest: LatestMessages | None = None
    spread: Spread | None = None


@tree
class OwnCounts:
    """A client's own counts (K,), and its number of rows (): they stay at the client."""

    counts: Tensor
    rows: Tensor


Own: TypeAlias = OwnCounts | Nothing


def head_of(before: Head, scores: Scores, moments: Moments, kind: str, prior: str) -> Head:
    """Return a head with these scores, scaled, and the prior of the counts.

    ``kind`` and ``prior`` are the method's ``head`` and ``prior``.
    """
    scale, counts, rows = SCALES[kind], moments.counts, moments.rows
    bias, logs = scale * scores.bias, torch.zeros_like(scores.bias)
    if kind == "ridge":  # it regresses on shares, which are its prior
        bias = bias - scale / 2 if moments.overlap else bias
    elif prior == "counts":
        logs = log_shares(moments)
    if not moments.overlap:
        logs = torch.where((counts > 0) | (rows <= 0), logs, ABSENT)
        bias = torch.where(counts > 0, bias, 0.0)
    return replace(before, eta=eta_of(scale * scores.weight, bias), prior=logs.float())


def eta_of(weight: Tensor, bias: Tensor) -> Tensor:
    """Return weights (K, m) and biases (K,) as one matrix in single precision."""
    return torch.cat([bias.unsqueeze(1), weight], dim=1).float()


def own_prior(own: Own, task: Task) -> Tensor | float:
    """Return the logarithm of the client's own shares of classes, or odds of labels, (K,)."""
    if isinstance(own, Nothing):
        return 0.0
    if task.objective.target == "labels":
        return ((own.counts + 1) / (own.rows - own.counts + 1)).log()
    return ((own.counts + 1) / (own.rows + task.num_classes)).log()


def whole_head(head: Head) -> Tensor:
    """Return eta with the prior in its biases, (K, m + 1)."""
    return torch.cat([head.eta[:, :1] + head.prior.unsqueeze(1), head.eta[:, 1:]], dim=1)


def rows_behind(known: Known, task: Task) -> Tensor:
    """Return the number of rows behind a head, ()."""
    if known.newest is not None:
        return known.newest.arrays["total"][..., 0].sum()
    assert known.sums is not None
    rows = known.sums.counted[:, 0]  # of classes; else the last is that of all rows
    return rows.sum() if task.objective.target == "class" else rows[-1]


def factors() -> list[float]:
    """Return the factors of the scores that calibration tries; 1 is in the middle."""
    return torch.logspace(-math.log10(20), math.log10(20), FACTORS).tolist()


def loss_of(logits: Tensor, batch: Batch, task: Task, weight: Tensor) -> Tensor:
    """Return the sum of the weighted log losses of the rows, ()."""
    if task.objective.target == "labels":
        t = targets_of(batch, task, logits)
        of_row = functional.binary_cross_entropy_with_logits(logits, t, reduction="none").mean(1)
    else:
        of_row = functional.cross_entropy(logits, batch.y, reduction="none")
    return torch.where(weight > 0, of_row * weight, 0.0).sum()


def calibrated(known: Known, losses: Losses) -> Known:
    """Return the head with its scores multiplied by the factor of the least loss."""
    tried = torch.tensor(factors(), device=losses.total.device)
    best, head = tried[losses.total.argmin()], known.head
    spread = known.spread and replace(known.spread, scale=best * known.spread.scale)
    head = replace(head, eta=best * head.eta, bend=best * head.bend)
    return begun(replace(known, head=head, spread=spread))


def begun(known: Known) -> Known:
    """Return what is known with refinement at its beginning."""
    return replace(
        known, ahead=whole_head(known.head).double(), steps=torch.zeros_like(known.steps)
    )


def refined(known: Known, gradient: Gradient, kinds: Sequence[int], task: Task) -> Known:
    """Return the head after a step of logistic regression, by an upper bound of its curvature.

    The Hessian of the log loss is at most G / 2, or G / 4 of labels, with G the second moments of
    all rows (Boehning 1992), so the step needs no learning rate. The step has Nesterov's momentum.
    Weights of features that are divided by the deviations of their ``kinds`` have the penalty
    m (K - 1) / |weights|^2 of the first head.
    """
    assert known.sums is not None
    moments, before = moments_of(known.sums, task), whole_head(known.head).double()
    k, m = before.shape[0], before.shape[1] - 1
    variance = moments.deviations(kinds).square()
    size = (before[:, 1:].square() * variance).sum()
    first = m * max(k - 1, 1) / size.clamp(min=LEAST_SIZE)
    penalty = torch.where(known.steps > 0, known.ridge, first)
    total = moments.total.unsqueeze(0)
    rows = moments.rows.clamp(min=moments.least).view(1, 1)
    gram = moments.gram.reshape(-1, m, m).sum(0)
    second = torch.cat([torch.cat([rows, total], 1), torch.cat([total.mT, gram], 1)])
    shrink = penalty * torch.cat([variance.new_zeros(1), variance])
    bound = second / (4 if task.objective.target == "labels" else 2) + shrink.diag()
    share = moments.rows / gradient.rows.double().clamp(min=moments.least)
    slope = gradient.total.double() * share + shrink * known.ahead
    after = known.ahead - torch.linalg.solve(bound, slope.mT).mT
    ahead = after + known.steps / (known.steps + 3) * (after - before)
    bias = after[:, :1] - known.head.prior.unsqueeze(1)
    head = replace(known.head, eta=torch.cat([bias, after[:, 1:]], dim=1).float())
    return replace(known, head=head, ahead=ahead, steps=known.steps + 1, ridge=penalty)
