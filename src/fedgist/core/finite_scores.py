"""Scores of models whose outputs are finite: a model that diverged has no score.

A metric of numbers that are not finite means nothing: the likeliest class of NaN is the first one,
and NaN has no rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedgist.core.objectives.metrics import LOSS
from fedgist.core.objectives.objective import Objective, RowPredictions
from fedgist.core.tree import leaves, map_leaves

LOST = torch.inf  # the loss of a model without a score, in place of all its metrics


def scored(
    objective: Objective,
    predictions: RowPredictions,
    y: Tensor,
    mask: Tensor,
    *,
    confusion: bool,
    by_row: bool = False,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the metrics of K models, (K,) each, and the confusion matrix if it is wanted.

    The predictions, ``y`` and ``mask`` are (K, rows, ...). A model is lost if its results on its
    rows, or its loss, are not finite. Its loss is :data:`LOST`, its other metrics are NaN, and it
    is not in the confusion matrix.

    With ``by_row``, results that are not finite are zeros, and no model is lost. A private choice
    by correct rows needs this, because a row may change only its own result.
    """
    rows = _are_finite(predictions, mask)
    finite = torch.ones_like(mask[:, 0]) if by_row else rows.all(1)
    if not bool(rows.all()):  # a user's metric and scikit-learn's do not take NaN
        mask = mask & finite.unsqueeze(1)
        predictions = map_leaves(lambda leaf: _zeroed(leaf, rows), predictions)
    values = objective.measure(predictions, y, mask)
    if by_row:
        return values, objective.confusion(predictions, y, mask) if confusion else None
    lost = ~finite.cpu() | values[LOSS.name].isinf().cpu()
    if bool(lost.any()):
        mask = mask & ~lost.to(mask.device).unsqueeze(1)
        values = {n: v.masked_fill(lost.to(v.device), torch.nan) for n, v in values.items()}
        values[LOSS.name] = values[LOSS.name].masked_fill(lost.to(values[LOSS.name].device), LOST)
    return values, objective.confusion(predictions, y, mask) if confusion else None


def _are_finite(predictions: RowPredictions, mask: Tensor) -> Tensor:
    """Return whether all results of each row are finite, or it is absent: (K, rows) Booleans."""
    finite = torch.ones_like(mask)
    for leaf in leaves(predictions):
        if leaf.is_floating_point():
            numbers = torch.isfinite(leaf)
            finite &= numbers.flatten(2).all(2) if numbers.dim() > mask.dim() else numbers
    return finite | ~mask


def _zeroed(leaf: Tensor, finite: Tensor) -> Tensor:
    """Return results (K, rows, ...) with zeros for the rows that are not ``finite`` (K, rows)."""
    return leaf.masked_fill(~finite.view(*finite.shape, *(1 for _ in leaf.shape[2:])), 0)


def of_finite(losses: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """Return the losses (K,) of clients, NaN for those with parameters that are not finite.

    ``params`` are (K, ...).
    """
    for array in (a for a in params.values() if a.is_floating_point()):
        sums = array.unsqueeze(-1).flatten(1).sum(1, dtype=torch.float64)
        losses = torch.where(sums.isfinite(), losses, torch.nan)
    return losses
