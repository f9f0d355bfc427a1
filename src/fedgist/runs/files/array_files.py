"""Files of named arrays with a header, in safetensors' format."""

from __future__ import annotations

import os
import re
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from fedgist.core.message import separate
from fedgist.runs.files import atomic_files

# what reading a damaged file raises
BROKEN = (OSError, safetensors.SafetensorError, LookupError, TypeError, ValueError)


def read_arrays(path: Path, header: str) -> tuple[str, dict[str, Tensor]]:
    """Return the text of a file's header of this name, and its arrays of any shape by name."""
    with safetensors.safe_open(path, "pt") as file:
        # a file is no mapping: it has no other way to tell its names
        return file.metadata()[header], {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def on_cpu(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return arrays of any shape as they can be saved: on the CPU, none sharing memory."""
    return separate({name: array.detach().cpu() for name, array in arrays.items()})


def save_arrays(path: Path, header: str, text: str, arrays: dict[str, Tensor]) -> None:
    """Write a file with a header of this name and arrays from :func:`on_cpu`, without a copy."""
    with atomic_files.whole(path) as part:
        mode = part.stat().st_mode
        try:
            safetensors.torch.save_file(arrays, part, {header: text})
        except safetensors.SafetensorError as error:
            if found := re.search(r"os error (\d+)", str(error)):  # a full disk, say
                raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
            raise
        part.chmod(mode)  # it writes another file in its place, which only its owner can read


def as_bytes(header: str, text: str, arrays: dict[str, Tensor]) -> bytes:
    """Return a file's content: a header of this name, and arrays from :func:`on_cpu`."""
    blob: bytes = safetensors.torch.save(arrays, {header: text})
    return blob
