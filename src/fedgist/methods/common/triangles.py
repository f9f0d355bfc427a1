"""Symmetric matrices as their upper triangles: the form in which second moments are sent."""

from __future__ import annotations

import torch
from torch import Tensor


def triangle(gram: Tensor) -> Tensor:
    """Return the upper triangle (..., m (m + 1) / 2) of symmetric matrices (..., m, m)."""
    row, column = torch.triu_indices(gram.shape[-1], gram.shape[-1], device=gram.device)
    return gram[..., row, column]


def symmetric(upper: Tensor, m: int) -> Tensor:
    """Return symmetric matrices (..., m, m) from their upper triangles."""
    row, column = torch.triu_indices(m, m, device=upper.device)
    whole = upper.new_zeros(*upper.shape[:-1], m, m)
    whole[..., row, column] = upper
    whole[..., column, row] = upper
    return whole
