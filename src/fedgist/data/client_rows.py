"""Who sees which row when: rows of clients, and the batches of a phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core import random

ABSENT = -1


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of many clients, end to end: client i has ``rows[offsets[i]:offsets[i + 1]]``."""

    rows: Tensor
    offsets: Tensor

    @staticmethod
    def of(lists: Sequence[Tensor]) -> Rows:
        """Join one tensor of rows a client."""
        counts = torch.tensor([0, *(len(r) for r in lists)])
        return Rows(
            torch.cat([*lists, torch.zeros(0, dtype=torch.int64)]).to(torch.int64), counts.cumsum(0)
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        return self.rows[int(self.offsets[client]) : int(self.offsets[client + 1])]

    @property
    def counts(self) -> Tensor:
        """Rows of each client."""
        return self.offsets.diff()

    def table(self, clients: Sequence[int]) -> Tensor:
        """Return (clients, most rows), padded with -1."""
        begin, counts = (
            self.offsets[list(clients)].unsqueeze(1),
            self.counts[list(clients)].unsqueeze(1),
        )
        column = torch.arange(int(counts.max()) if len(counts) else 0)
        there = column < counts
        if not there.any():
            return torch.full(there.shape, ABSENT)
        return torch.where(there, self.rows[torch.where(there, begin + column, 0)], ABSENT)

    def merged(self) -> Rows:
        """Return everybody's rows as one client's."""
        return Rows(self.rows, torch.tensor([0, len(self.rows)]))


def steps_of(counts: Tensor, batch_size: int, epochs: int, steps: int | None = None) -> Tensor:
    """Return how many batches each client goes through.

    ``epochs`` passes, or ``steps`` batches (0 without rows).
    """
    per_epoch = -(-counts // batch_size)
    return per_epoch * epochs if steps is None else torch.where(counts > 0, steps, 0)


def schedule(
    table: Tensor, keys: Tensor, batch_size: int, epochs: int, steps: int | None = None
) -> Tensor:
    """Return the batches of each client: (clients, steps, batch), row numbers or -1.

    Every epoch is a fresh order of the client's rows, drawn from its key; the last batch of an
    epoch may be short. A client's batches depend on its own rows and key alone, whoever stands
    beside it.
    """
    present = table >= 0
    counts = present.sum(1)
    per_epoch = -(-counts // batch_size)
    todo = steps_of(counts, batch_size, epochs, steps)
    longest = int(todo.max()) if len(todo) else 0
    width = min(batch_size, int(counts.max()) if len(counts) else 0)
    out = torch.full((len(table), longest, width), ABSENT, device=table.device)
    passes = int((-(-todo // per_epoch.clamp(min=1))).max()) if len(todo) else 0
    column = torch.arange(table.shape[1], device=table.device)
    for epoch in range(passes):
        draws = random.order(random.fold(keys, "order", epoch).unsqueeze(1), present)
        rows = table.gather(1, draws)
        position = epoch * per_epoch.unsqueeze(1) + column // batch_size
        keep = (column < counts.unsqueeze(1)) & (position < todo.unsqueeze(1))
        client, place = keep.nonzero(as_tuple=True)
        out[client, position[client, place], column[place] % batch_size] = rows[client, place]
    return out
