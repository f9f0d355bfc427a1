"""The number of local steps: batches of a pass over rows, and steps of a phase."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-9  # 0.7 of 10 batches are 7, not 8


def batches_in(counts: Tensor, batch_size: int, least: int = 1) -> Tensor:
    """Return the number of batches in one pass over each client's rows, (clients,).

    ``counts`` (clients,) are the clients' numbers of rows. A last batch of fewer than ``least``
    rows, 1 or 2, joins the batch before it. A client with fewer rows has no batch.
    """
    return (counts + batch_size - least) // batch_size


def steps_of(
    counts: Tensor, batch_size: int, epochs: float, steps: int | None = None, least: int = 1
) -> Tensor:
    """Return the number of batches that each client trains on.

    ``counts``, the clients' numbers of rows, and the result are (clients,). A client with rows has
    the batches of ``epochs`` passes over its rows, or ``steps`` batches if ``steps`` is given. A
    part of a pass is rounded up to whole batches. Batches have at least ``least`` rows, as in
    :func:`batches_in`.
    """
    per_epoch = batches_in(counts, batch_size, least)
    if steps is not None:
        return torch.where(per_epoch > 0, steps, 0)
    return (per_epoch.double() * epochs - ROUNDING).ceil().to(per_epoch.dtype)
