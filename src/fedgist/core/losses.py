"""Losses for one client's batch: means over the rows that are present.

``mask`` is (batch,), true where a row is present; absent rows have weight 0, whatever numbers they
hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``values`` (batch,) over the rows present; 0 if there are none."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``logits`` (batch, classes) with labels ``y`` (batch,)."""
    chosen = F.log_softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return masked_mean(-chosen, mask)


def kl(target: Tensor, logits: Tensor, mask: Tensor) -> Tensor:
    """Return the mean KL(target || softmax(logits)); ``target`` (batch, classes) sums to 1."""
    log_q = F.log_softmax(logits, dim=-1)
    return masked_mean((torch.xlogy(target, target) - target * log_q).sum(-1), mask)


def squared_distance(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over rows of |a - b|^2, summed over the last dimension."""
    return masked_mean((a - b).square().sum(-1), mask)


def proximal(params: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """Return |w - w0|^2 / 2, summed over all parameters (Li et al. 2020, FedProx, eq. 2)."""
    return (
        0.5 * torch.stack([(params[name] - anchor[name]).square().sum() for name in params]).sum()
    )
