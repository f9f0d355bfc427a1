"""The objective of a task: its loss, and the metrics of evaluation.

An objective belongs to the task, not to the method: FedAvg and FedProx train classifiers, models of
text (``next_word.py``) and encoders (``simclr.py``) without new files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from fedgist.core import losses
from fedgist.core.batch import Batch
from fedgist.core.metrics import CLASS_METRICS, LOSS, Metric
from fedgist.core.tree import Tree, tree
from fedgist.errors import one_of

#: Per-row results of prediction from which metrics are computed: a tree of (rows, ...) leaves.
#: Every objective has its own type.
RowPredictions: TypeAlias = Tree


@tree
class ClassPredictions:
    """Per-row results of classification, from which metrics are computed.

    ``loss`` (rows,) is in nats, and ``label`` (rows,) is the predicted class. ``scores`` (rows,
    classes) are the probabilities, or (rows, 0) if no metric needs them. Absent rows hold zeros.
    """

    loss: Tensor
    label: Tensor
    scores: Tensor


class Objective(Protocol):
    """The interface of a task's loss and metrics."""

    @property
    def name(self) -> str:
        """The name in recipes."""

    @property
    def text(self) -> bool:
        """Whether rows are texts, with a label for each token instead of one per row."""

    @property
    def outputs(self) -> int:
        """The number of outputs of a model per row, or per token."""

    @property
    def views(self) -> int:
        """The number of views of each row in a training batch, one after the other.

        With one view, outputs are predictions. With several, outputs are embeddings, made of the
        features by two layers, and models are evaluated by probes of the features.
        """

    @property
    def norm_parts(self) -> int:
        """The number of parts of a batch that batch norm normalizes separately."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics in addition to the loss; reports show the first one first."""

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of a batch over the rows present: a scalar, ().

        ``batch.weight`` multiplies the loss of each row, if the batch has weights.
        """

    def predict_rows(self, logits: Tensor, batch: Batch) -> RowPredictions:
        """Return the per-row results of one client, (batch, ...) each (under vmap)."""

    def measure(self, predictions: RowPredictions, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return each client's metrics, including the loss: (clients,) each.

        The predictions, ``y`` and ``mask`` are (clients, rows, ...). Metrics are in double
        precision, and NaN if undefined for a client.
        """

    def confusion(self, predictions: RowPredictions, y: Tensor, mask: Tensor) -> Tensor | None:
        """Return counts (true class, predicted class), summed over clients, or None."""


