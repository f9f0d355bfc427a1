"""Several labels per row: models predict for each label whether a row has it.

A label is 1 or 0, or NaN where it is not known. An unknown label is ignored in loss and
metrics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedgist.core import losses
from fedgist.core.batch import Batch
from fedgist.core.bounds import Positive, check_bounds
from fedgist.core.objectives.metrics import LABEL_METRICS, LOSS, Metric
from fedgist.core.objectives.own_metric import OwnMetric, measured_by, rows_of_each
from fedgist.core.objectives.rank_metrics import mean_precision, roc_area
from fedgist.core.objectives.target import Target
from fedgist.core.tree import tree
from fedgist.errors import one_of

LIKELY = 0.5  # the probability above which a row is predicted to have a label
_OF_EACH = ("auroc", "average_precision")  # metrics that are also measured for each label


@tree
class LabelPredictions:
    """Per-row results: the loss (rows,) in nats, and the logit of each label (rows, labels).

    Absent rows hold zeros.
    """

    loss: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Multilabel:
    """The objective of several labels: binary cross-entropy, and the chosen metrics.

    The loss of a row is the mean over its known labels.
    """

    num_labels: int
    chosen: tuple[str | OwnMetric, ...] = tuple(LABEL_METRICS)
    smoothing: float = 0.0
    positive_weights: tuple[Positive, ...] = ()
    """Weights of the positive rows of each label, or one for all. The default is 1.

    Above 1, a rare label is predicted more often.
    """
    per_label: bool = True
    """Whether AUROC and average precision are measured for each label as well, if chosen."""
    names: tuple[str, ...] = ()

    name = "multilabel"
    target: ClassVar[Target] = "labels"
    labels: ClassVar[Target] = "labels"
    loss_metric: ClassVar[Metric] = LOSS
    views = norm_parts = 1

    def __post_init__(self) -> None:
        check_bounds(self, "objective")
        for name in self._built_in:
            one_of(name, LABEL_METRICS, "metric")
        if self.smoothing:
            raise ValueError("train.label_smoothing smooths one class for each row, not labels")
        if len(self.positive_weights) not in {0, 1, self.num_labels}:
            raise ValueError(
                f"objective.positive_weights has {len(self.positive_weights)} numbers; the data "
                f"have {self.num_labels} labels"
            )

    @property
    def _built_in(self) -> list[str]:
        return [name for name in self.chosen if isinstance(name, str)]

    @property
    def outputs(self) -> int:
        """The number of outputs: one logit per label."""
        return self.num_labels

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The chosen metrics, then those of each label."""
        chosen = tuple(LABEL_METRICS[m] if isinstance(m, str) else m.describes for m in self.chosen)
        return (*chosen, *self._of_labels())

    def _of_labels(self) -> tuple[Metric, ...]:
        """Return the metrics of each label: by metric, in the order of the labels."""
        if not self.per_label:
            return ()
        of_each = [LABEL_METRICS[name] for name in _OF_EACH if name in self.chosen]
        titles = self.names or tuple(str(number) for number in range(self.num_labels))
        columns = _columns(titles)
        return tuple(
            replace(m, name=f"{m.name}_{column}", title=f"{m.title} of {title}")
            for m in of_each
            for column, title in zip(columns, titles, strict=True)
        )

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean weighted binary cross-entropy, (), of ``logits`` (batch, labels)."""
        of_row = self._loss_of_rows(logits, batch.y)
        return losses.weighted_mean(of_row, batch.mask, batch.weight)

    def answers(self, logits: Tensor) -> Tensor:
        """Return the probability of each label, (batch, labels)."""
        return torch.sigmoid(logits)

    def predict_rows(self, logits: Tensor, batch: Batch) -> LabelPredictions:
        """Return the loss and the logits of each row."""
        loss = torch.where(batch.mask, self._loss_of_rows(logits, batch.y), 0.0)
        return LabelPredictions(loss, torch.where(batch.mask.unsqueeze(-1), logits, 0.0))

    def measure(self, predictions: LabelPredictions, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss and the chosen metrics, (clients,) each: means over labels.

        A label that is not defined for a client, such as the AUROC of a label that all its rows
        have, is left out of the mean.
        """
        logits = predictions.logits
        present = mask.unsqueeze(-1) & ~y.isnan()
        truth, values = (y > 0) & present, {}
        for name in self._built_in:
            of_label = MEASURES[name](logits.mT, truth.mT, present.mT)
            values[name] = of_label.nanmean(1) if of_label.dim() > 1 else of_label
            if name in _OF_EACH:
                columns = [m.name for m in self._of_labels() if m.name.startswith(f"{name}_")]
                values |= dict(zip(columns, of_label.unbind(1), strict=False))
        values |= measured_by(self.chosen, rows_of_each(self.answers(logits), y, mask))
        loss = torch.where(mask, predictions.loss, 0.0).sum(1, dtype=torch.float64)
        return values | {LOSS.name: loss / mask.sum(1)}

    def confusion(self, predictions: LabelPredictions, y: Tensor, mask: Tensor) -> None:
        """Return nothing: a row may have several labels."""
        del predictions, y, mask

    def _loss_of_rows(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean binary cross-entropy over the known labels of each row, (batch,)."""
        present = ~y.isnan()
        truth = torch.where(present, y, 0.0)
        weight = torch.tensor(self.positive_weights or (1.0,), device=logits.device)
        of_label = functional.binary_cross_entropy_with_logits(
            logits, truth, pos_weight=weight, reduction="none"
        )
        return torch.where(present, of_label, 0.0).sum(-1) / present.sum(-1).clamp(min=1)


def _columns(names: tuple[str, ...]) -> list[str]:
    """Return a name in columns for each label: small letters, digits and _.

    >>> _columns(("Heart failure", "ABS-1"))
    ['heart_failure', 'abs_1']
    >>> _columns(("a-b", "a b", "mean"))  # two would be called alike: numbers
    ['label_0', 'label_1', 'label_2']
    """
    plain = [re.sub(r"[^a-z0-9]+", "_", name.lower(), flags=re.ASCII).strip("_") for name in names]
    ends = ("mean", "std", "min")  # statistics over clients end so
    if len(set(plain)) < len(plain) or any(not n or n.split("_")[-1] in ends for n in plain):
        return [f"label_{number}" for number in range(len(names))]
    return plain


def _macro_f1(logits: Tensor, truth: Tensor, present: Tensor) -> Tensor:
    right, either = _counts(logits, truth, present)
    return 2 * right / either


def _micro_f1(logits: Tensor, truth: Tensor, present: Tensor) -> Tensor:
    right, either = _counts(logits, truth, present)
    return 2 * right.sum(1) / either.sum(1)


def _counts(logits: Tensor, truth: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return true positives, and positives plus predicted positives: (clients, labels) each."""
    guess = (torch.sigmoid(logits) > LIKELY) & present
    right = (guess & truth).sum(-1).to(torch.float64)
    return right, (guess.sum(-1) + truth.sum(-1)).to(torch.float64)


#: The functions of the metrics, of logits, truth and presence (clients, labels, rows).
MEASURES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "auroc": roc_area,
        "average_precision": mean_precision,
        "macro_f1": _macro_f1,
        "micro_f1": _micro_f1,
    }
)
