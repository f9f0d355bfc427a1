"""The last message a site received, with which its model works after the server is gone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from fedgist.core.message import pack, registered, type_name, unpack
from fedgist.core.tree import Tree
from fedgist.errors import CheckpointError, MessageError, first_line
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files.array_files import BROKEN, as_bytes, read_arrays
from fedgist.runs.files.record import STATE

DOWNLOADS = STATE.with_name("downloads.safetensors")
HEADER = "fedgist"


def save_downloads(folder: Path, downloads: Mapping[str, Tree]) -> None:
    """Write the last download of each architecture."""
    kinds = {name: type_name(type(message)) for name, message in downloads.items()}
    arrays = {
        name: torch.frombuffer(bytearray(pack(message)), dtype=torch.uint8)
        for name, message in downloads.items()
    }
    files.write(folder / DOWNLOADS, as_bytes(HEADER, json.dumps(kinds), arrays))


def load_downloads(folder: Path) -> dict[str, Tree] | None:
    """Return the last download of each architecture; None if the run has its own server.

    Raises
    ------
    CheckpointError
        If the file cannot be read.
    """
    path = folder / DOWNLOADS
    if not path.exists():
        return None
    try:
        text, arrays = read_arrays(path, HEADER)
        kinds = json.loads(text)
        return {
            name: unpack(registered(kinds[name]), bytes(array.numpy()))
            for name, array in arrays.items()
        }
    except (*BROKEN, MessageError) as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)})") from error
