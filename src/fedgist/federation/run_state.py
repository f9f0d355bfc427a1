"""What a federation's server must know after a restart, and what it shows of its sites."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from fedgist.engines.site import StageKey
from fedgist.errors import CheckpointError, OutputError, first_line
from fedgist.federation.run_plan import Hex
from fedgist.recipe.section import CLOSED
from fedgist.runs import atomic_files as files
from fedgist.runs.digests import of_text
from fedgist.runs.run_directory import FEDERATION_STATE, PARTICIPANTS
from fedgist.runs.sealing import WHOLE, of_file, of_table

LOG = logging.getLogger(__name__)
STATUS = "federation.json"


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
        path = folder / FEDERATION_STATE
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

    def write(self) -> None:
        """Write the state."""
        self.state = self.state.model_copy(update={"whole": self.state.digest()})
        text = json.dumps(self.state.model_dump(mode="json"), indent=2)
        files.write(self.folder / FEDERATION_STATE, text + "\n")

    def _change(self, **values: object) -> None:
        with self.lock:
            self.state = self.state.model_copy(update=values)
            self.write()


NEVER: StageKey = (-1, 0, "")
AT_WORK = ("ready", "training")
BETWEEN_S = 0.3  # between two writes of what changes with every message
SHUT_OUT = ("refused", "revoked")  # states of a site with a note that says why


@dataclass
class SiteStatus:
    """What the server shows of one site."""

    name: str
    number: int
    state: str = "absent"
    since: float = field(default_factory=time.time)
    last_round: int | None = None
    version: str = ""
    sent_bytes: int = 0  # to the site
    received_bytes: int = 0
    refusals: int = 0
    note: str = ""


@dataclass
class StatusBoard:
    """The state of all sites, for people: in memory, and in a file that is replaced."""

    folder: Path
    run: str
    federation: str
    address: str
    sites: dict[int, SiteStatus] = field(default_factory=dict)
    round: int = 0
    attempt: int = 1
    waiting_for: str = ""
    scored: str = ""  # over how many clients the last mean is, and who is missing
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    writing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    written: float = 0.0  # when, by a clock that only goes forward
    changed: bool = False  # since then

    def saw(self, number: int, state: str, text: str = "") -> None:
        """Take note of a site's state. A site that was refused is not shown as merely absent."""
        with self.lock:
            site = self.sites[number]
            if state == "absent" and site.state in SHUT_OUT:
                return
            if site.state != state:
                site.state, site.since = state, time.time()
            site.note = text or site.note * (state in SHUT_OUT)
            site.refusals += state == "refused"
        self.write()

    def refusal(self, number: int, reason: str) -> None:
        """Count a stage that a site refused, or a reply of it that was refused."""
        with self.lock:
            self.sites[number].refusals += 1
            self.sites[number].note = reason
            self.changed = True
        self.refresh()

    def moved(self, number: int, sent: int, received: int) -> None:
        """Count the bytes of a request to a site, which then works on it, or of its reply."""
        with self.lock:
            site = self.sites[number]
            site.sent_bytes, site.received_bytes = (
                site.sent_bytes + sent,
                site.received_bytes + received,
            )
            if site.state in AT_WORK:  # not of a site that was cut in the meantime
                site.state, site.since = "training" if sent else "ready", time.time()
            self.changed = True
        self.refresh()

    def refresh(self) -> None:
        """Write the state if it changed, but not more often than a person looks at it."""
        if self.changed and time.monotonic() - self.written > BETWEEN_S:
            self.write()

    def plain(self) -> dict[str, object]:
        """Return the state in JSON's types."""
        with self.lock:
            sites = [asdict(site) for _, site in sorted(self.sites.items())]
            return {
                "format": 1,
                "run": self.run,
                "federation": self.federation,
                "address": self.address,
                "round": self.round,
                "attempt": self.attempt,
                "waiting_for": self.waiting_for,
                "scored": self.scored,
                "written": time.time(),
                "sites": sites,
            }

    def write(self) -> None:
        """Write the state into the run directory. Rounds and sites do so from two threads."""
        with self.writing:
            self.changed, self.written = False, time.monotonic()
            table = self.plain()
            text = json.dumps(table | {WHOLE: of_table(table)}) + "\n"
            try:
                files.write(self.folder / STATUS, text, durable=False)
            except (OSError, OutputError) as error:  # it is only a view: the run goes on
                LOG.warning("%s", error)
