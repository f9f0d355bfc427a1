"""Storage of the clients' state between rounds, one stack for all clients of an architecture.

The arrays are in anonymous shared memory: worker processes that are forked later read and write the
same pages. Pages of clients that never took part are never touched, so they take no memory.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedgist.core.device_copy import copied
from fedgist.errors import CheckpointError

PRESENT = "present"


def shared(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros of ``shape``; on a CPU, processes that are forked later share them."""
    size = math.prod(shape) * dtype.itemsize
    if device != "cpu" or size == 0:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(*shape)


class ClientStore:
    """Arrays of the clients of one architecture: each (clients, ...), by name."""

    def __init__(self, clients: Sequence[int], like: Mapping[str, Tensor], device: str) -> None:
        """Allocate the arrays; ``like`` holds one client's arrays: names, types and shapes."""
        self.place = {client: i for i, client in enumerate(clients)}
        self.arrays = {
            n: shared((len(clients), *a.shape), a.dtype, device) for n, a in like.items()
        }
        self.present = shared((len(clients),), torch.bool, "cpu")
        self.device = torch.device(device)

    def absent(self, clients: Sequence[int]) -> list[int]:
        """Return the clients without stored arrays."""
        return [c for c in clients if self.arrays and not self.present[self.place[c]]]

    def get(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """Return copies of these clients' arrays, stacked: (clients, ...) by name."""
        at = copied(self._places(clients), self.device)
        return {name: a[at] for name, a in self.arrays.items()}

    def put(self, clients: Sequence[int], values: Mapping[str, Tensor]) -> None:
        """Store these clients' arrays, ``values`` (clients, ...) by name."""
        places = self._places(clients)
        at = copied(places, self.device)
        for name, array in self.arrays.items():
            array[at] = values[name]
        self.present[places] = True

    def _places(self, clients: Sequence[int]) -> Tensor:
        """Return the clients' places in the arrays, (clients,) on the CPU."""
        return torch.tensor([self.place[c] for c in clients])

    def state(self) -> dict[str, Tensor]:
        """Return all arrays (clients, ...) by name; an empty table if no client keeps any."""
        return {**self.arrays, PRESENT: self.present} if self.arrays and self.place else {}

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore all arrays, (clients, ...) by name, from a checkpoint."""
        check_alike(arrays, self.state(), "what clients keep")
        for name, array in self.state().items():
            array.copy_(arrays[name])


def check_alike(arrays: Mapping[str, Tensor], expected: Mapping[str, Tensor], subject: str) -> None:
    """Raise CheckpointError if names, types or shapes of the arrays differ from those expected.

    Both are arrays of any shape by name.
    """
    if strange := sorted(arrays.keys() ^ expected.keys()):
        state = "does not know" if strange[0] in arrays else "misses"
        raise CheckpointError(
            f"the checkpoint does not fit this run: {subject} {state} the array {strange[0]!r}"
        )
    for name, array in arrays.items():
        kinds = [f"{list(a.shape)} of {a.dtype}" for a in (array, expected[name])]
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"the checkpoint does not fit this run: {subject} has {name!r} as {kinds[1]}, the "
                f"checkpoint as {kinds[0]}"
            )
