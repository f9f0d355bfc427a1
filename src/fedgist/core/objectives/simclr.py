"""SimCLR: encoders learn without labels to match two views of the same row.

Chen, Kornblith, Norouzi, Hinton 2020, "A simple framework for contrastive learning of visual
representations"; the loss is eq. 3 of Shi et al. 2021, "Towards communication-efficient and
privacy-preserving federated representation learning" (FLESD). See docs/methods/flesd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows
from torch import Tensor

from fedgist.core import losses
from fedgist.core.batch import Batch
from fedgist.core.bounds import PositiveInt, Temperature, check_bounds
from fedgist.core.objectives.metrics import LOSS, PROBE, Metric
from fedgist.core.objectives.target import Target
from fedgist.core.tree import tree
from fedgist.errors import one_of


@tree
class NoPredictions:
    """An empty result per row: no label is predicted."""


@dataclass(frozen=True)
class SimCLR:
    """The objective of SimCLR: embeddings of two views of a row attract, other rows repel."""

    num_classes: int  # of the labels that probes predict
    chosen: tuple[str, ...] = (PROBE.name,)
    smoothing: float = 0.0
    projection: PositiveInt = 128
    """Number of outputs of the projection, which the loss compares."""
    temperature: Temperature = 0.4
    """Temperature of the contrastive loss."""
    negatives: Literal["other_view", "all_views"] = "other_view"
    """Which views are negatives in a batch of B rows.

    ``other_view``: the B - 1 other views of the other rows, as in FLESD. ``all_views``: all
    2 (B - 1) views of the other rows, in both directions, as in SimCLR.
    """
    batch_norm: Literal["together", "each"] = "together"
    """Whether batch norm takes its statistics over both views together, or over each view."""

    name = "simclr"
    target: ClassVar[Target] = "views"
    labels: ClassVar[Target] = "class"  # of probes
    loss_metric: ClassVar[Metric] = LOSS
    views = 2

    def __post_init__(self) -> None:
        check_bounds(self, "objective")
        for name in self.chosen:
            one_of(name, (PROBE.name,), "metric")

    @property
    def outputs(self) -> int:
        """The number of outputs: the width of an embedding."""
        return self.projection

    @property
    def norm_parts(self) -> int:
        """The number of parts for batch norm: 2 if each view has its own statistics."""
        return self.views if self.batch_norm == "each" else 1

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The accuracy of a linear probe."""
        return (PROBE,)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss (eq. 3), (), of embeddings (2 B, m), first views before second."""
        first, second = F.normalize(logits, dim=-1).chunk(2)
        mask = batch.mask[: len(first)]
        across = first @ second.mT / self.temperature  # (B, B): row i's positive is column i
        if self.negatives == "other_view":
            return losses.masked_mean(_surprise(across, mask), mask)
        alike = torch.eye(len(first), dtype=torch.bool, device=logits.device)
        terms = torch.zeros_like(mask, dtype=logits.dtype)
        for same_view, other in ((first, across), (second, across.mT)):
            beside = (same_view @ same_view.mT / self.temperature).masked_fill(alike, -torch.inf)
            both = torch.cat([other, beside], 1)
            terms = terms + _surprise(both, torch.cat([mask, mask])) / 2
        return losses.masked_mean(terms, mask)

    def answers(self, logits: Tensor) -> Tensor:
        """Return the embeddings (batch, m) as they are."""
        return logits

    def predict_rows(self, logits: Tensor, batch: Batch) -> NoPredictions:
        """Return an empty result."""
        del logits, batch
        return NoPredictions()

    def measure(self, predictions: NoPredictions, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return no metrics: probes measure the features."""
        del predictions, y, mask
        return {}

    def confusion(self, predictions: NoPredictions, y: Tensor, mask: Tensor) -> None:
        """Return nothing: no class is predicted."""
        del predictions, y, mask


def _surprise(similarities: Tensor, present: Tensor) -> Tensor:
    """Return ``-log softmax`` of the positives, (B,): column i is row i's, absent columns count 0.

    ``similarities`` are (B, columns) and ``present`` (columns,). An absent row has only its own
    column, so its result is finite.
    """
    rows, columns = similarities.shape
    own_column = torch.eye(rows, columns, dtype=torch.bool, device=similarities.device)
    seen = similarities.masked_fill(~(present | own_column), -torch.inf)
    return torch.logsumexp(seen, 1) - similarities.diagonal()
