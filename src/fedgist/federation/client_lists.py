"""The rows of each client, as a user lists them: by number or by mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.data.sources.python_objects import array
from fedgist.errors import RecipeError


def rows_of_clients(clients: Sequence[Any], count: int, argument: str) -> list[Tensor]:
    """Return each client's row numbers as tensors; a Boolean mask names the rows where it is true.

    Clients may share rows, but none may list a row twice.

    Raises
    ------
    RecipeError
        If they are not lists of numbers of the ``count`` rows there are, or masks of this length;
        ``argument`` begins the message.
    """
    return [_rows(value, count, f"{argument}: client {i}") for i, value in enumerate(clients)]


def _rows(value: Any, count: int, who: str) -> Tensor:
    numbers = array(value, who)
    if not numbers.size:
        return torch.zeros(0, dtype=torch.int64)
    if numbers.ndim > 1 or numbers.dtype.kind not in "biu":
        kind = numbers.dtype if numbers.ndim == 1 else f"of shape {list(numbers.shape)}"
        msg = f"{who}: rows are {kind}; a list of whole numbers or a mask is needed"
        raise RecipeError(msg)
    if numbers.dtype == bool:
        if len(numbers) != count:
            msg = f"{who}: a mask of {len(numbers)} rows, but there are {count}"
            raise RecipeError(msg)
        return torch.from_numpy(np.flatnonzero(numbers))
    outside = (numbers < 0) | (numbers >= count)
    if outside.any():
        msg = f"{who} names row {numbers[outside][0]}, but there are rows 0..{count - 1}"
        raise RecipeError(msg)
    distinct, times = np.unique(numbers, return_counts=True)
    if len(distinct) < len(numbers):
        msg = f"{who} lists row {distinct[times > 1][0]} twice"
        raise RecipeError(msg)
    return torch.from_numpy(numbers.astype(np.int64))
