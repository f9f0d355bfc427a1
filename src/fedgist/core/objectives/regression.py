"""Regression: models predict numbers for each row.

The loss is taken of standardized numbers, ``(y - mean) / std``, so that a learning rate does not
depend on their unit. Predictions and metrics are in the numbers' own unit. A missing number (NaN)
is ignored in loss and metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedgist.core import losses
from fedgist.core.batch import Batch
from fedgist.core.bounds import Positive, check_bounds
from fedgist.core.far_numbers import far_moments
from fedgist.core.objectives.metrics import NUMBER_LOSS, NUMBER_METRICS, Metric
from fedgist.core.objectives.own_metric import OwnMetric, measured_by, rows_of_each
from fedgist.core.objectives.target import Target
from fedgist.core.tree import tree
from fedgist.errors import one_of

Moments = tuple[tuple[float, ...], tuple[float, ...]]  # means, and standard deviations
NO_MOMENTS: Moments = ((), ())


@tree
class NumberPredictions:
    """Per-row results of regression: the loss (rows,), and the predicted numbers (rows, numbers).

    Absent rows hold zeros. Numbers are in their own unit.
    """

    loss: Tensor
    value: Tensor


@dataclass(frozen=True)
class Regression:
    """The objective of regression: a loss of standardized numbers, and the chosen metrics."""

    num_numbers: int
    chosen: tuple[str | OwnMetric, ...] = tuple(NUMBER_METRICS)
    smoothing: float = 0.0
    error: Literal["squared", "absolute", "huber"] = "squared"
    """The loss of a standardized residual: its square, its absolute value, or Huber's."""
    delta: Positive = 1.0
    """The absolute residual up to which Huber's loss is half the square; beyond it is linear."""
    mean: tuple[float, ...] = ()
    """Means that standardize the numbers, one for each or one for all.

    The default are those of all training rows. State them in a real federation, where the rows are
    never together.
    """
    std: tuple[Positive, ...] = ()
    """Standard deviations that standardize the numbers, in the same form as ``mean``."""
    label_moments: Moments = NO_MOMENTS

    name = "regression"
    target: ClassVar[Target] = "numbers"
    labels: ClassVar[Target] = "numbers"
    loss_metric: ClassVar[Metric] = NUMBER_LOSS
    views = norm_parts = 1

    def __post_init__(self) -> None:
        check_bounds(self, "objective")
        for name in self.chosen:
            if isinstance(name, str):
                one_of(name, NUMBER_METRICS, "metric")
        if self.smoothing:
            raise ValueError("train.label_smoothing smooths classes; numbers have none")
        for key in ("mean", "std"):
            if len(getattr(self, key)) not in {0, 1, self.num_numbers}:
                raise ValueError(
                    f"objective.{key} has {len(getattr(self, key))} numbers; the data have "
                    f"{self.num_numbers} for each row"
                )

    @property
    def outputs(self) -> int:
        """The number of outputs: one per number."""
        return self.num_numbers

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The chosen metrics."""
        return tuple(NUMBER_METRICS[m] if isinstance(m, str) else m.describes for m in self.chosen)

    def standardized(self, y: Tensor) -> Tensor:
        """Return ``y`` (..., numbers) without unit: ``(y - mean) / std``."""
        mean, std = self._moments(y)
        return (y - mean) / std

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean weighted loss, (), of ``logits`` (batch, numbers)."""
        of_row = self._loss_of_rows(logits, batch.y)
        return losses.weighted_mean(of_row, batch.mask, batch.weight)

    def answers(self, logits: Tensor) -> Tensor:
        """Return the predicted numbers (batch, numbers) in their own unit.

        They are float64 if float32 does not hold their spread.
        """
        far = far_moments(*self._stated_or_measured)
        exact = logits.double() if far else logits
        mean, std = self._moments(exact)
        return exact * std + mean

    def predict_rows(self, logits: Tensor, batch: Batch) -> NumberPredictions:
        """Return the loss and the predicted numbers of each row."""
        loss = torch.where(batch.mask, self._loss_of_rows(logits, batch.y), 0.0)
        value = torch.where(batch.mask.unsqueeze(-1), self.answers(logits), 0.0)
        return NumberPredictions(loss, value)

    def measure(self, predictions: NumberPredictions, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss and the chosen metrics, (clients,) each: means over the numbers of a row.

        R2 is 1 minus the squared error over that of the client's own mean. It is NaN for numbers
        that do not vary.
        """
        present = mask.unsqueeze(-1) & ~y.isnan()
        truth = torch.where(present, y, 0.0).to(torch.float64)
        error = torch.where(present, predictions.value.to(torch.float64) - truth, 0.0)
        count = present.sum(1)
        square = error.square().sum(1)
        mean = truth.sum(1) / count
        spread = torch.where(present, truth - mean.unsqueeze(1), 0.0).square().sum(1)
        # not by the spread: the mean of equal numbers may be rounded to another number
        highest = torch.where(present, truth, -torch.inf).amax(1)
        varies = highest > torch.where(present, truth, torch.inf).amin(1)
        every = {
            "r2": torch.where(varies, 1.0 - square / spread, torch.nan).nanmean(1),
            "mae": (error.abs().sum(1) / count).nanmean(1),
            "rmse": (square / count).sqrt().nanmean(1),
        }
        values = {name: every[name] for name in self.chosen if isinstance(name, str)}
        values |= measured_by(self.chosen, rows_of_each(predictions.value, y, mask))
        loss = torch.where(mask, predictions.loss, 0.0).sum(1, dtype=torch.float64)
        return values | {NUMBER_LOSS.name: loss / mask.sum(1)}

    def confusion(self, predictions: NumberPredictions, y: Tensor, mask: Tensor) -> None:
        """Return nothing: there are no classes."""
        del predictions, y, mask

    def _loss_of_rows(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss over the numbers that each row has, (batch,)."""
        present = ~y.isnan()
        # without NaN: its gradient would be NaN under a mask, too
        residual = logits - self.standardized(torch.where(present, y, 0.0)).to(logits.dtype)
        size = residual.abs()
        if self.error == "squared":
            loss = residual.square()
        elif self.error == "absolute":
            loss = size
        else:
            linear = self.delta * (size - self.delta / 2)
            loss = torch.where(size <= self.delta, residual.square() / 2, linear)
        return torch.where(present, loss, 0.0).sum(-1) / present.sum(-1).clamp(min=1)

    @property
    def _stated_or_measured(self) -> Moments:
        return self.mean or self.label_moments[0] or (0.0,), self.std or self.label_moments[1] or (
            1.0,
        )

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and std of the numbers, (numbers,) or (1,) each."""
        mean, std = self._stated_or_measured
        kind, device = like.dtype, like.device
        return (
            torch.tensor(mean, dtype=kind, device=device),
            torch.tensor(std, dtype=kind, device=device),
        )
