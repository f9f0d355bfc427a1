"""A site's state on its disk: one file for each stage that it answered, and one for its releases.

Every file is written whole or not at all. A stage's file holds the state before and after it, and
the reply, and is on the disk before the reply is sent. The file of releases is on the disk before
training begins. So a process that is killed at any moment neither sends what it has forgotten, nor
releases a stage twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from filelock import BaseFileLock, FileLock, Timeout
from pydantic import BaseModel
from torch import Tensor

from fedgist.core.tree import below, under
from fedgist.errors import SiteError, first_line
from fedgist.options import CLOSED
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files.array_files import BROKEN, as_bytes, on_cpu, read_arrays
from fedgist.runs.files.digests import of_arrays, of_text
from fedgist.wire.site import Answered, SiteState, StageKey

LOCK = "in_use.lock"
PATIENCE_S = 3.0  # processes that a killed site left behind end within a second
BASE, RELEASES, ENDING = "base.safetensors", "releases.json", ".safetensors"
HEADER = "fedgist"
FORMAT: Literal[1] = 1
NO_STAGE: StageKey = (-1, 0, "")
BEFORE, AFTER, REPLY = "before/", "after/", "reply"
MENDING = "put it back from a copy, or remove the folder: the site then begins anew"


class StateHeader(BaseModel):
    """The header of a file: whose it is, which stage it holds, and the digest of all of it.

    ``recipe`` is the digest of the run's settings, ``rows`` that of the site's rows. ``lost`` is
    the last round that was charged by an earlier state, which is lost; -1 if none is. ``releases``
    is the number of releases that were made when the file was written.
    """

    model_config = CLOSED

    format: Literal[1] = FORMAT
    run: str
    client: int
    recipe: str
    lost: int
    key: StageKey = NO_STAGE
    digest: str = ""
    forgotten: StageKey
    releases: int = 0
    rows: str = ""
    whole: str = ""


class Releases(BaseModel):
    """The releases of a run: each stage, with the digest of the download behind it."""

    model_config = CLOSED

    format: Literal[1] = FORMAT
    run: str
    client: int
    recipe: str
    releases: tuple[tuple[StageKey, str], ...]
    whole: str = ""

    def digest(self) -> str:
        """Return the digest of all but itself."""
        return of_text(self.model_dump_json(exclude={"whole"}))


def locked(folder: Path) -> BaseFileLock:
    """Lock a site's state folder until the lock is dropped, or the process ends.

    Raises
    ------
    SiteError
        If another process holds the lock.
    """
    files.private_folder(folder)
    # a lock is the process's: its threads share it
    lock = FileLock(folder / LOCK, PATIENCE_S, mode=files.OWNER_ONLY, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise SiteError(f"{folder} is in use by another fedgist site: stop it first") from error
    return lock


@dataclass
class SiteStore:
    """The folder of one site's state in one run. ``written`` holds what is on the disk.

    ``recipe``, ``lost`` and ``rows`` are those of :class:`StateHeader`; ``rows_before`` is the
    digest of the rows when the newest file was written.
    """

    folder: Path
    run: str
    client: int
    recipe: str
    lost: int = -1
    rows: str = ""
    rows_before: str = ""
    written: dict[StageKey, str] = field(default_factory=dict)  # digests of the downloads
    releases: dict[StageKey, str] = field(default_factory=dict)

    def keep(self, state: SiteState) -> None:
        """Write the state; return when it would survive a restart."""
        files.private_folder(self.folder)
        if state.released != self.releases:
            self._write_releases(state.released)
        gone = sorted(self.written.keys() - state.answered.keys(), reverse=True)
        if not state.answered and (gone or not (self.folder / BASE).exists()):
            header = self._header(forgotten=state.forgotten)
            self._write(BASE, header, under(AFTER, state.client))
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
        client, forgotten = below(AFTER, arrays), header.forgotten
        answered: dict[StageKey, Answered] = {}
        for path in sorted(self.folder.glob(f"*{ENDING}")):
            if path.name != BASE:
                header, arrays = self._read(path.name)
                client, forgotten = below(AFTER, arrays), max(forgotten, header.forgotten)
                reply = bytes(arrays[REPLY].numpy())
                answered[header.key] = Answered(header.digest, below(BEFORE, arrays), reply)
        self.written = {key: stage.digest for key, stage in answered.items()}
        return SiteState(client, dict(self.releases), answered, forgotten)

    def _write_stage(self, key: StageKey, answered: Answered, state: SiteState) -> None:
        header = self._header(key=key, digest=answered.digest, forgotten=state.forgotten)
        reply = torch.frombuffer(bytearray(answered.reply), dtype=torch.uint8)
        arrays = under(BEFORE, answered.before) | under(AFTER, state.client) | {REPLY: reply}
        self._write(_name(key), header, arrays)
        self.written[key] = answered.digest

    def _header(
        self, *, forgotten: StageKey, key: StageKey = NO_STAGE, digest: str = ""
    ) -> StateHeader:
        return StateHeader(
            run=self.run,
            client=self.client,
            recipe=self.recipe,
            lost=self.lost,
            key=key,
            digest=digest,
            forgotten=forgotten,
            releases=len(self.releases),
            rows=self.rows,
        )

    def _remove(self, keys: Sequence[StageKey]) -> None:
        for key in keys:
            (self.folder / _name(key)).unlink(missing_ok=True)
            del self.written[key]

    def _write(self, name: str, header: StateHeader, arrays: dict[str, Tensor]) -> None:
        kept = on_cpu(arrays)
        sealed = header.model_copy(update={"whole": _digest(header, kept)})
        blob = as_bytes(HEADER, sealed.model_dump_json(), kept)
        files.write(self.folder / name, blob, private=True)

    def _read(self, name: str) -> tuple[StateHeader, dict[str, Tensor]]:
        """Return the header and the arrays of a file, after its check."""
        path = self.folder / name
        try:
            text, arrays = read_arrays(path, HEADER)
            header = StateHeader.model_validate_json(text)
        except BROKEN as error:
            raise SiteError(f"{path} cannot be read ({first_line(error)}): {MENDING}") from error
        self._check(path, header, whole=header.whole == _digest(header, arrays))
        self.lost, self.rows_before = max(self.lost, header.lost), header.rows
        if header.releases > len(self.releases):
            raise SiteError(
                f"{self.folder / RELEASES} is missing or too old: {header.releases} releases were "
                f"made, and it has {len(self.releases)}: {MENDING}"
            )
        return header, arrays

    def _check(self, path: Path, header: StateHeader | Releases, *, whole: bool) -> None:
        if not whole:
            raise SiteError(f"{path} is damaged: {MENDING}")
        if header.recipe != self.recipe:
            text = f"run {self.run} began here with another recipe: begin a new run"
            raise SiteError(text, "plan")
        for fact, stored, expected in (
            ("run", header.run, self.run),
            ("site", header.client, self.client),
        ):
            if stored != expected:
                raise SiteError(f"{path} is of {fact} {stored}, not {expected}: {MENDING}")

    def _write_releases(self, released: Mapping[StageKey, str]) -> None:
        entries = tuple((key, digest) for key, digest in sorted(released.items()))
        table = Releases(run=self.run, client=self.client, recipe=self.recipe, releases=entries)
        sealed = table.model_copy(update={"whole": table.digest()})
        files.write(self.folder / RELEASES, sealed.model_dump_json() + "\n", private=True)
        self.releases = dict(released)

    def _read_releases(self) -> dict[StageKey, str]:
        path = self.folder / RELEASES
        if not path.exists():
            return {}
        try:
            table = Releases.model_validate_json(path.read_bytes())
        except BROKEN as error:
            raise SiteError(f"{path} cannot be read ({first_line(error)}): {MENDING}") from error
        self._check(path, table, whole=table.whole == table.digest())
        return dict(table.releases)


def _name(key: StageKey) -> str:
    """Return the name of a stage's file; names sort in the order of the stages."""
    number, stage, architecture = key
    return f"{number:08d}-{stage:03d}-{of_text(architecture)[:8]}{ENDING}"


def _digest(header: StateHeader, arrays: Mapping[str, Tensor]) -> str:
    return of_text(header.model_dump_json(exclude={"whole"}) + of_arrays(arrays))
