"""Metrics of ranks: how well scores tell positive from negative rows, for stacks of clients.

``scores``, ``positive`` and ``present`` are (..., rows), the last two Boolean; an absent row has no
effect. Ties count as scikit-learn counts them. A present score that is NaN has no rank, and then
the metric is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def roc_area(scores: Tensor, positive: Tensor, present: Tensor) -> Tensor:
    """Return the area under the ROC curve, (...), NaN unless there are rows of both kinds.

    It is computed from ranks (Mann and Whitney): the fraction of pairs of a positive and a negative
    row in which the former has the higher score; ties count one half.
    """
    lost = (scores.isnan() & present).any(-1)
    scores = _bounded(scores).masked_fill(~present, torch.inf)  # absent rows rank above all
    ordered, places = scores.contiguous().sort(-1)
    ranks = _ranks(ordered)
    positive = (positive & present).gather(-1, places)
    positives = positive.sum(-1).to(torch.float64)
    negatives = present.sum(-1) - positives
    wins = (ranks * positive).sum(-1) - positives * (positives + 1) / 2
    return (wins / (positives * negatives)).masked_fill(lost, torch.nan)


def _ranks(ordered: Tensor) -> Tensor:
    """Return the ranks, from 1, of scores in increasing order; equal ones have their mean rank."""
    count = ordered.shape[-1]
    places = torch.arange(count, dtype=torch.int32, device=ordered.device).expand(ordered.shape)
    equal = ordered[..., 1:] == ordered[..., :-1]
    goes_on, ends_later = (torch.zeros_like(ordered, dtype=torch.bool) for _ in range(2))
    goes_on[..., 1:], ends_later[..., :-1] = equal, equal
    first = places.masked_fill(goes_on, 0).cummax(-1).values
    last = places.masked_fill(ends_later, count).flip(-1).cummin(-1).values.flip(-1)
    return (first + last + 2).to(torch.float64) / 2


def mean_precision(scores: Tensor, positive: Tensor, present: Tensor) -> Tensor:
    """Return the average precision, (...), NaN without a positive row.

    It is the mean over positive rows of the precision at the row's own score: the share of positive
    rows among those with at least this score. This equals the sum over thresholds of the precision
    times the increase in recall.
    """
    positive, lost = positive & present, (scores.isnan() & present).any(-1)
    scores = _bounded(scores)
    at_least = _count_from(scores, scores, present)
    positive_at_least = _count_from(scores, scores, positive)
    precision = positive_at_least / at_least.clamp(min=1)
    total = torch.where(positive, precision, 0.0).sum(-1, dtype=torch.float64)
    return (total / positive.sum(-1)).masked_fill(lost, torch.nan)


def _bounded(scores: Tensor) -> Tensor:
    """Return the scores without infinite ones, which absent rows have to themselves."""
    ends = torch.finfo(scores.dtype)
    return scores.clamp(ends.min, ends.max)


def _count_from(scores: Tensor, thresholds: Tensor, counted: Tensor) -> Tensor:
    """Return how many counted rows have at least the score of each threshold: (..., rows)."""
    ordered = scores.masked_fill(~counted, -torch.inf).sort(-1).values.contiguous()
    below = torch.searchsorted(ordered, thresholds.contiguous())
    return (scores.shape[-1] - below).to(torch.float64)
