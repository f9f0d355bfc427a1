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
    """The state after ``round``: the server's arrays and the clients', by name.

    ``best`` is the state after the best round so far, where its models are to be kept.
    """

    round: int
    server: Mapping[str, Tensor]
    clients: Mapping[str, Tensor]
    best: Checkpoint | None = None

    def arrays(self) -> dict[str, Tensor]:
        """Return all arrays by name, those of the best round below ``best/``."""
        below = {"server": self.server, "clients": self.clients}
        below |= {"best": self.best.arrays()} if self.best else {}
        return {f"{part}/{k}": v for part, arrays in below.items() for k, v in arrays.items()}

    def copied(self) -> Checkpoint:
        """Return it with arrays of its own, which the run does not go on to change."""
        server, clients = (
            {k: v.clone() for k, v in arrays.items()} for arrays in (self.server, self.clients)
        )
        return Checkpoint(self.round, server, clients)


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint into a run directory.

    Raises
    ------
    OutputError
        If the directory cannot be written to.
    """
    arrays = separate({name: a.detach().cpu() for name, a in checkpoint.arrays().items()})
    header = {"round": checkpoint.round, "best": checkpoint.best and checkpoint.best.round}
    files.write(folder / STATE, safetensors.torch.save(arrays, {"fedgist": json.dumps(header)}))


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
            header = json.loads(file.metadata()["fedgist"])
            number, best = header["round"], header.get("best")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        msg = f"{path} is damaged ({error}); start the run again with --overwrite"
        raise CheckpointError(msg) from error

    def under(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}

    kept = None
    if best is not None:
        kept = Checkpoint(best, under("best/server/"), under("best/clients/"))
    return Checkpoint(number, under("server/"), under("clients/"), kept)
