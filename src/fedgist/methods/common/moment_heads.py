"""Linear and quadratic heads from counts, sums and second moments of features.

The sums of all clients are those of all rows together, so one exchange gives the head that pooled
rows would give. See docs/methods/analytic.md for the sources.

=========  =======================================================================================
here
=========  =======================================================================================
z          features of a row, m numbers
t          targets of a row, K numbers: 1 of its class or of each label, 0 of the others
n, n_k     number of rows, and ``sum t_k``
T, B       total scatter ``sum (z - mean)(z - mean)^T``, and ``sum t_k (z - mean)``, (K, m)
W          scatter within classes: ``T - sum_k B_k B_k^T / n_k``; of labels, which overlap, T
l          penalty: the covariance is ``(W + l I) / (n - K)``
=========  =======================================================================================

All functions take float64 and return float64. A class without rows has weights of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from fedgist.methods.common.conjugate_head import map_head
from fedgist.methods.common.linear_head import COSINE

PENALTIES = 67  # tried by cross-validation: 1e-8 to 1e3 times the mean eigenvalue
OWN_SHARE = 0.2  # of a class's own covariance in QDA; the rest is that of all classes
PRIOR_ROWS = 1.0  # of FedLog's prior, its nu
#: What scores are multiplied by before priors are added: no head is calibrated by itself.
SCALES: Mapping[str, float] = MappingProxyType(
    {"whitened": 0.2, "lda": 1 / 3, "qda": 0.2, "means": 1 / 3, "ridge": 10.0, "cosine": COSINE}
)
ABSENT = -100.0  # the logit of a class without rows
OF_NEGATIVE = 0.25  # the least penalty beside the size of the most negative eigenvalue
LEAST = 1e-300  # in a division whose result is not used


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over rows: ``counts`` (K,), ``sums`` (K, m), ``rows`` (), ``total`` (m,), ``gram``.

    ``gram`` is (m, m), or (K, m, m) by class. ``squares`` (K,) are ``sum t^2``, which are the
    counts of classes and labels. ``overlap`` says that a row may have several targets, and
    ``noisy`` that counts have noise, so that those below 1 are none.
    """

    counts: Tensor
    sums: Tensor
    rows: Tensor
    total: Tensor
    gram: Tensor
    squares: Tensor
    overlap: bool = False
    noisy: bool = False

    @property
    def least(self) -> Tensor:
        """The smallest number of rows that divides a sum, (): what is below it is rounding."""
        return least_of(self.rows, noisy=self.noisy)

    @property
    def mean(self) -> Tensor:
        """Mean of all rows, (m,)."""
        return self.total / self.rows.clamp(min=self.least)

    @property
    def scatter(self) -> Tensor:
        """T, (m, m)."""
        m = len(self.total)
        gram = self.gram.reshape(-1, m, m).sum(0)
        return gram - torch.outer(self.total, self.mean)

    @property
    def between(self) -> Tensor:
        """B, (K, m)."""
        return self.sums - torch.outer(self.counts, self.mean)

    @property
    def means(self) -> Tensor:
        """Mean of each class minus that of all rows, (K, m)."""
        return self.between / self.counts.clamp(min=self.least).unsqueeze(1)

    @property
    def within(self) -> Tensor:
        """W, (m, m)."""
        return self.scatter if self.overlap else self.scatter - self.between.mT @ self.means

    @property
    def freedom(self) -> Tensor:
        """Degrees of freedom of the covariance, at least 1: ()."""
        return (self.rows - (1 if self.overlap else len(self.counts))).clamp(min=1.0)

    def scaled(self, scale: Tensor) -> Moments:
        """Return the sums of features divided by ``scale`` (m,)."""
        gram = self.gram / torch.outer(scale, scale)
        return replace(self, sums=self.sums / scale, total=self.total / scale, gram=gram)

    def alike(self) -> Moments:
        """Return sums in which all classes have as many rows: W and their means stay."""
        there = (self.counts > 0).to(self.counts.dtype)
        counts = there * self.rows / there.sum().clamp(min=1.0)
        means = self.means + self.mean
        sums = counts.unsqueeze(1) * means
        gram = self.within + sums.mT @ means
        return replace(self, counts=counts, sums=sums, total=sums.sum(0), gram=gram, squares=counts)

    def deviations(self, kinds: Sequence[int]) -> Tensor:
        """Return the root mean square deviation of a feature's kind, (m,); 1 of constant ones.

        ``kinds`` are the numbers of neighboring features that have one unit. If each were divided
        by its own deviation, a nearly constant feature would count as much as the others.
        """
        rows = self.rows.clamp(min=self.least)
        variance, of_size = self.scatter.diagonal() / rows, self.total.square() / rows.square()
        variance = torch.where(variance > ROUNDING * of_size, variance.clamp(min=0.0), 0.0)
        sizes = torch.tensor(kinds, device=variance.device)
        kind = torch.repeat_interleave(sizes)
        mean = variance.new_zeros(len(kinds)).index_add(0, kind, variance) / sizes
        return torch.where(mean > 0, mean.sqrt(), 1.0)[kind]


