"""Storage of the clients' state between rounds, one stack for all clients of an architecture.

The arrays are in anonymous shared memory: worker processes that are forked later read and write the
same pages. Pages of clients that never took part are never touched, so they take no memory. Arrays
that are too large for it are in a file without a name, which is gone with the run.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from platformdirs import user_cache_path
from torch import Tensor

from fedgist.core.device_copy import copied
from fedgist.data.sources.file_sizes import in_words
from fedgist.errors import FULL, CheckpointError, DiskFullError, OutputError

PRESENT = "present"
FOLDER = "state"  # in the user's cache
AT_ONCE = 1 << 26  # bytes of clients that are restored together


def shared(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros of ``shape``; on a CPU, processes that are forked later share them."""
    size = math.prod(shape) * dtype.itemsize
    if device != "cpu" or size == 0:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(*shape)


def folder() -> Path:
    """Return the folder of the files without a name, on a disk that the user has for caches."""
    return user_cache_path("fedgist") / FOLDER


class _File:
    """Arrays in a file without a name, one after another; forked processes share it."""

    def __init__(self, like: Mapping[str, Tensor], clients: int) -> None:
        self.size = sum(_room(array, clients) for array in like.values())
        try:
            folder().mkdir(parents=True, exist_ok=True)
            folder().chmod(0o700)  # models tell about rows
            with tempfile.TemporaryFile(dir=folder()) as file:
                file.truncate(self.size)
                self.number = os.dup(file.fileno())
        except OSError as error:
            raise self._refusal(error) from error
        weakref.finalize(self, os.close, self.number)
        self.memory = mmap.mmap(self.number, self.size)
        self.arrays, self.begins, begin = dict[str, Tensor](), dict[str, int](), 0
        for name, array in like.items():
            count, kind = clients * array.numel(), array.dtype
            flat = torch.empty(0, dtype=kind)
            if count:
                flat = torch.frombuffer(self.memory, dtype=kind, count=count, offset=begin)
            self.arrays[name], self.begins[name] = flat.view(clients, *array.shape), begin
            begin += _room(array, clients)

    def reserve(self, places: Sequence[int]) -> None:
        """Take room on the disk for clients' arrays, at their places: a full disk says so now."""
        try:
            for name, array in self.arrays.items():
                size = array[:1].nbytes
                for place in places if size else ():
                    os.posix_fallocate(self.number, self.begins[name] + place * size, size)
        except OSError as error:
            raise self._refusal(error) from error

    def forget(self) -> None:
        """Let the system write this process's pages to the disk and use their memory."""
        self.memory.madvise(mmap.MADV_DONTNEED)

    def _refusal(self, error: OSError) -> OutputError:
        kind = DiskFullError if error.errno in FULL else OutputError
        return kind(
            f"the state of absent clients ({in_words(self.size)} for all of them) is kept in "
            f"{folder()}: {error}; free some space, or raise engine.memory_limit"
        )


def _room(array: Tensor, clients: int) -> int:
    """Return the bytes of all clients' arrays like this, up to a whole number of pages."""
    return -(-max(1, clients * array.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE


class ClientStore:
    """Arrays of the clients of one architecture: each (clients, ...), by name."""

    def __init__(
        self,
        clients: Sequence[int],
        like: Mapping[str, Tensor],
        device: str,
        *,
        in_file: bool = False,
    ) -> None:
        """Allocate the arrays; ``like`` holds one client's arrays: names, types and shapes."""
        self.place = {client: i for i, client in enumerate(clients)}
        self.file = _File(like, len(clients)) if in_file and like else None
        self.arrays = (
            self.file.arrays
            if self.file is not None
            else {n: shared((len(clients), *a.shape), a.dtype, device) for n, a in like.items()}
        )
        self.present = shared((len(clients),), torch.bool, "cpu")
        self.device = torch.device(device)

    def absent(self, clients: Sequence[int]) -> list[int]:
        """Return the clients without stored arrays."""
        return [c for c in clients if self.arrays and not self.present[self.place[c]]]

    def get(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """Return copies of these clients' arrays, stacked: (clients, ...) by name."""
        at = copied(self._places(clients), self.device)
        # indexing would copy number by number
        arrays = {name: a.index_select(0, at) for name, a in self.arrays.items()}
        self._forget()
        return arrays

    def put(self, clients: Sequence[int], values: Mapping[str, Tensor]) -> None:
        """Store these clients' arrays, ``values`` (clients, ...) by name."""
        places = self._places(clients)
        if self.file is not None:
            self.file.reserve(places[~self.present[places]].tolist())
        at = copied(places, self.device)
        for name, array in self.arrays.items():
            array[at] = values[name]
        self.present[places] = True
        self._forget()

    def _forget(self) -> None:
        if self.file is not None:
            self.file.forget()

    def _places(self, clients: Sequence[int]) -> Tensor:
        """Return the clients' places in the arrays, (clients,) on the CPU."""
        return torch.tensor([self.place[c] for c in clients], dtype=torch.int64)

    def state(self) -> dict[str, Tensor]:
        """Return all arrays (clients, ...) by name; an empty table if no client keeps any."""
        return {**self.arrays, PRESENT: self.present} if self.arrays and self.place else {}

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore all arrays, (clients, ...) by name, from a checkpoint."""
        check_alike(arrays, self.state(), "what clients keep")
        if not self.state():
            return
        clients, each = list(self.place), sum(a[:1].nbytes for a in self.arrays.values())
        places = arrays[PRESENT].nonzero().squeeze(1)
        for some in torch.split(places, max(1, AT_ONCE // max(1, each))):
            values = {name: arrays[name][some].to(self.device) for name in self.arrays}
            self.put([clients[place] for place in some.tolist()], values)
        self.present.copy_(arrays[PRESENT])


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
