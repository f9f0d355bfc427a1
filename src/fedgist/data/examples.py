"""Examples of a data set on one device, and the batches taken from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.method import Batch
from fedgist.core.tree import map_leaves
from fedgist.data import Augmentation
from fedgist.data.augment import augmented
from fedgist.data.client_rows import ABSENT, Rows
from fedgist.data.dataset import Dataset
from fedgist.data.facts import PRECISE, DataFacts
from fedgist.data.lazy_rows import Inputs
from fedgist.data.normalization import client_moments
from fedgist.data.partition import Partition
from fedgist.errors import DataError

K = TypeVar("K", Tensor, None)  # keys of a batch's clients


@dataclass(frozen=True, eq=False)
class Examples:
    """The training rows or the test rows of a data set, in their original type.

    A batch is normalized when it is made: ``x * factor + offset``. With ``owner`` (rows,), row i
    uses ``factor[owner[i]]`` and ``offset[owner[i]]``, those of its client; -1 marks a row without
    a client, which is in no batch. ``annotations`` are additional numbers of each row, (rows,) by
    name. ``scale`` is the largest raw number of an image. ``views`` is the number of augmented
    views per row. ``fates`` (rows,) are those of :class:`~fedgist.core.batch.Labels`.
    """

    x: Inputs = field(repr=False)
    y: Tensor = field(repr=False)
    factor: Tensor
    offset: Tensor
    augment: tuple[Augmentation, ...] = ()
    scale: float = 1.0
    views: int = 1
    owner: Tensor | None = field(default=None, repr=False)
    annotations: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    fates: Tensor | None = field(default=None, repr=False)

    @property
    def complete(self) -> bool:
        """Whether every row can be in a batch."""
        return self.owner is None or bool((self.owner >= 0).all())

    def __len__(self) -> int:
        return len(self.y)

    def only(self, rows: Tensor) -> Examples:
        """Return only the examples of these row numbers (rows,), renumbered from 0.

        The moments of clients without such a row are dropped.
        """
        beside = {name: values[rows] for name, values in self.annotations.items()}
        fates = None if self.fates is None else self.fates[rows]
        some = replace(self, x=self.x[rows], y=self.y[rows], annotations=beside, fates=fates)
        if self.owner is None:
            return some
        kept = torch.unique(self.owner[rows])
        owner = torch.searchsorted(kept, self.owner[rows])
        return replace(some, factor=self.factor[kept], offset=self.offset[kept], owner=owner)

    def others(self, x: Inputs, y: Tensor, augment: tuple[Augmentation, ...] = ()) -> Examples:
        """Return other rows ``(rows, *input)`` without clients, normalized in the same way."""
        device = self.x.device
        seen = self.factor, self.offset, augment, self.scale
        return Examples(x.to(device), y.to(device), *seen)

    def batch(self, rows: Tensor, keys: Tensor | None = None) -> Batch:
        """Return one batch per client, stacked.

        ``rows`` (clients, batch) are row numbers, or -1 for absent rows, which must come last.
        ``keys`` (clients,) draw the augmentation; without keys there is one view without
        augmentation. The batch holds ``x`` ``(clients, batch, *input)`` in float32, ``y`` (clients,
        batch, ...) and ``mask`` (clients, batch), which is false for absent rows. Texts ``x`` are
        int64 (clients, batch, length). With several views, all rows of one view come
        before those of the next, and ``batch`` is multiplied by the number of views.

        For an absent row, ``x`` is the client's first row and ``y`` is 0. If all rows of a client
        are absent, its ``x`` is 0. So inputs under a false mask are ordinary examples whenever
        possible (a model may divide by their norm), and never another client's.
        """
        return self.ask(rows, keys)()

    def ask(self, rows: Tensor, keys: Tensor | None = None) -> Callable[[], Batch]:
        """Begin to read a batch, if rows are read lazily; return a function that returns it.

        ``rows`` (clients, batch) and ``keys`` (clients,) are those of :meth:`batch`.
        """
        if keys is not None and self.views > 1:
            single_view = replace(self, views=1)
            drawn = [single_view.ask(rows, random.fold(keys, "view", v)) for v in range(self.views)]
            return lambda: map_leaves(
                lambda *leaf: torch.cat(leaf, 1), *(single_batch() for single_batch in drawn)
            )
        mask = rows >= 0
        shown = torch.where(mask, rows, rows[:, :1].clamp(min=0))
        x = self.x
        if isinstance(x, Tensor):
            return lambda: self._made(_rows_of(x, shown), rows, shown, keys)
        waiting = x.ask_batch(rows, keys)
        return lambda: self._made(waiting(), rows, shown, keys)

    def batches(self, steps: Iterable[tuple[Tensor, K]]) -> Iterator[tuple[Tensor, K, Batch]]:
        """Yield the rows (clients, batch), the keys (clients,) or None, and the batch of each step.

        Lazy rows of the next step are read while the caller computes with a batch.
        """
        if isinstance(self.x, Tensor):
            for rows, keys in steps:
                yield rows, keys, self.batch(rows, keys)
            return
        pending: list[tuple[Tensor, K, Callable[[], Batch]]] = []
        for rows, keys in steps:
            pending.append((rows, keys, self.ask(rows, keys)))
            if len(pending) > 1:
                before = pending.pop(0)
                yield before[0], before[1], before[2]()
        for rows, keys, waiting in pending:
            yield rows, keys, waiting()

    def _made(self, x: Tensor, rows: Tensor, shown: Tensor, keys: Tensor | None) -> Batch:
        """Return the batch of inputs ``x`` that were read."""
        mask, y = rows >= 0, labels_of(self.y, rows)
        x = x.long() if self.x.dtype == torch.int32 else self._numbers(x, shown, keys)
        absent = ~mask[:, 0]
        # reading from a GPU would block the CPU: it writes without a condition
        if absent.device.type != "cpu" or bool(absent.any()):
            x.masked_fill_(absent.to(x.device).view(-1, *(1 for _ in x.shape[1:])), 0)
        return Batch(x, y, mask, annotations=self.annotated(rows))

    def seen(self, rows: Tensor) -> Tensor:
        """Return the normalized ``x`` ``(rows, *input)`` of row numbers (rows,).

        Nothing is augmented. Under vmap each client may request different rows.
        """
        x = _rows_of(self.x, rows) if isinstance(self.x, Tensor) else self.x.read(rows)
        return x.long() if self.x.dtype == torch.int32 else self._scaled(x, rows)

    def annotated(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the annotations of ``rows`` (clients, batch) by name, in the same shape.

        Absent rows (-1) have 0.
        """
        return {
            name: values[rows.clamp(min=0)].masked_fill_(rows < 0, 0.0)
            for name, values in self.annotations.items()
        }

    def _numbers(self, x: Tensor, rows: Tensor, keys: Tensor | None) -> Tensor:
        """Return augmented, normalized examples ``x`` (clients, batch, *input) of ``rows``."""
        if keys is not None and self.augment:
            x = augmented(x, keys, self.augment, self.scale)
        return self._scaled(x, rows)

    def _scaled(self, x: Tensor, rows: Tensor) -> Tensor:
        factor, offset = self.factor, self.offset
        if self.owner is not None:
            factor, offset = factor[self.owner[rows]], offset[self.owner[rows]]
        return x.to(factor.dtype).mul_(factor).add_(offset).to(torch.float32)