ROUNDING = 1e-12  # of float64 products: a variance below is that of a constant


def least_of(rows: Tensor, *, noisy: bool) -> Tensor:
    """Return the smallest number of rows that divides a sum, (), of ``rows`` () in all."""
    return torch.ones_like(rows) if noisy else (ROUNDING * rows).clamp(min=LEAST)


@dataclass(frozen=True, eq=False)
class Scores:
    """A score for each target, linear in z: ``weight`` (K, m) and ``bias`` (K,)."""

    weight: Tensor
    bias: Tensor

    def of_unscaled(self, scale: Tensor) -> Scores:
        """Return the same scores of features that were not divided by ``scale`` (m,)."""
        return Scores(self.weight / scale, self.bias)


def cross_validated(moments: Moments) -> Tensor:
    """Return the penalty l of ridge regression by generalized cross-validation, ().

    GCV(l) = n RSS(l) / (n - df(l))^2 (Golub, Heath and Wahba 1979), with one l for all targets. It
    serves as the penalty of every head (docs/methods/analytic.md#penalty).
    """
    values, vectors = torch.linalg.eigh(moments.scatter)
    d = values.clamp(min=0.0)
    z = vectors.mT @ moments.between.mT  # (m, K)
    n = moments.rows
    mean = d.mean()
    steps = torch.logspace(-8, 3, PENALTIES, dtype=d.dtype, device=d.device)
    penalties = steps * torch.where(mean > 0, mean, 1.0)
    whole = (moments.squares - moments.counts.square() / n.clamp(min=moments.least)).sum()
    ratio = d / (d + penalties.unsqueeze(1))  # (penalties, m)
    explained = (2 * ratio - ratio.square()) * torch.where(d > 0, 1 / d.clamp(min=LEAST), 0.0)
    residual = (whole - explained @ z.square().sum(1)).clamp(min=0.0)
    left = n - 1 - ratio.sum(1)
    score = torch.where(left > 0, n * residual / left.clamp(min=LEAST).square(), torch.inf)
    # of many penalties that fit nothing, the largest
    best = penalties.flip(0)[score.flip(0).argmin()]
    # exact sums have no negative eigenvalue: one shows how far rounded sums are from them
    return torch.maximum(best, OF_NEGATIVE * -values.min())


def ridge(moments: Moments, penalty: Tensor) -> Scores:
    """Return the regression of each target on z: (T + l I) w = B, with a bias of no penalty."""
    values, vectors = torch.linalg.eigh(moments.scatter)
    d = values.clamp(min=0.0) + penalty
    weight = moments.between @ vectors * _inverse(d) @ vectors.mT
    level = moments.counts / moments.rows.clamp(min=moments.least)
    return Scores(weight, level - weight @ moments.mean)


def lda(moments: Moments, penalty: Tensor) -> Scores:
    """Return the scores of linear discriminant analysis, without priors (Fisher 1936).

    The score is ln N(z; mean of the class, covariance) minus what all classes share. Of a label it
    is that of rows with the label minus that of rows without it.
    """
    return _gaussian(moments, precision_of(moments, penalty))


def precision_of(moments: Moments, penalty: Tensor) -> Tensor:
    """Return the inverse of the covariance that classes share, (m, m)."""
    values, vectors = torch.linalg.eigh(moments.within)
    inverse = _inverse(values.clamp(min=0.0) + penalty) * moments.freedom
    precision: Tensor = vectors * inverse @ vectors.mT
    return precision


def _gaussian(moments: Moments, precision: Tensor) -> Scores:
    """Return the scores of Gaussian classes of one precision matrix (m, m)."""
    weight = moments.means @ precision
    bias = -(weight * moments.means).sum(1) / 2
    if moments.overlap:
        others = _others(moments)
        away = others @ precision
        bias = bias + (away * others).sum(1) / 2
        weight = weight - away
    return Scores(weight, bias - weight @ moments.mean)


def _others(moments: Moments) -> Tensor:
    """Return the mean of the rows without each label minus that of all rows, (K, m)."""
    lacking = (moments.rows - moments.counts).clamp(min=moments.least)
    return -moments.between / lacking.unsqueeze(1)


def whitened(moments: Moments, penalty: Tensor) -> Scores:
    """Return FedLog's head (eq. 14) of centred features whose covariance is the identity."""
    values, vectors = torch.linalg.eigh(moments.within)
    inverse = _inverse(values.clamp(min=0.0) + penalty) * moments.freedom
    root = vectors * inverse.sqrt() @ vectors.mT
    sums = torch.cat([moments.counts.unsqueeze(1), moments.between @ root], dim=1)
    if moments.overlap:
        lacking = torch.cat([(moments.rows - moments.counts).unsqueeze(1), -sums[:, 1:]], dim=1)
        both = torch.vmap(lambda s: map_head(s, PRIOR_ROWS))(torch.stack([sums, lacking], 1))
        eta = both[:, 0] - both[:, 1]
    else:
        eta = map_head(sums, PRIOR_ROWS)
    weight = eta[:, 1:] @ root
    return Scores(weight, eta[:, 0] - weight @ moments.mean)


