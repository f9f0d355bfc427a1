"""Classification: models predict one class for each row, or for each text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedgist.core import losses
from fedgist.core.batch import Batch
from fedgist.core.bounds import check_bounds
from fedgist.core.objectives.class_metrics import (
    MEASURES,
    OF_LABELS,
    ClassPredictions,
    LabelledPredictions,
)
from fedgist.core.objectives.metrics import CLASS_METRICS, COMMON_METRICS, LOSS, Metric
from fedgist.core.objectives.own_metric import OwnMetric, measured_by, rows_of_each
from fedgist.core.objectives.target import Target
from fedgist.errors import one_of


@dataclass(frozen=True)
class Classes:
    """The objective of classification: cross-entropy, and the chosen metrics.

    ``smoothing`` smooths labels in training, not in evaluation.
    """

    num_classes: int
    chosen: tuple[str | OwnMetric, ...] = tuple(COMMON_METRICS)
    smoothing: float = 0.0
    positive: int | str | None = None
    """The positive class of average precision, and of thresholds and curves for two classes.

    It is stated by its name or number. The default is the second of two classes, and the mean over
    all classes if there are more.
    """
    name: str = "classes"

    target: ClassVar[Target] = "class"
    labels: ClassVar[Target] = "class"
    loss_metric: ClassVar[Metric] = LOSS
    views = norm_parts = 1

    @property
    def outputs(self) -> int:
        """The number of outputs: one logit per class."""
        return self.num_classes

    def __post_init__(self) -> None:
        check_bounds(self, "objective")
        for name in self._built_in:
            one_of(name, CLASS_METRICS, "metric")

    @property
    def _built_in(self) -> list[str]:
        return [name for name in self.chosen if isinstance(name, str)]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The chosen metrics."""
        return tuple(map(self._described, self.chosen))

    def _described(self, chosen: str | OwnMetric) -> Metric:
        if isinstance(chosen, OwnMetric):
            return chosen.describes
        return CLASS_METRICS[chosen]

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean weighted cross-entropy, (), of ``logits`` (batch, classes)."""
        return losses.cross_entropy(
            logits, batch.y, batch.mask, weight=batch.weight, smoothing=self.smoothing
        )

    def answers(self, logits: Tensor) -> Tensor:
        """Return the probabilities (batch, classes)."""
        return torch.softmax(logits, -1)

    def predict_rows(self, logits: Tensor, batch: Batch) -> ClassPredictions:
        """Return the cross-entropy, the most likely class and the logits of each row.

        ``logits`` are (batch, classes).
        """
        normalizer = torch.logsumexp(logits, -1)
        loss = normalizer - logits.gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        kept = logits[..., :0] if OF_LABELS.issuperset(self.chosen) else logits
        present = batch.mask
        return ClassPredictions(
            torch.where(present, loss, 0.0),
            torch.where(present, logits.argmax(-1), 0),
            torch.where(present.unsqueeze(-1), kept, 0.0),
        )

    def measure(self, predictions: ClassPredictions, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss and the chosen metrics, (clients,) each."""
        table = self._labelled(predictions, y, mask)
        values = {name: MEASURES[name](table) for name in self._built_in}
        values |= measured_by(self.chosen, rows_of_each(predictions.probability, y, mask))
        losses_seen = torch.where(mask, predictions.loss, 0.0).to(torch.float64)
        return values | {LOSS.name: losses_seen.sum(1) / mask.sum(1)}

    def confusion(self, predictions: ClassPredictions, y: Tensor, mask: Tensor) -> Tensor:
        """Return counts (true class, predicted class), summed over clients."""
        return self._labelled(predictions, y, mask).counts().sum(0)

    def _labelled(
        self, predictions: ClassPredictions, y: Tensor, mask: Tensor
    ) -> LabelledPredictions:
        positive = self.positive if isinstance(self.positive, int) else None
        return LabelledPredictions(predictions, y, mask, self.num_classes, positive)
