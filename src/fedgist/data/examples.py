"""Rows into batches.

The one copy of the examples, from which every client's batches are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedgist.core.method import Batch
from fedgist.data.augment import Augmentation, crop_and_flip
from fedgist.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class Examples:
    """One split of a data set, in its original type; batches are normalized as they are made."""

    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    factor: Tensor
    offset: Tensor
    augment: tuple[Augmentation, ...] = ()

    def batch(self, rows: Tensor, keys: Tensor | None = None) -> Batch:
        """Gather ``rows`` (clients, batch), -1 where none; augmented by ``keys`` (clients,).

        In the place of an absent row stands the client's first one, and zeros where a client has
        none: what is masked is an example like others (a model may divide by a length), and never
        another client's.
        """
        mask = rows >= 0
        places = torch.where(mask, rows, rows[:, :1].clamp(min=0))
        x = self.x[places]
        if keys is not None and self.augment:
            x = crop_and_flip(x, keys, self.augment)
        x = x.to(torch.float32).mul_(self.factor).add_(self.offset)
        if not bool(mask[:, 0].all()):
            x[~mask[:, 0]] = 0.0
        return Batch(x, self.y[places].masked_fill_(~mask, 0), mask)


def examples(
    data: Dataset, augment: tuple[Augmentation, ...] = (), device: str = "cpu"
) -> tuple[Examples, Examples]:
    """Return the training and the test examples of ``data``, on a device."""
    shape = (-1, *(1 for _ in data.input_shape[1:]))
    mean, std = (torch.tensor(v, dtype=torch.float64).view(shape) for v in (data.mean, data.std))
    factor = (1.0 / (data.scale * std)).to(device, torch.float32)
    offset = (-mean / std).to(device, torch.float32)
    return (
        Examples(data.x.to(device), data.y.to(device), factor, offset, augment),
        Examples(data.x_test.to(device), data.y_test.to(device), factor, offset),
    )
