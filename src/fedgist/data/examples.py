"""All examples of a data set on one device, and the batches taken from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedgist.core.method import Batch
from fedgist.data import Augmentation
from fedgist.data.augment import crop_and_flip
from fedgist.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class Examples:
    """The training rows or the test rows of a data set, in their original type.

    A batch is normalized as it is made: ``x * factor + offset``.
    """

    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    factor: Tensor
    offset: Tensor
    augment: tuple[Augmentation, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def only(self, rows: Tensor) -> Examples:
        """Return the examples of these row numbers alone, numbered from 0."""
        return replace(self, x=self.x[rows], y=self.y[rows])

    def batch(self, rows: Tensor, keys: Tensor | None = None) -> Batch:
        """Return a batch for each of several clients, stacked.

        ``rows`` (clients, batch) are row numbers, or -1 for an absent row, which must come after
        those that are present. ``keys`` (clients,) draw the augmentation; without them there is
        none. The batch holds ``x`` ``(clients, batch, *input)`` in float32, ``y`` (clients, batch)
        and ``mask`` (clients, batch), which is false for absent rows.

        For an absent row, ``x`` is made from the client's first row and ``y`` is 0; if all
        rows of a client are absent, its ``x`` is 0. So the inputs under a false mask are like the
        others wherever possible (a model may divide by their length), and never another client's.
        """
        mask = rows >= 0
        shown = torch.where(mask, rows, rows[:, :1].clamp(min=0))
        x = self.x[shown]
        if keys is not None and self.augment:
            x = crop_and_flip(x, keys, self.augment)
        x = x.to(torch.float32).mul_(self.factor).add_(self.offset)
        if not bool(mask[:, 0].all()):
            x[~mask[:, 0]] = 0.0
        return Batch(x, self.y[shown].masked_fill_(~mask, 0), mask)


def examples(
    data: Dataset, augment: tuple[Augmentation, ...] = (), device: str = "cpu"
) -> tuple[Examples, Examples]:
    """Return the training and the test examples of ``data``, on ``device``.

    Only the training examples are augmented.
    """
    shape = (-1, *(1 for _ in data.input_shape[1:]))
    mean, std = (torch.tensor(v, dtype=torch.float64).view(shape) for v in (data.mean, data.std))
    factor = (1.0 / (data.scale * std)).to(device, torch.float32)
    offset = (-mean / std).to(device, torch.float32)
    return (
        Examples(data.x.to(device), data.y.to(device), factor, offset, augment),
        Examples(data.x_test.to(device), data.y_test.to(device), factor, offset),
    )
