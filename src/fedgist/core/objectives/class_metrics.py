"""The metrics of classification, each for K clients at once.

Every client is scored by its own rows. A metric that is not defined for a client's rows is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from fedgist.core.objectives.rank_metrics import mean_precision, roc_area
from fedgist.core.tree import tree

BINS = 15  # of the confidence, in the calibration error (Guo et al. 2017)
BINARY = 2


@tree
class ClassPredictions:
    """Per-row results of classification, from which metrics are computed.

    ``loss`` (rows,) is in nats, and ``label`` (rows,) is the predicted class. ``logits`` are (rows,
    classes), or (rows, 0) if no metric needs them. Absent rows hold zeros.
    """

    loss: Tensor
    label: Tensor
    logits: Tensor

    @property
    def probability(self) -> Tensor:
        """Probability of each class, (rows, classes)."""
        return torch.exp(self.logits - torch.logsumexp(self.logits, -1, keepdim=True))

    @property
    def log_odds(self) -> Tensor:
        """Log-odds of each class against all others, (rows, classes), or (rows, 0) without logits.

        They tell rows apart whose probability is rounded to 0 or 1. They are computed in float64
        and rounded, so that rows with the same odds are equal.
        """
        if not self.logits.shape[-1]:
            return self.logits
        logits = self.logits.to(torch.float64)
        largest = logits.argmax(-1, keepdim=True)
        others = logits.scatter(-1, largest, -torch.inf).logsumexp(-1, keepdim=True)
        log_p = logits.log_softmax(-1)
        odds = log_p - torch.log1p(-log_p.exp())  # inexact where p is near 1: replaced
        exact = odds.scatter(-1, largest, logits.gather(-1, largest) - others)
        return exact.to(self.logits.dtype)


@dataclass(frozen=True, eq=False)
class LabelledPredictions:
    """Predictions of K clients with their labels ``y`` and ``mask``, each (K, rows).

    ``positive`` is the class that :func:`average_precision` is about, and None for all classes in
    turn.
    """

    predictions: ClassPredictions
    y: Tensor
    mask: Tensor
    num_classes: int
    positive: int | None = None

    def counts(self) -> Tensor:
        """Return the confusion matrices: (K, true class, predicted class)."""
        clients, classes = len(self.y), self.num_classes
        client = torch.arange(clients, device=self.y.device).unsqueeze(1)
        cell = (client * classes + self.y) * classes + self.predictions.label
        counts = torch.bincount(cell[self.mask], minlength=clients * classes * classes)
        return counts.view(clients, classes, classes)

    def positives(self) -> Sequence[int]:
        """Return the classes that are told from the rest: of two classes the second one."""
        if self.positive is not None:
            return [self.positive]
        return [1] if self.num_classes == BINARY else range(self.num_classes)


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

    It is NaN for a client with one class.
    """
    return roc_area(*_each_against_the_rest(p)).nanmean(1)


def average_precision(p: LabelledPredictions) -> Tensor:
    """Return scikit-learn's average precision of the positive class, or its mean: (K,).

    The mean is over the classes of which a client has rows. A client without any is NaN.
    """
    of_class = mean_precision(*_each_against_the_rest(p))
    return of_class[:, list(p.positives())].nanmean(1)


def _each_against_the_rest(p: LabelledPredictions) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-odds, which rows are of the class, and which are present: (K, classes, rows)."""
    scores = p.predictions.log_odds.movedim(2, 1)
    classes = torch.arange(p.num_classes, device=p.y.device).view(1, -1, 1)
    present = p.mask.unsqueeze(1).expand(scores.shape)
    return scores, (p.y.unsqueeze(1) == classes) & present, present


def brier(p: LabelledPredictions) -> Tensor:
    """Return the mean squared error of the probabilities, (K,) (Brier 1950).

    As in scikit-learn, it is summed over classes, from 0 to 2. With two classes it is halved, from
    0 to 1.
    """
    scores = p.predictions.probability.to(torch.float64)
    truth = torch.nn.functional.one_hot(p.y, p.num_classes)
    error = (scores - truth).square().sum(2)
    mean = torch.where(p.mask, error, 0.0).sum(1) / p.mask.sum(1)
    return mean / 2 if p.num_classes == BINARY else mean


def calibration_error(p: LabelledPredictions) -> Tensor:
    """Return the expected calibration error, (K,) (Guo et al. 2017, eq. 5).

    The confidence is the largest probability. Rows are in 15 bins of equal width, open on the left.
    The result is the mean difference of accuracy and confidence in a bin, weighted by its rows.
    """
    confidence, label = p.predictions.probability.max(2)
    inside = (torch.ceil(confidence * BINS) - 1).clamp(0, BINS - 1).long()
    error = (label == p.y).to(torch.float64) - confidence
    of_row = torch.where(p.mask, error, 0.0)
    sums = torch.zeros(len(p.y), BINS, dtype=torch.float64, device=p.y.device)
    return sums.scatter_add(1, inside, of_row).abs().sum(1) / p.mask.sum(1)


#: The functions of the metrics by name. Their names and units are in ``metrics.py``.
MEASURES: Mapping[str, Callable[[LabelledPredictions], Tensor]] = MappingProxyType(
    {
        "accuracy": accuracy,
        "balanced_accuracy": balanced_accuracy,
        "macro_f1": macro_f1,
        "auroc": auroc,
        "average_precision": average_precision,
        "brier": brier,
        "calibration_error": calibration_error,
    }
)
#: Metrics that need the predicted classes only, not their probabilities.
OF_LABELS = frozenset({"accuracy", "balanced_accuracy", "macro_f1"})
