"""What a federation's server must know after a restart."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from fedgist.errors import CheckpointError, first_line
from fedgist.federation.network.invitation import Hex
from fedgist.options import CLOSED
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files.digests import of_text
from fedgist.runs.files.run_directory import PARTICIPANTS, SITES_STATE
from fedgist.runs.files.seals import of_file
from fedgist.wire.site import StageKey

NEVER: StageKey = (-1, 0, "")
TOTALS = "checkpoint/totals"  # the last secure total of each architecture


class RunState(BaseModel):
    """The identity of a run, its sites, the round that was begun, and each site's last answer.

    ``begun`` is a round and the sites that were ready for it: if the server is killed, the round is
    done again with the same sites. ``finished`` are the sites that have their last download.
    ``participants`` are the digests of the file of participants before and after it was last
    written. ``whole`` is the digest of all the rest.
    """

    model_config = CLOSED

    format: Literal[1] = 1
    run: Hex
    names: tuple[str, ...]
    begun: tuple[int, tuple[int, ...]] | None = None
    last: dict[int, StageKey] = {}
    finished: tuple[int, ...] = ()
    participants: tuple[str, str] | None = None
    whole: str = ""

    def digest(self) -> str:
        """Return the digest of all but itself."""
        return of_text(self.model_dump_json(exclude={"whole"}))


@dataclass
class RunStateFile:
    """The state of a run in its folder, written whole whenever it changes."""

    folder: Path
    state: RunState
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @staticmethod
    def open(folder: Path, names: Sequence[str]) -> RunStateFile:
        """Return the state of the run in a folder, or that of a new run with these sites."""
        path = folder / SITES_STATE
        try:
            state = RunState.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            new = RunStateFile(folder, RunState(run=secrets.token_hex(8), names=tuple(names)))
            new.write()
            return new
        except (OSError, ValidationError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({first_line(error)}): put it back from a copy"
            ) from error
        if state.whole != state.digest():
            raise CheckpointError(f"{path} was changed: put it back from a copy")
        written = RunStateFile(folder, state)
        if state.participants and written.digest_of_participants() not in state.participants:
            file = folder / PARTICIPANTS
            raise CheckpointError(f"{file} is missing or was changed: put it back from a copy")
        return written

    def digest_of_participants(self) -> str:
        """Return the digest of the file of participants; an empty text if there is none."""
        return of_file(self.folder / PARTICIPANTS)

    def write_participants(self, text: str) -> None:
        """Write the file of participants, after the digests of the old and of the new one."""
        self._change(participants=(self.digest_of_participants(), of_text(text)))
        files.write(self.folder / PARTICIPANTS, text)

    def begin(self, number: int, sites: Collection[int]) -> None:
        """Write down the sites of a round before it begins."""
        self._change(begun=(number, tuple(sorted(sites))))

    def answered(self, sites: Collection[int], key: tuple[int, int]) -> None:
        """Write down that sites answered a stage, given by round and place in the round."""
        later = {
            site: (*key, "") for site in sites if self.state.last.get(site, NEVER) < (*key, "")
        }
        if later:
            self._change(last={**self.state.last, **later})

    def finish(self, sites: Collection[int]) -> None:
        """Write down that sites have their last download."""
        self._change(finished=tuple(sorted({*self.state.finished, *sites})))

    def go_on(self) -> None:
        """Write down that more rounds follow, after which all sites get another last download."""
        self._change(finished=())

    def forget(self, site: int) -> None:
        """Write down that a site has left, and that the others lack the model without it."""
        others = {other: key for other, key in self.state.last.items() if other != site}
        self._change(last=others, finished=())

    def write(self) -> None:
        """Write the state."""
        self.state = self.state.model_copy(update={"whole": self.state.digest()})
        text = json.dumps(self.state.model_dump(mode="json"), indent=2)
        files.write(self.folder / SITES_STATE, text + "\n")

    def _change(self, **values: object) -> None:
        with self.lock:
            self.state = self.state.model_copy(update=values)
            self.write()


@dataclass(frozen=True)
class TotalsFolder:
    """The last secure total of each architecture, a file each."""

    folder: Path

    def load(self, name: str) -> bytes | None:
        """Return what was saved of an architecture, if anything was."""
        path = self._path(name)
        return path.read_bytes() if path.exists() else None

    def save(self, name: str, blob: bytes) -> None:
        """Replace what was saved; return when it would survive a restart."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write(self._path(name), blob, private=True)

    def _path(self, name: str) -> Path:
        return self.folder / of_text(name)[:16]
