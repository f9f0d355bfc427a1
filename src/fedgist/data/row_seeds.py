"""Seeds of rows that are read when they are used: each read of a row has its own random draws."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedgist.core import random

_NUMPYS = 2**32  # NumPy's old generator takes smaller seeds
NO_SEED = 0  # the seed of rows that are read without a key


def seeds_of(keys: Tensor | None, rows: Tensor) -> Tensor:
    """Return the seed of each row of a batch, in the shape of ``rows`` (clients, batch).

    ``keys`` (clients,) give each place of a batch a seed of its own. Without keys all seeds are 0.
    """
    if keys is None:
        return torch.full_like(rows, NO_SEED)
    places = torch.arange(rows.shape[1], device=keys.device)
    return random.fold(keys.unsqueeze(1), "read", places)


@contextmanager
def own_draws(*, draws: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds the generators of torch, NumPy and Python before a row is read.

    On exit the generators are restored to their previous states. Without ``draws`` no generator is
    seeded or restored.
    """
    if not draws:
        yield lambda _: None
        return
    before = torch.default_generator.get_state(), np.random.get_state(), python_random.getstate()
    try:
        yield _seed
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        python_random.setstate(before[2])


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device
    np.random.seed(seed % _NUMPYS)
    python_random.seed(seed)
