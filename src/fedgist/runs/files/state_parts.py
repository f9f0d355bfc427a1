"""The clients' state in one file for each shard, written where the shard's clients are.

A file's name holds a digest of its arrays, so a new state replaces no older file. The checkpoint
names the files that belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedgist.errors import CheckpointError, first_line
from fedgist.runs.files.array_files import BROKEN, on_cpu, read_arrays, save_arrays
from fedgist.runs.files.digests import of_arrays
from fedgist.runs.files.run_directory import PART

HEADER = "fedgist-shard"


@dataclass(frozen=True)
class Parts:
    """The files of the clients' state: their folder, and their digests by name."""

    folder: Path
    files: Mapping[str, str]

    def read(self) -> list[dict[str, Tensor]]:
        """Return the state of each shard, (clients, ...) by architecture and name."""
        return [self.read_one(shard) for shard in range(len(self.files))]

    def read_one(self, shard: int) -> dict[str, Tensor]:
        """Return the state of one shard, (clients, ...) by architecture and name.

        Raises
        ------
        CheckpointError
            If its file is missing or is not what was written.
        """
        name = next((n for n in self.files if n.startswith(f"{PART}{shard}-")), "")
        return _read(self.folder / (name or f"{PART}{shard}"), self.files.get(name, ""))


def write_part(folder: Path, shard: int, arrays: dict[str, Tensor]) -> dict[str, str]:
    """Write the state of a shard, (clients, ...) by name; return its digest by the file's name."""
    arrays = on_cpu(arrays)
    digest = of_arrays(arrays)
    name = f"{PART}{shard}-{digest[:16]}.safetensors"
    save_arrays(folder / name, HEADER, str(shard), arrays)
    return {name: digest}


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    hint = "put the file back from a copy, or start the run again with --overwrite"
    try:
        _, arrays = read_arrays(path, HEADER)
    except BROKEN as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}); {hint}") from error
    if of_arrays(arrays) != digest:
        raise CheckpointError(f"{path} is damaged: its content is not what was written; {hint}")
    return arrays
