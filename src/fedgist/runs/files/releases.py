"""Releases of a private run with noise from the system: each is on disk before it is made.

A process that is killed may have released the totals of its current stage. A run that resumes from
a checkpoint reads from this file which stages were begun, and the totals that already had noise.
The run uses these totals again, because a total with new noise would be a further release. A total
that is lost is charged to the privacy budget as a further release.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from fedgist.core.message import pack, registered, type_name, unpack
from fedgist.core.replies import Subtotal
from fedgist.core.tree import Tree, map_leaves
from fedgist.errors import MessageError
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files.record import RELEASES

_ENTRY = "fedgist"
_TOTAL = ("stage", "type", "architecture", "clients")
_BROKEN = (OSError, safetensors.SafetensorError, LookupError, TypeError, ValueError, MessageError)


@dataclass
class Releases:
    """The newest round that was begun, its stages, its totals with noise, and what was repeated.

    ``again`` counts the rounds that released more than once. The object is mutable, and a run has
    one. Without a ``folder`` nothing is written.
    """

    folder: Path | None
    round: int = -1
    begun: list[str] = field(default_factory=list)
    totals: dict[str, tuple[Subtotal, ...]] = field(default_factory=dict)
    again: int = 0

    def after(self, number: int, done: Collection[str] = (), *, steps: bool = False) -> int:
        """Return the number of repeated rounds if round ``number`` is done now.

        Parameters
        ----------
        number
            The round.
        done
            The stages of the round that are finished and not repeated.
        steps
            Whether clients train with private steps, which a repeated round repeats.
        """
        lost = [stage for stage in self.begun if stage not in done]
        if not steps:
            lost = [stage for stage in lost if stage not in self.totals]
        repeated = number < self.round or (number == self.round and bool(lost))
        return self.again + repeated

    def begin(self, number: int, done: Collection[str] = (), *, steps: bool = False) -> None:
        """Charge a repeated round before any client receives an order; see :meth:`after`."""
        repeats = self.after(number, done, steps=steps)
        if repeats == self.again:
            return
        self.again = repeats
        self._write()

    def begin_stage(self, number: int, stage: str) -> None:
        """Write down that a stage may release something, before any client receives an order."""
        if number > self.round:
            self.round, self.begun, self.totals = number, [], {}
        if number == self.round and stage not in self.begun:
            self.begun.append(stage)
            self._write()

    def kept(self, number: int, stage: str) -> tuple[Subtotal, ...] | None:
        """Return the released totals of a stage; None if they were not released."""
        return self.totals.get(stage) if number == self.round else None

    def keep(self, number: int, stage: str, totals: Sequence[Subtotal]) -> None:
        """Keep totals with their noise, before the method sees them."""
        if number == self.round:
            self.totals[stage] = tuple(totals)
            self._write()

    def _write(self) -> None:
        if self.folder is None:
            return
        blobs: dict[str, torch.Tensor] = {}
        described: list[dict[str, object]] = []
        for stage, totals in self.totals.items():
            for total in totals:
                blob = torch.frombuffer(bytearray(pack(total.message)), dtype=torch.uint8)
                blobs[str(len(described))] = blob
                about = stage, type_name(type(total.message)), total.architecture, total.clients
                described.append(dict(zip(_TOTAL, about, strict=True)))
        numbers: dict[str, object] = {"again": self.again, "round": self.round, "begun": self.begun}
        entry = {_ENTRY: json.dumps(numbers | {"totals": described})}
        files.write(self.folder / RELEASES, safetensors.torch.save(blobs, entry))


def read_releases(folder: Path, device: str) -> Releases | None:
    """Read the releases of a run; None if the file is missing or damaged."""
    try:
        with safetensors.safe_open(folder / RELEASES, "pt") as file:
            entry = json.loads(file.metadata()[_ENTRY])
            releases = Releases(folder, entry["round"], entry["begun"], {}, entry["again"])
            for place, about in enumerate(entry["totals"]):
                blob = bytes(file.get_tensor(str(place)).numpy())
                message: Tree = unpack(registered(about["type"]), blob)
                arrays = map_leaves(lambda leaf: leaf.to(device), message)
                name, clients = about["architecture"], tuple(about["clients"])
                total = Subtotal(name, clients, releases.round, about["stage"], arrays)
                before = releases.totals.get(about["stage"], ())
                releases.totals[about["stage"]] = (*before, total)
    except _BROKEN:
        return None
    return releases
