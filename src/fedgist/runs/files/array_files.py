"""Files of named arrays with a header, in safetensors' format."""

from __future__ import annotations

from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from fedgist.core.message import separate

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


def as_bytes(header: str, text: str, arrays: dict[str, Tensor]) -> bytes:
    """Return a file's content: a header of this name, and arrays from :func:`on_cpu`."""
    blob: bytes = safetensors.torch.save(arrays, {header: text})
    return blob
