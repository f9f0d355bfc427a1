"""Segmentation: models predict the class of each pixel of an image.

A pixel with the label -1 is ignored in loss and metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedgist.core import losses
from fedgist.core.batch import Batch
from fedgist.core.objectives.metrics import LOSS, PIXEL_METRICS, Metric
from fedgist.core.objectives.target import Target
from fedgist.core.tree import tree
from fedgist.errors import one_of


@tree
class PixelPredictions:
    """Sums over the pixels of each image: ``loss`` in nats, ``pixels`` counted, (rows,) each.

    ``counts`` (rows, classes, classes) are the pixels of each true class that are predicted as each
    class.
    """

    loss: Tensor
    pixels: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Segmentation:
    """The objective of segmentation: cross-entropy per pixel, and the chosen metrics.

    The loss of an image is the mean over its pixels. For evaluation, every pixel of a client has
    the same weight.
    """

    num_classes: int
    chosen: tuple[str, ...] = tuple(PIXEL_METRICS)
    smoothing: float = 0.0
    background: Literal["left_out", "counted"] = "left_out"
    """Whether class 0 counts in the means of Dice and IoU over classes."""

    name = "segmentation"
    target: ClassVar[Target] = "pixels"
    labels: ClassVar[Target] = "pixels"
    loss_metric: ClassVar[Metric] = LOSS
    views = norm_parts = 1

    def __post_init__(self) -> None:
        for name in self.chosen:
            one_of(name, PIXEL_METRICS, "metric")

    @property
    def outputs(self) -> int:
        """The number of outputs: one logit per class, at each pixel."""
        return self.num_classes

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The chosen metrics."""
        return tuple(PIXEL_METRICS[name] for name in self.chosen)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean weighted loss, (), of ``logits`` (batch, height, width, classes)."""
        per_pixel = losses.cross_entropy_of_each(logits, batch.y, self.smoothing)
        of_image = losses.mean_over_places(per_pixel, counted_pixels(batch))
        return losses.weighted_mean(of_image, batch.mask, batch.weight)

    def answers(self, logits: Tensor) -> Tensor:
        """Return the probabilities of each pixel, (batch, height, width, classes)."""
        return torch.softmax(logits, -1)

    def predict_rows(self, logits: Tensor, batch: Batch) -> PixelPredictions:
        """Return the sums of each image, for ``logits`` (batch, height, width, classes)."""
        counted = counted_pixels(batch)
        per_pixel = torch.where(counted, losses.cross_entropy_of_each(logits, batch.y, 0.0), 0.0)
        truth = functional.one_hot(batch.y.clamp(min=0), self.num_classes) * counted.unsqueeze(-1)
        guess = functional.one_hot(logits.argmax(-1), self.num_classes)
        # float32 counts are exact up to 2^24 pixels of an image
        pairs = truth.flatten(1, 2).float().mT @ guess.flatten(1, 2).float()
        return PixelPredictions(
            per_pixel.flatten(1).sum(1), counted.flatten(1).sum(1), pairs.long()
        )

    def measure(self, predictions: PixelPredictions, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the loss and the chosen metrics, (clients,) each, NaN without counted pixels.

        Dice and IoU are means over the classes that a client's pixels have or are predicted to
        have.
        """
        del y  # the predictions hold the counts
        counts = self._counts(predictions, mask)
        right = counts.diagonal(dim1=1, dim2=2)
        true, guessed = counts.sum(2), counts.sum(1)
        first = 0 if self.background == "counted" else 1
        every = {
            "dice": (2 * right / (true + guessed))[:, first:].nanmean(1),
            "iou": (right / (true + guessed - right))[:, first:].nanmean(1),
            "accuracy": right.sum(1) / true.sum(1),
        }
        loss = torch.where(mask, predictions.loss, 0.0).sum(1, dtype=torch.float64)
        values = {name: every[name] for name in self.chosen}
        return values | {LOSS.name: loss / true.sum(1)}

    def confusion(self, predictions: PixelPredictions, y: Tensor, mask: Tensor) -> Tensor:
        """Return counts of pixels (true class, predicted class), summed over clients."""
        del y
        return self._counts(predictions, mask).sum(0).long()

    def _counts(self, predictions: PixelPredictions, mask: Tensor) -> Tensor:
        """Return each client's counts (clients, classes, classes), in double precision."""
        present = mask[:, :, None, None]
        return torch.where(present, predictions.counts, 0).sum(1).to(torch.float64)


def counted_pixels(batch: Batch) -> Tensor:
    """Return a mask of the counted pixels in a batch of images, (batch, height, width)."""
    return (batch.y >= 0) & batch.mask[:, None, None]