def labels_of(y: Tensor, rows: Tensor) -> Tensor:
    """Return the labels of row numbers (clients, rows), with 0 for absent rows (-1).

    Numbers are float32 or float64, all other labels int64.
    """
    labels = as_labels(y[rows.clamp(min=0)])
    labels[rows < 0] = 0
    return labels


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Return ``x[rows]``. Indexing copies number by number, and this copies whole rows."""
    return x.index_select(0, rows.flatten().to(x.device)).view(*rows.shape, *x.shape[1:])


def as_labels(y: Tensor) -> Tensor:
    """Return stored labels as methods see them: numbers as they are, all others as int64."""
    return y if y.is_floating_point() else y.long()


def examples(
    data: Dataset, augment: tuple[Augmentation, ...] = (), device: str = "cpu", views: int = 1
) -> tuple[Examples, Examples]:
    """Return the training and the test examples of ``data``, on ``device``.

    Only the training examples are augmented and have several views.
    """
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (data.mean, data.std))
    factor, offset = _factor_and_offset(data.facts, mean, std, device)
    beside = {name: values.to(device) for name, values in data.annotations.items()}
    return (
        Examples(
            data.inputs.to(device),
            data.y.to(device),
            factor,
            offset,
            augment,
            data.scale,
            views,
            annotations=beside,
        ),
        Examples(
            data.inputs_test.to(device), data.y_test.to(device), factor, offset, scale=data.scale
        ),
    )


def examples_of(
    facts: DataFacts,
    x: Inputs,
    y: Tensor,
    augment: tuple[Augmentation, ...] = (),
    device: str = "cpu",
) -> Examples:
    """Return rows ``x`` ``(rows, *input)``, ``y`` (rows,) of this form as examples, on a device."""
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (facts.mean, facts.std))
    factor, offset = _factor_and_offset(facts, mean, std, device)
    return Examples(x.to(device), y.to(device), factor, offset, augment, facts.scale)


def by_client(
    data: Dataset, parts: Partition, on_train: Examples, on_test: Examples
) -> tuple[Examples, Examples]:
    """Return the same examples, each row normalized by its own client's training rows."""
    mean, std = client_moments(data, parts.train)
    factor, offset = _factor_and_offset(data.facts, mean, std, str(on_train.x.device))
    setting = "data.normalize = 'client'"
    train = owners([parts.train, parts.validation], len(data.y), "training", setting)
    test = owners([parts.test], len(data.y_test), "test", setting)
    device = on_train.x.device
    return (
        replace(on_train, factor=factor, offset=offset, owner=train.to(device)),
        replace(on_test, factor=factor, offset=offset, owner=test.to(device)),
    )


def _factor_and_offset(
    facts: DataFacts, mean: Tensor, std: Tensor, device: str
) -> tuple[Tensor, Tensor]:
    """Return the factor and offset of normalization, from moments (..., channels)."""
    shape = (*mean.shape, *(1 for _ in facts.input_shape[1:]))
    kind = torch.float64 if facts.element == PRECISE else torch.float32
    factor = (1.0 / (facts.scale * std)).view(shape).to(device, kind)
    offset = (-mean / std).view(shape).to(device, kind)
    return factor, offset


def owners(parts: Sequence[Rows], count: int, split: str, setting: str) -> Tensor:
    """Return the client of each of ``count`` rows (count,), -1 for rows without a client.

    Raises
    ------
    DataError
        If a row belongs to several clients, which the ``setting`` cannot have.
    """
    rows = torch.cat([part.rows for part in parts])
    if (shared := (rows.bincount(minlength=1) > 1).nonzero()).numel():
        raise DataError(
            f"{setting} needs rows of one client each, and {split} row "
            f"{int(shared[0])} belongs to several"
        )
    owner = torch.full((count,), ABSENT)
    for part in parts:
        owner[part.rows] = torch.arange(len(part)).repeat_interleave(part.counts)
    return owner