@dataclass(frozen=True, eq=False)
class Curves:
    """Scores that are quadratic in u = z - ``center``: ``-u^T bend u / 2 + weight u + bias``.

    ``center`` is (m,), ``bend`` (K, m, m), ``weight`` (K, m) and ``bias`` (K,).
    """

    center: Tensor
    bend: Tensor
    weight: Tensor
    bias: Tensor

    def of_unscaled(self, scale: Tensor) -> Curves:
        """Return the same scores of features that were not divided by ``scale`` (m,)."""
        bend = self.bend / torch.outer(scale, scale)
        return Curves(self.center * scale, bend, self.weight / scale, self.bias)


def qda(moments: Moments, penalty: Tensor, own: float = OWN_SHARE) -> Curves:
    """Return the scores of Gaussian classes with covariances of their own, without priors.

    The covariance of a class is ``(1 - own) W / (n - K) + own W_k / (n_k - 1) + l I / (n - K)``
    (regularized discriminant analysis, Friedman 1989). A class with fewer than two rows has W.
    """
    identity = torch.eye(len(moments.total)).to(moments.total)
    means = moments.means
    whole = means + moments.mean
    each = moments.gram - torch.einsum("k,ki,kj->kij", moments.counts, whole, whole)
    shared = moments.within / moments.freedom
    freedom = (moments.counts - 1).clamp(min=1.0).view(-1, 1, 1)
    apart = torch.where((moments.counts > 1).view(-1, 1, 1), each / freedom, shared)
    covariance = (1 - own) * shared + own * apart + penalty * identity / moments.freedom
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=ROUNDING * values.max())
    bend = torch.einsum("kij,kj,klj->kil", vectors, 1 / values, vectors)
    weight = torch.einsum("kij,kj->ki", bend, means)
    constant = values.log().sum(1)
    level = (weight * means).sum(1) + constant - constant.mean()
    return Curves(moments.mean, bend, weight, -level / 2)


def from_means(
    each: Tensor, penalty: float | None, *, noisy: bool = False
) -> tuple[Scores, Moments]:
    """Return LDA's scores from the sums of each client, and the sums of all.

    ``each`` (clients, K, m + 1) holds counts and sums, which may be ``noisy``. The covariance is
    that of class means of clients about the means of all, times their rows (FedCOF,
    arXiv:2412.14326, eq. 5). It is right if rows are dealt to clients at random. Without a penalty
    it is shrunk by OAS (Chen et al. 2010).
    """
    counts, sums = each[..., 0].double(), each[..., 1:].double()
    total, rows = sums.sum(0), counts.sum(0)
    m = sums.shape[-1]
    least = least_of(rows.sum(), noisy=noisy)
    means = total / rows.clamp(min=least).unsqueeze(1)
    own = sums / counts.clamp(min=least).unsqueeze(-1)
    apart = (own - means) * counts.sqrt().unsqueeze(-1)
    scatter = apart.flatten(0, 1).mT @ apart.flatten(0, 1)
    freedom = ((counts > 0).sum(0) - 1).clamp(min=0).sum().to(scatter.dtype)
    covariance = scatter / freedom.clamp(min=1.0)
    trace, square = covariance.trace(), covariance.square().sum()
    wide = (freedom + 1 - 2 / m) * (square - trace.square() / m)
    share = ((1 - 2 / m) * square + trace.square()) / wide.clamp(min=LEAST)
    level = share.clamp(max=1.0) * trace / m
    identity = torch.eye(m).to(covariance)
    if penalty is None:
        covariance = (1 - share.clamp(max=1.0)) * covariance + level * identity
    else:
        covariance = covariance + penalty * identity / freedom.clamp(min=1.0)
    values, vectors = torch.linalg.eigh(covariance)
    precision = vectors * _inverse(values) @ vectors.mT
    moments = Moments(rows, total, rows.sum(), total.sum(0), covariance, rows, noisy=noisy)
    return _gaussian(moments, precision), moments


LINEAR: Mapping[str, Callable[[Moments, Tensor], Scores]] = MappingProxyType(
    {"whitened": whitened, "lda": lda, "ridge": ridge}
)


def log_shares(moments: Moments) -> Tensor:
    """Return the logarithm of the share of each class, or of the odds of each label, (K,)."""
    counts, rows = moments.counts, moments.rows
    if moments.overlap:
        return ((counts + 1) / (rows - counts + 1)).log()
    return ((counts + 1) / (rows + len(counts))).log()


def _inverse(values: Tensor) -> Tensor:
    """Return 1 / values; 0 of what is 0 beside the largest: constant and collinear features."""
    least = ROUNDING * values.max()
    return torch.where(values > least, 1 / values.clamp(min=LEAST), 0.0)