@dataclass(frozen=True)
class Classes:
    """The objective of classification: cross-entropy, and the chosen metrics (by default all).

    ``smoothing`` smooths labels in training, not in evaluation.
    """

    num_classes: int
    chosen: tuple[str, ...] = tuple(CLASS_METRICS)
    smoothing: float = 0.0

    name = "classes"
    text = False
    views = norm_parts = 1

    @property
    def outputs(self) -> int:
        """The number of outputs: one logit per class."""
        return self.num_classes

    def __post_init__(self) -> None:
        for name in self.chosen:
            one_of(name, CLASS_METRICS, "metric")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The chosen metrics."""
        return tuple(CLASS_METRICS[name] for name in self.chosen)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean weighted cross-entropy, (), of ``logits`` (batch, classes)."""
        return losses.cross_entropy(
            logits, batch.y, batch.mask, weight=batch.weight, smoothing=self.smoothing
        )

    def predict_rows(self, logits: Tensor, batch: Batch) -> ClassPredictions:
        """Return the cross-entropy, the most likely class and the probabilities of each row.

        ``logits`` are (batch, classes).
        """
        normalizer = torch.logsumexp(logits, -1)
        loss = normalizer - logits.gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        kept = logits if "auroc" in self.chosen else logits[..., :0]
        scores = torch.exp(kept - normalizer.unsqueeze(-1))
        present = batch.mask
        return ClassPredictions(
            torch.where(present, loss, 0.0),
            torch.where(present, logits.argmax(-1), 0),
            torch.where(present.unsqueeze(-1), scores, 0.0),
        )

    def measure(self, predictions: ClassPredictions, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss and the chosen metrics, (clients,) each."""
        table = LabelledPredictions(predictions, y, mask, self.num_classes)
        values = {name: _MEASURES[name](table) for name in self.chosen}
        losses_seen = torch.where(mask, predictions.loss, 0.0).to(torch.float64)
        return values | {LOSS.name: losses_seen.sum(1) / mask.sum(1)}

    def confusion(self, predictions: ClassPredictions, y: Tensor, mask: Tensor) -> Tensor:
        """Return counts (true class, predicted class), summed over clients."""
        return LabelledPredictions(predictions, y, mask, self.num_classes).counts().sum(0)


@dataclass(frozen=True, eq=False)
class LabelledPredictions:
    """Predictions of K clients with their labels ``y`` and ``mask``, each (K, rows)."""

    predictions: ClassPredictions
    y: Tensor
    mask: Tensor
    num_classes: int

    def counts(self) -> Tensor:
        """Return the confusion matrices: (K, true class, predicted class)."""
        clients, classes = len(self.y), self.num_classes
        client = torch.arange(clients, device=self.y.device).unsqueeze(1)
        cell = (client * classes + self.y) * classes + self.predictions.label
        counts = torch.bincount(cell[self.mask], minlength=clients * classes * classes)
        return counts.view(clients, classes, classes)


def accuracy(p: LabelledPredictions) -> Tensor:
    """Return the fraction of correctly classified rows, (K,)."""
    right = (p.predictions.label == p.y) & p.mask
    return right.sum(1).to(torch.float64) / p.mask.sum(1)


def balanced_accuracy(p: LabelledPredictions) -> Tensor:
    """Return the mean recall over the classes of each client, (K,)."""
    counts = p.counts().to(torch.float64)
    of_class = counts.sum(2)
    return (counts.diagonal(dim1=1, dim2=2) / of_class).nanmean(1)


def macro_f1(p: LabelledPredictions) -> Tensor:
    """Return the mean F1 over the classes that a client has or its model predicts, (K,)."""
    counts = p.counts().to(torch.float64)
    either = counts.sum(1) + counts.sum(2)
    return (2 * counts.diagonal(dim1=1, dim2=2) / either).nanmean(1)


def auroc(p: LabelledPredictions) -> Tensor:
    """Return the area under the ROC curve of each class against the rest, mean over classes: (K,).

    It is computed from ranks (Mann and Whitney): the fraction of pairs of a row of the class and
    another row in which the former has the higher probability; ties count one half. It is NaN for a
    client with one class.
    """
    scores = p.predictions.scores.movedim(2, 1)  # (K, classes, rows)
    scores = scores.masked_fill(~p.mask.unsqueeze(1), torch.inf)  # absent rows rank above all
    ordered = scores.contiguous().sort(2).values
    below = torch.searchsorted(ordered, scores.contiguous())
    up_to = torch.searchsorted(ordered, scores.contiguous(), right=True)
    ranks = (below + up_to + 1).to(torch.float64) / 2
    classes = torch.arange(p.num_classes, device=p.y.device).view(1, -1, 1)
    of_class = (p.y.unsqueeze(1) == classes) & p.mask.unsqueeze(1)
    positive = of_class.sum(2).to(torch.float64)
    negative = p.mask.sum(1, keepdim=True) - positive
    wins = (ranks * of_class).sum(2) - positive * (positive + 1) / 2
    return (wins / (positive * negative)).nanmean(1)


_MEASURES: Mapping[str, Callable[[LabelledPredictions], Tensor]] = MappingProxyType(
    {
        "accuracy": accuracy,
        "balanced_accuracy": balanced_accuracy,
        "macro_f1": macro_f1,
        "auroc": auroc,
    }
)
