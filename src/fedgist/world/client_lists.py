"""The rows of each client, as a user lists them: by number or by mask, in order or by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from fedgist.data.sources.python_objects import array, chooses_others
from fedgist.errors import RecipeError, did_you_mean, listed, shown
from fedgist.recipe.overrides import RowsOfClients


def own_rows(
    clients: RowsOfClients, clients_test: RowsOfClients | None, count: int, test_count: int
) -> tuple[list[Tensor], list[Tensor], tuple[str, ...]]:
    """Return each client's training rows and test rows (rows,), and the clients' names.

    A Boolean mask selects the rows at which it is true. Clients may share rows, but no client may
    list a row twice or have no training rows. Without ``clients_test``, each client has all test
    rows. ``count`` and ``test_count`` are the numbers of training rows and test rows.
    """
    names = tuple(clients) if isinstance(clients, Mapping) else ()
    train = rows_of_each(clients, count, "clients")
    for client, rows in train.items():
        if not len(rows):
            raise RecipeError(f"{client} has no rows")
    if clients_test is None:
        return list(train.values()), [torch.arange(test_count)] * len(train), names
    if isinstance(clients_test, Mapping):
        if strange := sorted(set(clients_test) ^ set(names)):
            raise RecipeError(
                f"clients_test and clients must name the same clients; {strange[0]!r} is in one"
            )
        clients_test = {name: clients_test[name] for name in names}
    tests = rows_of_each(clients_test, test_count, "clients_test")
    if len(tests) != len(train):
        raise RecipeError(f"clients has {len(train)} clients, clients_test has {len(tests)}")
    return list(train.values()), list(tests.values()), names


def rows_of_each(clients: RowsOfClients, count: int, argument: str) -> dict[str, Tensor]:
    """Return each client's rows by the client's name in messages."""
    if isinstance(clients, Mapping):
        named = {f"{argument}[{name!r}]": rows for name, rows in clients.items()}
    else:
        named = {f"{argument}: client {i}": rows for i, rows in enumerate(clients)}
    return {who: _rows(rows, count, who) for who, rows in named.items()}


def check_indexes(clients: RowsOfClients | None, table: object, argument: str) -> None:
    """Raise RecipeError if a client's rows are chosen by an index that is not that of the data."""
    lists = clients.items() if isinstance(clients, Mapping) else enumerate(clients or ())
    for client, rows in lists:
        if chooses_others(rows, table):
            raise RecipeError(
                f"{argument}[{client!r}]: its pandas labels are not those of the rows of x in "
                "order; give row numbers, as groupby(...).indices has them, or a mask of x.index"
            )


def _rows(value: object, count: int, who: str) -> Tensor:
    numbers = array(value, who)
    if not numbers.size:
        return torch.zeros(0, dtype=torch.int64)
    if numbers.ndim > 1 or numbers.dtype.kind not in "biu":
        kind = numbers.dtype if numbers.ndim == 1 else f"of shape {list(numbers.shape)}"
        raise RecipeError(f"{who}: rows are {kind}; a list of whole numbers or a mask is needed")
    if numbers.dtype == bool:
        if len(numbers) != count:
            raise RecipeError(f"{who}: a mask of {len(numbers)} rows, but there are {count}")
        return torch.from_numpy(np.flatnonzero(numbers))
    outside = (numbers < 0) | (numbers >= count)
    if outside.any():
        raise RecipeError(
            f"{who} names row {numbers[outside][0]}, but there are rows 0..{count - 1}"
        )
    distinct, times = np.unique(numbers, return_counts=True)
    if len(distinct) < len(numbers):
        raise RecipeError(f"{who} lists row {distinct[times > 1][0]} twice")
    return torch.from_numpy(numbers.astype(np.int64))


def numbers_of(clients: Sequence[int | str], names: Sequence[str], key: str) -> tuple[int, ...]:
    """Return the numbers of clients that are listed by number or, as texts, by name."""
    unknown = [client for client in clients if isinstance(client, str) and client not in names]
    if unknown:
        raise RecipeError(
            f"{key}: no client is called {unknown[0]!r:.80}" + _hint(unknown[0], names)
        )
    return tuple(names.index(c) if isinstance(c, str) else c for c in clients)


def _hint(name: str, names: Sequence[str]) -> str:
    return did_you_mean(name, names) if names else "; the clients of this partition have no names"


def named_like(pattern: str, names: Sequence[str], key: str) -> tuple[int, ...]:
    """Return the numbers of the clients whose names match a pattern (``*`` is any text)."""
    if not names:
        raise RecipeError(f"{key} = {shown(pattern)}: the clients of this partition have no names")
    if matching := tuple(i for i, name in enumerate(names) if fnmatchcase(name, pattern)):
        return matching
    raise RecipeError(f"{key} = {shown(pattern)} matches none of the clients: {listed(names)}")
