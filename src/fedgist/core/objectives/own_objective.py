"""An objective of a user's own: a loss, metrics, and a number of outputs.

A user writes a class with four parts; :class:`OwnObjective` makes a task's objective of it::

    class Poisson:
        labels = "numbers"  # the form of the labels: see fedgist.core.objectives.target
        outputs = 1  # numbers that a model gives for each row

        def loss(self, outputs, batch):  # the mean over the rows of batch.mask, a scalar
            of_row = outputs.exp() - batch.y * outputs
            return fedgist.core.losses.masked_mean(of_row.sum(1), batch.mask)

        metrics = (mean_deviance,)  # functions of one client's outputs and labels

A class may also have ``answers(outputs)``, the predictions that users and metrics see, and
``target``, if its outputs are logits of classes and methods may treat them so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgist.core.batch import Batch
from fedgist.core.objectives.metrics import OTHER_LOSS, Metric
from fedgist.core.objectives.own_metric import OwnMetric, measured_by, own_metric, rows_of_each
from fedgist.core.objectives.target import Target
from fedgist.core.tree import tree
from fedgist.errors import RecipeError

READABLE = ("class", "numbers", "labels")  # forms of labels, one or several numbers for each row


@runtime_checkable
class TaskLoss(Protocol):
    """The parts of a user's own objective."""

    labels: Target
    outputs: int
    metrics: Iterable[object]

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss, (), over the present rows, of ``outputs`` (batch, outputs).

        It reads ``batch.y``, ``batch.mask`` and ``batch.weight``, never ``batch.x``. It must work
        under ``torch.func.vmap``: use masks, not Boolean indices.
        """


@tree
class OwnPredictions:
    """Per-row results: the outputs (rows, outputs) and the answers (rows, ...)."""

    outputs: Tensor
    answers: Tensor


@dataclass(frozen=True)
class OwnObjective:
    """A task's objective that is a user's own."""

    name: str
    thing: TaskLoss = field(repr=False)
    chosen: tuple[OwnMetric, ...] = ()

    loss_metric: ClassVar[Metric] = OTHER_LOSS
    views = norm_parts = 1

    @property
    def target(self) -> Target:
        """The target of methods: ``own`` unless the user's class says another."""
        target: Target = getattr(self.thing, "target", "own")
        return target

    @property
    def labels(self) -> Target:
        """The form of the labels."""
        return self.thing.labels

    @property
    def outputs(self) -> int:
        """The number of outputs per row."""
        return self.thing.outputs

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The chosen metrics."""
        return tuple(metric.describes for metric in self.chosen)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the user's loss, ()."""
        return self.thing.loss(logits, batch)

    def answers(self, logits: Tensor) -> Tensor:
        """Return the user's answers, or the outputs (batch, outputs) as they are."""
        answers = getattr(self.thing, "answers", None)
        result: Tensor = logits if answers is None else answers(logits)
        return result

    def predict_rows(self, logits: Tensor, batch: Batch) -> OwnPredictions:
        """Return the outputs and the answers of each row."""
        present = batch.mask.unsqueeze(-1)
        outputs = torch.where(present, logits, 0.0)
        return OwnPredictions(outputs, self.answers(outputs))

    def measure(self, predictions: OwnPredictions, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss of all rows of a client together, and the metrics, (clients,) each."""
        losses = [
            self._loss_of_all(outputs, labels)
            for outputs, labels in rows_of_each(predictions.outputs, y, mask)
        ]
        values = measured_by(self.chosen, rows_of_each(predictions.answers, y, mask))
        return values | {OTHER_LOSS.name: torch.tensor(losses, dtype=torch.float64)}

    def _loss_of_all(self, outputs: Tensor, y: Tensor) -> float:
        if not len(y):
            return float("nan")
        mask = torch.ones(len(y), dtype=torch.bool)
        return float(self.thing.loss(outputs, Batch(outputs[:, :0], y, mask)))

    def confusion(self, predictions: OwnPredictions, y: Tensor, mask: Tensor) -> None:
        """Return nothing."""
        del predictions, y, mask


def metrics_of(thing: TaskLoss) -> tuple[OwnMetric, ...]:
    """Return the metrics of a user's objective."""
    return tuple(own_metric(metric) for metric in thing.metrics)


def checked_objective(thing: object) -> TaskLoss:
    """Return a user's objective if it has all parts.

    Raises
    ------
    RecipeError
        One line that names the part.
    """
    name = f"objective {type(thing).__name__}"
    if isinstance(thing, type):
        raise RecipeError(f"objective is the class {thing.__name__}: give an object of it")
    if not isinstance(thing, TaskLoss):
        parts = ("labels", "outputs", "metrics", "loss")
        lacking = next(part for part in parts if not hasattr(thing, part))
        raise RecipeError(f"{name} has no {lacking}: it needs {', '.join(parts)}")
    labels, outputs = thing.labels, thing.outputs
    if labels not in READABLE:
        raise RecipeError(f"{name}: labels must be {' or '.join(map(repr, READABLE))}")
    if isinstance(outputs, bool) or not isinstance(outputs, int) or outputs < 1:
        raise RecipeError(f"{name}: outputs must be a whole number of at least 1, not {outputs!r}")
    target = getattr(thing, "target", "own")
    if target not in {"own", "class"} or (target == "class" and labels != "class"):
        raise RecipeError(f"{name}: target must be 'own', or 'class' if the labels are classes")
    if not isinstance(thing.metrics, list | tuple):
        raise RecipeError(f"{name}: metrics must be a list or tuple of functions")
    names = [metric.describes.name for metric in metrics_of(thing)]
    if not names:
        raise RecipeError(f"{name}: metrics is empty; the first one selects the best round")
    if twice := [n for n in names if names.count(n) > 1]:
        raise RecipeError(f"{name}: two metrics are called {twice[0]!r}")
    return thing
