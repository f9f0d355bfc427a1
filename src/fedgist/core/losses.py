"""Losses for one client's batch: means over the rows that are present.

``mask`` is (batch,), true where a row is present; absent rows have weight 0, whatever numbers they
hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import Tensor

SURE = 1.0 - 1e-6  # a discriminator is never surer than this, so that losses stay finite


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``values`` (batch,) over the rows present; 0 if there are none."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def cross_entropy(
    logits: Tensor,
    y: Tensor,
    mask: Tensor,
    *,
    weight: Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the mean cross-entropy of ``logits`` (batch, classes) with labels ``y`` (batch,).

    With ``smoothing`` s, a label is (1 - s) of its class and s of all classes alike (Szegedy et al.
    2016, section 7). The loss of each row is multiplied by its ``weight`` (batch,); the mean is
    taken over rows, not over weights, so a batch of one row feels its weight, too.
    """
    log_p = F.log_softmax(logits, dim=-1)
    chosen = log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    if smoothing:
        chosen = (1.0 - smoothing) * chosen + smoothing * log_p.mean(-1)
    if weight is not None:
        chosen = chosen * weight
    return masked_mean(-chosen, mask)


def balanced_weights(y: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Return n / (k n_c), the weight of each class c of each client: (clients, classes).

    ``y`` and ``mask`` are (clients, rows); n is how many rows a client has, k how many classes, n_c
    how many rows of class c (King and Zeng 2001, as scikit-learn's "balanced"). A class without
    rows has weight 0. The weights of a client's rows have mean 1.
    """
    n_c = torch.zeros(len(y), num_classes, device=y.device).scatter_add_(1, y, mask.float())
    n, k = n_c.sum(1, keepdim=True), (n_c > 0).sum(1, keepdim=True)
    return torch.where(n_c > 0, n / (k * n_c), 0.0)


def kl(target: Tensor, logits: Tensor, mask: Tensor) -> Tensor:
    """Return the mean KL(target || softmax(logits)); ``target`` (batch, classes) sums to 1."""
    log_q = F.log_softmax(logits, dim=-1)
    return masked_mean((torch.xlogy(target, target) - target * log_q).sum(-1), mask)


def squared_distance(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over rows of ``|a - b|^2``, summed over the last dimension."""
    return masked_mean((a - b).square().sum(-1), mask)


def proximal(params: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """Return ``|w - w0|^2 / 2``, summed over all parameters (Li et al. 2020, FedProx, eq. 2)."""
    return (
        0.5 * torch.stack([(params[name] - anchor[name]).square().sum() for name in params]).sum()
    )


def contrast(log_h: Tensor, y: Tensor) -> Tensor:
    """Return -ln h at a row's own class, -ln(1 - h) at the others: (batch, classes).

    h (batch, classes) is the chance, for a discriminator, that a row is of the class that it sees
    (Berdoz et al. 2022, l_disc).
    """
    own = F.one_hot(y, log_h.shape[1]).bool()
    return -torch.where(own, log_h, torch.log1p(-log_h.exp().clamp(max=SURE)))


def information_bound(log_h: Tensor, y: Tensor, frequency: Tensor, there: Tensor) -> Tensor:
    """Return what each row adds to a lower bound on mutual information, in nats: (batch,).

    With K = classes - 1 negatives that are drawn as classes occur, a row's own included,
    I >= ln K + E[ln h(s, t^y) + K sum_c p_c ln(1 - h(s, t^c))] for every h below 1 (Berdoz et al.
    2022, theorem 1, after Tian, Krishnan, Isola 2020). Negatives of other classes alone would make
    it too high where classes are skewed. ``log_h`` (batch, lots, classes), ``frequency`` (classes,)
    are the p_c, ``there`` (lots, classes) says of which classes there are representations: p is
    that among them. The mean over lots; NaN for a class of which there is none, and where no
    frequency is known.
    """
    present = there * frequency
    share = present / present.sum(1, keepdim=True).clamp(min=torch.finfo(present.dtype).tiny)
    negatives = log_h.shape[2] - 1
    apart = torch.log1p(-log_h.exp().clamp(max=SURE))
    own = log_h.gather(2, y.view(-1, 1, 1).expand(-1, log_h.shape[1], 1)).squeeze(2)
    bounds = math.log(max(negatives, 1)) + own + negatives * (apart * share).sum(2)
    has = there[:, y].T * (present.sum(1) > 0)  # (batch, lots)
    mean = (bounds * has).sum(1) / has.sum(1).clamp(min=1.0)
    return torch.where(has.sum(1) > 0, mean, torch.nan)
