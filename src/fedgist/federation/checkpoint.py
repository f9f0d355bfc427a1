"""Checkpoints: everything a run needs to go on, in one file that is replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from fedgist.core.message import separate
from fedgist.errors import CheckpointError
from fedgist.federation import atomic_files as files
from fedgist.federation.record import STATE


@dataclass(frozen=True)
class Checkpoint:
    """The state after ``round``: the server's arrays and the clients', by name."""

    round: int
    server: Mapping[str, Tensor]
    clients: Mapping[str, Tensor]


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint into a run directory.

    Raises
    ------
    OutputError
        If the directory cannot be written to.
    """
    arrays = {f"server/{k}": v for k, v in checkpoint.server.items()}
    arrays |= {f"clients/{k}": v for k, v in checkpoint.clients.items()}
    arrays = separate({name: array.detach().cpu() for name, array in arrays.items()})
    files.write(
        folder / STATE,
        safetensors.torch.save(arrays, {"fedgist": json.dumps({"round": checkpoint.round})}),
    )


def load(folder: Path) -> Checkpoint | None:
    """Read a run directory's checkpoint; None if it has none.

    Raises
    ------
    CheckpointError
        If the file is damaged.
    """
    path = folder / STATE
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, "pt") as file:
            number = json.loads(file.metadata()["fedgist"])["round"]
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        msg = f"{path} is damaged ({error}); start the run again with --overwrite"
        raise CheckpointError(msg) from error

    def under(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}

    return Checkpoint(number, under("server/"), under("clients/"))
