"""Log loss of each training row by the discriminant analysis of all other rows, solved once.

Calibration needs to know how sure a head may be of rows that it has not learnt from. The server
sends the precision matrix, and a client takes each of its rows out of it by a rank-one update
(Sherman and Morrison 1950). The penalty stays that of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedgist.core.batch import Batch
from fedgist.core.message import message
from fedgist.methods.common.moment_heads import Moments
from fedgist.methods.common.triangles import symmetric, triangle

LEAST = 1e-12  # of what is left of a variance without a row
ALONE = 1e-6  # of a class's rows: with less than that beside it, a row is alone in its class


@message(reduce="sum")
class Spread:
    """Gaussian classes of one covariance, for m features and K classes.

    ``precision`` (m (m + 1) / 2,) is the triangle of ``M = (W + l I)^-1``. ``means`` (K, m) are
    those of the classes minus ``center`` (m,), that of all rows, and ``counts`` (K,) their rows.
    ``scale`` (1,) is what scores are multiplied by. ``key`` (1,) is that of random numbers, empty
    without.
    """

    precision: Tensor
    means: Tensor
    center: Tensor
    counts: Tensor
    scale: Tensor
    key: Tensor


def spread_of(moments: Moments, precision: Tensor, scale: float, key: Tensor) -> Spread:
    """Return what clients need of the sums of all; ``precision`` (m, m) is (n - K) M."""
    factor = torch.full_like(moments.rows, scale).view(1)
    inverse, means = triangle(precision / moments.freedom), moments.means
    counts, center = moments.counts.float(), moments.mean.float()
    return Spread(inverse.float(), means.float(), center, counts, factor.float(), key)


def no_spread(k: int, m: int, key: Tensor, like: Tensor) -> Spread:
    """Return the spread of no rows, on the device of ``like``."""
    precision = like.new_zeros(m * (m + 1) // 2, dtype=torch.float32)
    zeros = precision.new_zeros
    return Spread(precision, zeros(k, m), zeros(m), zeros(k), zeros(1), key)


def losses_without(
    z: Tensor, batch: Batch, weight: Tensor, spread: Spread, own: Tensor, factors: list[float]
) -> tuple[Tensor, Tensor]:
    """Return the summed log losses for each factor of the scores, and the number of rows, (1,).

    ``z`` (batch, m) are features, and ``weight`` (batch,) how often a row counts. ``own`` (K,) are
    the counts that say the prior; without any, it is uniform. The only row of a class is left out.
    """
    of = functional.one_hot(batch.y.clamp(min=0), len(spread.counts)) * weight.unsqueeze(1)
    left = spread.counts - of
    there = left > ALONE * spread.counts
    counted = torch.where(there.gather(1, batch.y.clamp(min=0).unsqueeze(1))[:, 0], weight, 0.0)
    prior = (own - of + 1).clamp(min=LEAST).log() if len(own) else torch.zeros_like(left)
    scores = spread.scale * _scores(z, batch.y.clamp(min=0), weight, spread)

    def loss(factor: float) -> Tensor:
        logits = (factor * scores + prior).masked_fill(~there, -torch.inf)
        of_row = functional.cross_entropy(logits, batch.y, reduction="none")
        return torch.where(counted > 0, of_row * counted, 0.0).sum()

    return torch.stack([loss(factor) for factor in factors]), counted.sum().view(1)


def _scores(z: Tensor, y: Tensor, weight: Tensor, spread: Spread) -> Tensor:
    """Return each row's scores (batch, K) by all rows but itself, without the prior.

    The score of a class is -1/2 times the squared distance to its mean, times the degrees of
    freedom. Without a row of class c, whose mean is mu_c, W loses ``less (z - mu_c) (z - mu_c)^T``.
    """
    z, means = z - spread.center.to(z.dtype), spread.means.to(z.dtype)
    inverse = symmetric(spread.precision, z.shape[1]).to(z.dtype)
    counts = spread.counts.to(z.dtype)
    rest = (counts[y] - weight).clamp(min=ALONE)
    ahead = counts[y] / rest  # of z - mu_c, when its own mean is without the row
    less = weight * ahead
    turned, of_means = (z - means[y]) @ inverse, means @ inverse
    squares = ((z @ inverse) * z).sum(1, keepdim=True) - 2 * z @ of_means.mT
    squares = squares + (of_means * means).sum(1)
    crosses = (turned * z).sum(1, keepdim=True) - turned @ means.mT
    own = (turned * (z - means[y])).sum(1)
    gain = less / (1 - less * own).clamp(min=LEAST)
    apart = squares + gain.unsqueeze(1) * crosses.square()
    own_apart = ahead.square() * (own + gain * own.square())
    apart = apart.scatter(1, y.unsqueeze(1), own_apart.unsqueeze(1))
    freedom = (counts.sum() - weight - len(counts)).clamp(min=1.0)
    return -freedom.unsqueeze(1) / 2 * apart
