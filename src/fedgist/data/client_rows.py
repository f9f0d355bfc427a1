"""Row numbers of each client, and the order of batches in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core import random
from fedgist.core.local_steps import batches_in, steps_of

ABSENT = -1


@dataclass(frozen=True, eq=False)
class Rows:
    """Concatenated row numbers: client i has ``rows[offsets[i]:offsets[i + 1]]``.

    ``rows`` is (all rows,) and ``offsets`` is (clients + 1,), both int64.
    """

    rows: Tensor
    offsets: Tensor

    @staticmethod
    def of(lists: Sequence[Tensor]) -> Rows:
        """Join the row numbers of each client, one tensor (rows,) per client."""
        counts = torch.tensor([0, *(len(rows) for rows in lists)])
        joined = torch.cat([*lists, torch.zeros(0, dtype=torch.int64)])
        return Rows(joined.to(torch.int64), counts.cumsum(0))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        return self.rows[int(self.offsets[client]) : int(self.offsets[client + 1])]

    @property
    def counts(self) -> Tensor:
        """Number of rows of each client: (clients,)."""
        return self.offsets.diff()

    def table(self, clients: Sequence[int]) -> Tensor:
        """Return the clients' row numbers (clients, rows), padded with -1 to the largest client."""
        begin = self.offsets[list(clients)].unsqueeze(1)
        counts = self.counts[list(clients)].unsqueeze(1)
        column = torch.arange(int(counts.max()) if len(counts) else 0)
        filled = column < counts
        if not filled.any():
            return torch.full(filled.shape, ABSENT)
        return torch.where(filled, self.rows[torch.where(filled, begin + column, 0)], ABSENT)

    def merged(self) -> Rows:
        """Return all rows as the rows of a single client."""
        return Rows(self.rows, torch.tensor([0, len(self.rows)]))


def schedule(
    table: Tensor,
    keys: Tensor,
    batch_size: int,
    epochs: float,
    steps: int | None = None,
    least: int = 1,
) -> Tensor:
    """Return the batches of each client: (clients, steps, batch) row numbers, -1 for none.

    ``table`` (clients, rows) comes from :meth:`Rows.table`, and ``keys`` is (clients,). Each epoch
    visits a client's rows in a new order, drawn from its key. The last batch of an epoch may be
    short; if it has fewer than ``least`` rows, it joins the batch before it. A client's batches
    depend only on its own rows and key.
    """
    present = table >= 0
    counts = present.sum(1)
    per_epoch = batches_in(counts, batch_size, least)
    steps_each = steps_of(counts, batch_size, epochs, steps, least)
    longest = int(steps_each.max()) if len(steps_each) else 0
    before_last = (per_epoch - 1).clamp(min=0)
    most = counts - before_last * batch_size  # rows of the last batch
    width = min(int(most.clamp(min=batch_size).max()), int(counts.max())) if len(counts) else 0
    batches = torch.full((len(table), longest, width), ABSENT, device=table.device)
    epochs_each = -(-steps_each // per_epoch.clamp(min=1))
    column = torch.arange(table.shape[1], device=table.device)
    for epoch in range(int(epochs_each.max()) if len(epochs_each) else 0):
        order = random.order(random.fold(keys, "order", epoch).unsqueeze(1), present)
        rows = table.gather(1, order)
        within = torch.minimum(column // batch_size, before_last.unsqueeze(1))
        place_in = column - within * batch_size
        step = epoch * per_epoch.unsqueeze(1) + within
        scheduled = (column < counts.unsqueeze(1)) & (step < steps_each.unsqueeze(1))
        client, place = scheduled.nonzero(as_tuple=True)
        batches[client, step[client, place], place_in[client, place]] = rows[client, place]
    return batches
