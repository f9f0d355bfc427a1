"""Availability: the clients that are online in each round."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from fedgist.core import random
from fedgist.core.method import ClientInfo
from fedgist.data.sources.file_sizes import check_memory, regular
from fedgist.errors import RecipeError

_BYTES_OF_A_LINE = 40  # of memory, for each byte of the shortest line


def availability(
    chance: float | str, clients: Sequence[ClientInfo], key: Tensor
) -> Callable[[int], list[ClientInfo]]:
    """Return a function from a round to the clients online in it.

    ``chance`` is each client's probability of being online, or the path of a CSV file. If the file
    does not name round 0, the clients of round 1 are online in round 0. ``key`` () draws the online
    clients of every round.
    """
    if isinstance(chance, str):
        trace = _trace(Path(chance).expanduser(), len(clients))
        trace.setdefault(0, trace.get(1, set()))  # an exchange before training would find nobody
        return lambda number: [c for c in clients if c.id in trace.get(number, ())]

    if chance == 1.0:
        everybody = list(clients)  # of many clients a list in every round would take long
        return lambda _: everybody

    def online(number: int) -> list[ClientInfo]:
        draws = random.uniform(random.fold(key, number), (len(clients),)).tolist()
        return [c for c, draw in zip(clients, draws, strict=True) if draw < chance]

    return online


def _trace(path: Path, num_clients: int) -> dict[int, set[int]]:
    """Read the clients online in each round: lines "round,client" under that header."""
    out: dict[int, set[int]] = {}
    try:
        pairs = _pairs(path)
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise RecipeError(
            f"clients.availability: {path} is not a file of 'round,client' lines ({error})"
        ) from error
    for number, client in pairs:
        if not 0 <= client < num_clients:
            raise RecipeError(
                f"clients.availability: {path} names client {client}, outside 0..{num_clients - 1}"
            )
        out.setdefault(number, set()).add(client)
    return out


def _pairs(path: Path) -> list[tuple[int, int]]:
    check_memory(_BYTES_OF_A_LINE * regular(path).stat().st_size, str(path))
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        if missing := {"round", "client"} - set(lines.fieldnames or ()):
            raise ValueError(f"it has no column {min(missing)!r}")
        return [(int(row["round"]), int(row["client"])) for row in lines]
