"""Rows of examples, as a method sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Protocol

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.tree import map_leaves, tree

#: The label of a place in a text that is not counted: nothing follows, or what follows is padding.
NO_WORD = -1


@tree
class Labels:
    """All rows of a client without their inputs: labels ``y`` (rows,), ``mask`` (rows,).

    ``annotations`` are numbers of rows by name, as in a batch.
    """

    y: Tensor
    mask: Tensor
    annotations: dict[str, Tensor] = field(default_factory=dict)


@tree
class Batch:
    """Rows of a client: inputs ``x`` ``(batch, *input)``, labels ``y`` (batch,), ``mask`` (batch,).

    Where rows are texts, ``x`` and ``y`` are whole numbers (batch, length): words, and what follows
    each of them, ``NO_WORD`` where that is not counted.

    ``mask`` is true where a row is present. Where it is false, the row only looks like an example:
    whatever is computed from it must have weight 0. ``weight`` (batch,) is what the loss of each
    row is multiplied by, where the recipe weighs classes, else None: the task's loss reads it.
    ``picks`` (batch, choices) is what ``Method.pick`` said of each row, in summaries alone.
    ``annotations`` are further numbers of each training row, (batch,) by name.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    weight: Tensor | None = None
    picks: Tensor | None = None
    annotations: dict[str, Tensor] = field(default_factory=dict)


def repeated(batch: Batch, times: int) -> Batch:
    """Return the rows of a batch so many times, one after the other: its views, not yet drawn."""
    if times == 1:
        return batch
    return map_leaves(lambda leaf: torch.cat([leaf] * times), batch)


class RowSet(Protocol):
    """Examples that can be asked for by row number: for instance a test set of the server."""

    def __len__(self) -> int:
        """Return how many rows there are."""

    def seen(self, rows: Tensor) -> Tensor:
        """Return ``x`` ``(rows, *input)`` of these row numbers (rows,), not augmented.

        It can be stacked: in a loss, rows may be drawn by the client's key.
        """

    def batch(self, rows: Tensor, keys: Tensor | None = None) -> Batch:
        """Return the batches of clients: ``rows`` (clients, batch), -1 where there is none.

        ``keys`` (clients,) draw the augmentation; without them there is none.
        """


def made_up(
    key: Tensor, rows: int, shape: Sequence[int], num_classes: int, *, text: bool
) -> tuple[Tensor, Tensor]:
    """Return inputs and labels that look like examples of a task: of ``shape``, or texts."""
    count = torch.arange(rows, device=key.device) % num_classes
    if not text:
        return random.normal(random.fold(key, "rows"), (rows, *shape)), count
    x = random.integers(random.fold(key, "rows"), (rows, *shape), num_classes)
    return x, x.roll(-1, 1)
