"""Losses for one client's batch: means over the rows that are present.

``mask`` is (batch,), true for a present row. Absent rows have weight 0, whatever numbers they hold.
Every loss is a scalar, ().
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import Tensor

SURE = 1.0 - 1e-6  # upper bound of a discriminator's probability, so that losses stay finite


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean, (), of ``values`` (batch,) over the rows present; 0 if there are none."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def weighted_mean(values: Tensor, mask: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean, (), of ``values`` (batch,) times ``weight`` (batch,), if it is given.

    The mean is taken over the rows present, not over weights, so a weight also has an effect in a
    batch of one row.
    """
    return masked_mean(values if weight is None else values * weight, mask)


def mean_over_places(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean over the counted places of each row, (batch,); 0 without any.

    ``values`` and the mask ``counted`` are (batch, ...).
    """
    sums = torch.where(counted, values, 0.0).flatten(1).sum(1)
    return sums / counted.flatten(1).sum(1).clamp(min=1)


def cross_entropy(
    logits: Tensor,
    y: Tensor,
    mask: Tensor,
    *,
    weight: Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the mean cross-entropy of ``logits`` (batch, classes) with labels ``y`` (batch,).

    With ``smoothing`` s, a label has weight 1 - s on its class and s spread evenly over all classes
    (Szegedy et al. 2016, section 7). ``weight`` (batch,) multiplies the loss of each row.
    """
    return weighted_mean(cross_entropy_of_each(logits, y, smoothing), mask, weight)


def cross_entropy_of_each(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy at each place, (...), of ``logits`` (..., classes).

    ``y`` (...) holds the classes; the result is meaningless where it is negative. ``smoothing`` is
    that of :func:`cross_entropy`.
    """
    log_p = F.log_softmax(logits, dim=-1)
    chosen = log_p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    if smoothing:
        chosen = (1.0 - smoothing) * chosen + smoothing * log_p.mean(-1)
    return -chosen


def balanced_weights(y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Return n / (k n_c), the weight of each class c of each client: (clients, classes).

    ``y`` and ``mask`` are (clients, rows). A client has n rows of k classes, n_c of them of class c
    (King and Zeng 2001, as scikit-learn's "balanced"). A class without rows has weight 0. The
    weights of a client's rows have mean 1.
    """
    n_c = class_counts(y, mask, num_classes)
    n, k = n_c.sum(1, keepdim=True), (n_c > 0).sum(1, keepdim=True)
    return torch.where(n_c > 0, n / (k * n_c), 0.0)


def class_counts(y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Return each client's rows of each class, (clients, classes), of ``y``, ``mask`` as above."""
    return torch.zeros(len(y), num_classes, device=y.device).scatter_add_(1, y, mask.float())


def kl(target: Tensor, logits: Tensor, mask: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean KL(target || softmax(logits)), (); ``target``, ``logits`` (batch, classes).

    Each row of ``target`` sums to 1. ``weight`` (batch,) multiplies the term of each row.
    """
    log_q = F.log_softmax(logits, dim=-1)
    return weighted_mean((torch.xlogy(target, target) - target * log_q).sum(-1), mask, weight)


def squared_distance(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over rows of ``|a - b|^2``, summed over the last dimension.

    ``a`` and ``b`` are (batch, width).
    """
    return masked_mean((a - b).square().sum(-1), mask)


def proximal(params: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """Return ``|w - w0|^2 / 2``, summed over all parameters (Li et al. 2020, FedProx, eq. 2)."""
    return (
        0.5 * torch.stack([(params[name] - anchor[name]).square().sum() for name in params]).sum()
    )


def contrast(log_h: Tensor, y: Tensor) -> Tensor:
    """Return -ln h at a row's own class, and -ln(1 - h) at the others: (batch, classes).

    ``log_h`` (batch, classes) is ln h, and ``y`` is (batch,). h is a discriminator's probability
    that a row has the class of a representation (Berdoz et al. 2022, l_disc).
    """
    own_class = F.one_hot(y, log_h.shape[1]).bool()
    return -torch.where(own_class, log_h, torch.log1p(-log_h.exp().clamp(max=SURE)))


def information_bound(log_h: Tensor, y: Tensor, frequency: Tensor, there: Tensor) -> Tensor:
    """Return each row's term of a lower bound on mutual information, in nats: (batch,).

    ``log_h`` is (batch, lots, classes) and ``y`` (batch,). ``frequency`` (classes,) are the class
    frequencies p_c. ``there`` (lots, classes) marks the classes with a representation; p is taken
    among these. The result is the mean over lots. It is NaN for a class without a representation,
    and if no frequency is known.

    With K = classes - 1 negatives, drawn by class frequency and including a row's own class, I >=
    ln K + E[ln h(s, t^y) + K sum_c p_c ln(1 - h(s, t^c))] for every h below 1 (Berdoz et al. 2022,
    theorem 1, after Tian, Krishnan, Isola 2020). Negatives of other classes only would make the
    bound too high for skewed classes.
    """
    present = there * frequency
    share = present / present.sum(1, keepdim=True).clamp(min=torch.finfo(present.dtype).tiny)
    negatives = log_h.shape[2] - 1
    apart = torch.log1p(-log_h.exp().clamp(max=SURE))
    of_own_class = log_h.gather(2, y.view(-1, 1, 1).expand(-1, log_h.shape[1], 1)).squeeze(2)
    bounds = math.log(max(negatives, 1)) + of_own_class + negatives * (apart * share).sum(2)
    has = there[:, y].T * (present.sum(1) > 0)  # (batch, lots)
    mean = (bounds * has).sum(1) / has.sum(1).clamp(min=1.0)
    return torch.where(has.sum(1) > 0, mean, torch.nan)
