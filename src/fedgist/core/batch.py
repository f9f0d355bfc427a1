"""Batches of examples: inputs, labels and a mask of the rows present."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Protocol

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.objectives.target import Target, places
from fedgist.core.tree import map_leaves, tree

#: The label of a token that is not counted, because padding or nothing follows it.
NO_WORD = -1


@tree
class Labels:
    """All rows of a client without their inputs: labels ``y`` (rows, ...), ``mask`` (rows,).

    ``annotations`` are numbers of rows (rows,) by name, as in a batch. Under privacy of records,
    ``fates`` (rows,) are random whole numbers of the rows: draws among rows depend on them, so that
    one row more moves no other row. They are None otherwise.
    """

    y: Tensor
    mask: Tensor
    annotations: dict[str, Tensor] = field(default_factory=dict)
    fates: Tensor | None = None


@tree
class Batch:
    """Rows of a client: inputs ``x`` ``(batch, *input)``, labels ``y`` (batch,), ``mask`` (batch,).

    Texts ``x`` are integers (batch, length), the number of each token. ``y`` has the form of the
    task's target (:data:`~fedgist.core.objectives.target.Target`): one class per row, (batch,); the
    next token at each place, (batch, length), or the class of each pixel, (batch, height, width),
    and ``NO_WORD`` at places that are not counted; numbers or labels, float32 (batch, outputs), NaN
    for missing ones.

    ``mask`` is true for a present row. An absent row only has the shape of an example: every number
    computed from it must have weight 0. ``weight`` (batch,) multiplies the loss of each row, if the
    recipe weighs classes, else None; the task's loss reads it. ``class_counts`` (classes,) are the
    client's training rows of each class, in losses of methods that count classes. ``picks`` (batch,
    choices) is the result of ``PeerMethod.pick`` for each row, in summaries only. ``annotations``
    are further numbers of each training row, (batch,) by name.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    weight: Tensor | None = None
    picks: Tensor | None = None
    class_counts: Tensor | None = None
    annotations: dict[str, Tensor] = field(default_factory=dict)


def repeated_rows(batch: Batch, times: int) -> Batch:
    """Return the rows of a batch ``times`` times, (times * batch, ...): one copy for each view."""
    if times == 1:
        return batch
    return map_leaves(lambda leaf: torch.cat([leaf] * times), batch)


def dealt(batch: Batch, count: int) -> tuple[Batch, ...]:
    """Return the ``count`` batches in one: the rows are dealt out in turn, (batch / count, ...).

    Present rows come first, so each has as many as the others or one less.
    """

    def part(first: int) -> Batch:
        return map_leaves(lambda leaf: leaf[first::count], batch)

    return tuple(part(first) for first in range(count))


class RowSet(Protocol):
    """Examples by row number, for instance a test set of the server."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def seen(self, rows: Tensor) -> Tensor:
        """Return ``x`` ``(rows, *input)`` of these row numbers (rows,), without augmentation.

        The function can be stacked: in a loss, each client may draw rows by its key.
        """

    def batch(self, rows: Tensor, keys: Tensor | None = None) -> Batch:
        """Return the batches of clients: ``rows`` (clients, batch) are row numbers, -1 for none.

        The leaves of the batch are (clients, batch, ...). ``keys`` (clients,) are for random
        augmentation; without keys there is none.
        """


def fake_rows(
    key: Tensor,
    rows: int,
    shape: Sequence[int],
    num_classes: int,
    *,
    words: int = 0,
    target: Target = "class",
) -> tuple[Tensor, Tensor]:
    """Return random inputs ``(rows, *shape)`` and labels in the form of a task's examples.

    ``words`` is the number of words of texts, and 0 for other inputs. ``target`` is the form of the
    labels; see :class:`Batch`.
    """
    drawn = random.fold(key, "rows")
    if words:
        x = random.integers(drawn, (rows, *shape), words)
    else:
        x = random.normal(drawn, (rows, *shape))
    if target == "words":
        return x, x.roll(-1, 1)
    if target == "numbers":
        return x, random.normal(random.fold(key, "labels"), (rows, num_classes))
    if target == "labels":
        return x, random.integers(random.fold(key, "labels"), (rows, num_classes), 2).float()
    count = (rows, *places(target, shape))
    return x, torch.arange(math.prod(count), device=key.device).view(count) % num_classes
