"""What a task asks of a model: its loss, and by which metrics it is judged.

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

#: What is kept of each row that was predicted, until metrics are computed from it: a tree whose
#: leaves have a line for each row. Every objective has its own.
Marks: TypeAlias = Tree


@tree
class ClassMarks:
    """What is kept of each row whose class was predicted.

    ``loss`` (rows,) in nats, ``label`` (rows,) the class predicted, ``scores`` (rows, classes) the
    probabilities, or (rows, 0) where no metric needs them. Absent rows hold zeros.
    """

    loss: Tensor
    label: Tensor
    scores: Tensor


class Objective(Protocol):
    """A task's loss and metrics."""

    @property
    def name(self) -> str:
        """The name in recipes."""

    @property
    def text(self) -> bool:
        """Whether rows are texts, with a label at each of their places, and not one for all."""

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for a row, or for each of its places."""

    @property
    def views(self) -> int:
        """How many views of each row are in a batch that is learnt from, one after the other.

        One, where outputs are predictions. Of several, outputs are embeddings, which two layers
        make of the features, and models are judged by probes of the features.
        """

    @property
    def norm_parts(self) -> int:
        """Into how many parts batch norm divides a batch, each with its own statistics."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics beside the loss; the first is the one that reports show first."""

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of a batch over the rows present: a scalar.

        The loss of each row is multiplied by ``batch.weight``, where the batch has weights.
        """

    def mark(self, logits: Tensor, batch: Batch) -> Marks:
        """Return what is kept of each row of one client (under vmap)."""

    def measure(self, marks: Marks, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return each client's metrics, loss included, from marks (clients, rows): (clients,) each.

        They are in double precision, and NaN where a metric is not defined for a client.
        """

    def confusion(self, marks: Marks, y: Tensor, mask: Tensor) -> Tensor | None:
        """Return counts (true class, predicted class), summed over clients, if there are any."""


@dataclass(frozen=True)
class Classes:
    """One class for each example: cross-entropy, and the metrics chosen (by default all).

    ``smoothing`` smooths the labels that models learn from, not those by which they are judged.
    """

    num_classes: int
    chosen: tuple[str, ...] = tuple(CLASS_METRICS)
    smoothing: float = 0.0

    name = "classes"
    text = False
    views = norm_parts = 1

    @property
    def outputs(self) -> int:
        """A logit for each class."""
        return self.num_classes

    def __post_init__(self) -> None:
        for name in self.chosen:
            one_of(name, CLASS_METRICS, "metric")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics chosen."""
        return tuple(CLASS_METRICS[name] for name in self.chosen)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of ``logits`` (batch, classes), rows by their weight."""
        return losses.cross_entropy(
            logits, batch.y, batch.mask, weight=batch.weight, smoothing=self.smoothing
        )

    def mark(self, logits: Tensor, batch: Batch) -> ClassMarks:
        """Return the cross-entropy, the likeliest class and the probabilities of each row."""
        normalizer = torch.logsumexp(logits, -1)
        loss = normalizer - logits.gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        kept = logits if "auroc" in self.chosen else logits[..., :0]
        scores = torch.exp(kept - normalizer.unsqueeze(-1))
        present = batch.mask
        return ClassMarks(
            torch.where(present, loss, 0.0),
            torch.where(present, logits.argmax(-1), 0),
            torch.where(present.unsqueeze(-1), scores, 0.0),
        )

    def measure(self, marks: ClassMarks, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss and the metrics chosen, (clients,) each."""
        table = Predictions(marks, y, mask, self.num_classes)
        values = {name: _MEASURES[name](table) for name in self.chosen}
        losses_seen = torch.where(mask, marks.loss, 0.0).to(torch.float64)
        return values | {LOSS.name: losses_seen.sum(1) / mask.sum(1)}

    def confusion(self, marks: ClassMarks, y: Tensor, mask: Tensor) -> Tensor:
        """Return counts (true class, predicted class), summed over clients."""
        return Predictions(marks, y, mask, self.num_classes).counts().sum(0)


@dataclass(frozen=True, eq=False)
class Predictions:
    """The rows of K clients, predicted: marks, labels ``y`` and ``mask``, each (K, rows)."""

    marks: ClassMarks
    y: Tensor
    mask: Tensor
    num_classes: int

    def counts(self) -> Tensor:
        """Return how often each class was taken for each: (K, true class, predicted class)."""
        clients, classes = len(self.y), self.num_classes
        client = torch.arange(clients, device=self.y.device).unsqueeze(1)
        cell = (client * classes + self.y) * classes + self.marks.label
        counts = torch.bincount(cell[self.mask], minlength=clients * classes * classes)
        return counts.view(clients, classes, classes)


def accuracy(p: Predictions) -> Tensor:
    """Return the share of rows whose class is right."""
    right = (p.marks.label == p.y) & p.mask
    return right.sum(1).to(torch.float64) / p.mask.sum(1)


def balanced_accuracy(p: Predictions) -> Tensor:
    """Return the mean recall over the classes that a client has."""
    counts = p.counts().to(torch.float64)
    of_class = counts.sum(2)
    return (counts.diagonal(dim1=1, dim2=2) / of_class).nanmean(1)


def macro_f1(p: Predictions) -> Tensor:
    """Return the mean F1 over the classes that a client has or that its model predicts."""
    counts = p.counts().to(torch.float64)
    either = counts.sum(1) + counts.sum(2)
    return (2 * counts.diagonal(dim1=1, dim2=2) / either).nanmean(1)


def auroc(p: Predictions) -> Tensor:
    """Return the area under the ROC curve of each class against the rest, mean over classes.

    By ranks (Mann and Whitney): the share of pairs of a row of the class and another row in which
    the former has the higher probability, ties counting half. NaN where a client has one class.
    """
    scores = p.marks.scores.movedim(2, 1)  # (K, classes, rows)
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


_MEASURES: Mapping[str, Callable[[Predictions], Tensor]] = MappingProxyType(
    {
        "accuracy": accuracy,
        "balanced_accuracy": balanced_accuracy,
        "macro_f1": macro_f1,
        "auroc": auroc,
    }
)
