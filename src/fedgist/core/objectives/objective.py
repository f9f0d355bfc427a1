"""The objective of a task: its loss, and the metrics of evaluation.

An objective belongs to the task, not to the method: FedAvg and FedProx train classifiers
(``classes.py``), models of numbers, labels, pixels and texts, and encoders (``simclr.py``) without
new files.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor

from fedgist.core.batch import Batch
from fedgist.core.objectives.metrics import Metric
from fedgist.core.objectives.target import Target
from fedgist.core.tree import Tree

#: Per-row results of prediction from which metrics are computed: a tree of (rows, ...) leaves.
#: Every objective has its own type.
RowPredictions: TypeAlias = Tree


class Objective(Protocol):
    """The interface of a task's loss and metrics."""

    @property
    def name(self) -> str:
        """The name in recipes."""

    @property
    def target(self) -> Target:
        """What models predict; a method lists the targets that it is defined for."""

    @property
    def labels(self) -> Target:
        """The form of the labels that the objective reads; mostly equal to ``target``."""

    @property
    def outputs(self) -> int:
        """The number of outputs of a model per row, or per place of a row."""

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

    @property
    def loss_metric(self) -> Metric:
        """The loss as a metric: its name is ``loss``."""

    def answers(self, logits: Tensor) -> Tensor:
        """Return the predictions that users see, (batch, ...), of a model's outputs.

        They are probabilities if classes or labels are predicted, else numbers.
        """

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
