"""A site's state on its disk: one file for each stage that it answered, and one for its releases.

Every file is written whole or not at all. A stage's file holds the state before and after it, and
the reply, and is on the disk before the reply is sent. The file of releases is on the disk before
training begins. So a process that is killed at any moment neither sends what it has forgotten, nor
releases a stage twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from fedgist.engines.site import Answered, SiteState, StageKey
from fedgist.errors import SiteError, first_line
from fedgist.recipe.section import CLOSED
from fedgist.runs import atomic_files as files
from fedgist.runs.array_files import BROKEN, as_bytes, on_cpu, read_arrays
from fedgist.runs.digests import of_arrays, of_text

BASE, RELEASES, ENDING = "base.safetensors", "releases.json", ".safetensors"
HEADER = "fedgist"
FORMAT: Literal[1] = 1
NO_STAGE: StageKey = (-1, 0, "")
BEFORE, AFTER, REPLY = "before/", "after/", "reply"
MENDING = "put it back from a copy, or remove the folder: the site then begins anew"


class StateHeader(BaseModel):
    """The header of a file: whose it is, which stage it holds, and the digest of all of it.

    ``releases`` is the number of releases that were made when the file was written.
    """

    model_config = CLOSED

    format: Literal[1] = FORMAT
    run: str
    client: int
    key: StageKey = NO_STAGE
    digest: str = ""
    forgotten: StageKey
    releases: int = 0
    whole: str = ""


@dataclass
class SiteStore:
    """The folder of one site's state in one run. ``written`` holds what is on the disk."""

    folder: Path
    run: str
    client: int
    written: dict[StageKey, str] = field(default_factory=dict)  # digests of the downloads
    releases: dict[StageKey, str] = field(default_factory=dict)

    def keep(self, state: SiteState) -> None:
        """Write the state; return when it would survive a restart."""
        if state.released != self.releases:
            self._write_releases(state.released)
        gone = sorted(self.written.keys() - state.answered.keys(), reverse=True)
        if not state.answered and (gone or not (self.folder / BASE).exists()):
            header = self._header(forgotten=state.forgotten)
            self._write(BASE, header, _under(AFTER, state.client))
        # stages that were undone go before anything is written, the latest first: what is left is
        # always a beginning; stages that are forgotten go when the newest is there
        self._remove([key for key in gone if key > state.forgotten])
        for key, answered in sorted(state.answered.items()):
            if self.written.get(key) != answered.digest:
                self._write_stage(key, answered, state)
        self._remove([key for key in gone if key <= state.forgotten])

    def load(self) -> SiteState | None:
        """Return the state on the disk; None if this run has none here.

        Raises
        ------
        SiteError
            If a file is damaged, or belongs to another run or another site.
        """
        if not self.folder.is_dir() or not any(self.folder.iterdir()):
            return None
        self.releases = self._read_releases()
        header, arrays = self._read(BASE)
        client, forgotten = _below(AFTER, arrays), header.forgotten
        answered: dict[StageKey, Answered] = {}
        for path in sorted(self.folder.glob(f"*{ENDING}")):
            if path.name != BASE:
                header, arrays = self._read(path.name)
                client, forgotten = _below(AFTER, arrays), max(forgotten, header.forgotten)
                reply = bytes(arrays[REPLY].numpy())
                answered[header.key] = Answered(header.digest, _below(BEFORE, arrays), reply)
        self.written = {key: stage.digest for key, stage in answered.items()}
        return SiteState(client, dict(self.releases), answered, forgotten)

    def _write_stage(self, key: StageKey, answered: Answered, state: SiteState) -> None:
        header = self._header(key=key, digest=answered.digest, forgotten=state.forgotten)
        reply = torch.frombuffer(bytearray(answered.reply), dtype=torch.uint8)
        arrays = _under(BEFORE, answered.before) | _under(AFTER, state.client) | {REPLY: reply}
        self._write(_name(key), header, arrays)
        self.written[key] = answered.digest

    def _header(
        self, *, forgotten: StageKey, key: StageKey = NO_STAGE, digest: str = ""
    ) -> StateHeader:
        return StateHeader(
            run=self.run,
            client=self.client,
            key=key,
            digest=digest,
            forgotten=forgotten,
            releases=len(self.releases),
        )

    def _remove(self, keys: Sequence[StageKey]) -> None:
        for key in keys:
            (self.folder / _name(key)).unlink(missing_ok=True)
            del self.written[key]

    def _write(self, name: str, header: StateHeader, arrays: dict[str, Tensor]) -> None:
        kept = on_cpu(arrays)
        sealed = header.model_copy(update={"whole": _digest(header, kept)})
        blob = as_bytes(HEADER, sealed.model_dump_json(), kept)
        files.write(self.folder / name, blob)

    def _read(self, name: str) -> tuple[StateHeader, dict[str, Tensor]]:
        """Return the header and the arrays of a file, after its check."""
        path = self.folder / name
        try:
            text, arrays = read_arrays(path, HEADER)
            header = StateHeader.model_validate_json(text)
        except BROKEN as error:
            raise SiteError(f"{path} cannot be read ({first_line(error)}): {MENDING}") from error
        self._check(path, header.run, header.client, whole=header.whole == _digest(header, arrays))
        if header.releases > len(self.releases):
            raise SiteError(
                f"{self.folder / RELEASES} is missing or too old: {header.releases} releases were "
                f"made, and it has {len(self.releases)}: {MENDING}"
            )
        return header, arrays

    def _check(self, path: Path, run: object, client: object, *, whole: bool) -> None:
        if not whole:
            raise SiteError(f"{path} is damaged: {MENDING}")
        for fact, stored, expected in (("run", run, self.run), ("site", client, self.client)):
            if stored != expected:
                raise SiteError(f"{path} is of {fact} {stored}, not {expected}: {MENDING}")

    def _write_releases(self, released: Mapping[StageKey, str]) -> None:
        entries = [[*key, digest] for key, digest in sorted(released.items())]
        table = {"format": FORMAT, "run": self.run, "client": self.client, "releases": entries}
        seal = of_text(json.dumps(table, sort_keys=True))
        files.write(self.folder / RELEASES, json.dumps(table | {"whole": seal}) + "\n")
        self.releases = dict(released)

    def _read_releases(self) -> dict[StageKey, str]:
        path = self.folder / RELEASES
        if not path.exists():
            return {}
        try:
            table = dict(json.loads(path.read_text(encoding="utf-8")))
            whole = table.pop("whole", None) == of_text(json.dumps(table, sort_keys=True))
            releases = {(int(r), int(s), str(a)): str(d) for r, s, a, d in table["releases"]}
        except BROKEN as error:
            raise SiteError(f"{path} cannot be read ({first_line(error)}): {MENDING}") from error
        self._check(path, table.get("run"), table.get("client"), whole=whole)
        return releases


def _name(key: StageKey) -> str:
    """Return the name of a stage's file; names sort in the order of the stages."""
    number, stage, architecture = key
    return f"{number:08d}-{stage:03d}-{of_text(architecture)[:8]}{ENDING}"


def _under(start: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {start + name: array for name, array in arrays.items()}


def _below(start: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)}


def _digest(header: StateHeader, arrays: Mapping[str, Tensor]) -> str:
    return of_text(header.model_dump_json(exclude={"whole"}) + of_arrays(arrays))
