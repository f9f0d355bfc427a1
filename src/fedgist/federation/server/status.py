"""The status of a federation and its sites: ``status.json`` in the folder of its run.

The server writes it for people. Texts in it come from other institutions, and the file may be of
another version: a field that is missing, or has an unexpected type, is read as not given.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WrapValidator
from pydantic.functional_validators import ModelWrapValidatorHandler

from fedgist.errors import OutputError
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files.record import read_table
from fedgist.runs.files.seals import WHOLE, of_table

LOG = logging.getLogger(__name__)
STATUS = "status.json"
FORMAT = 1
SITE_STATES = ("ready", "training", "preparing", "absent", "refused", "revoked")
AT_WORK = ("ready", "training")
SHUT_OUT = ("refused", "revoked")  # states of a site with a note that says why
BETWEEN_S = 0.3  # between two writes of what changes with every message
LONGEST = 300  # characters of a text that are kept: a site must not be able to flood the page
LARGEST = 10**15  # larger numbers are no times, rounds or bytes


def _or(default: object) -> WrapValidator:
    """Read what cannot be used as the default."""

    def read(value: object, handler: ModelWrapValidatorHandler[object]) -> object:
        try:
            return handler(value)
        except ValueError:
            return default

    return WrapValidator(read)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _sites(value: object) -> list[object]:
    usable = value if isinstance(value, list | tuple) else []
    return [site for site in usable if isinstance(site, dict | BaseModel)]


Text = Annotated[str, Field(strict=True), AfterValidator(_cut), _or("")]
Whole = Annotated[int | None, Field(strict=True, ge=0, le=LARGEST), _or(None)]
Time = Annotated[float | None, Field(strict=True, ge=0, le=LARGEST), _or(None)]  # since 1970


class SiteStatus(BaseModel):
    """One site. None or "" means that the field is not given."""

    name: Text = ""
    number: Whole = None
    state: Text = ""  # one of SITE_STATES, or a state of a later version
    since: Time = None
    last_round: Whole = None
    version: Text = ""
    sent_bytes: Whole = None  # to the site
    received_bytes: Whole = None
    refusals: Whole = None
    note: Text = ""

    @staticmethod
    def of(number: int, name: str) -> SiteStatus:
        """Return the status of a site that has not connected yet."""
        site = SiteStatus(name=name, number=number, state="absent", since=time.time())
        return site.model_copy(update={"sent_bytes": 0, "received_bytes": 0, "refusals": 0})


class FederationStatus(BaseModel):
    """A federation and its sites; ``problem`` says why the file cannot be used, or only in part."""

    format: Whole = FORMAT
    run: Text = ""
    federation: Text = ""
    address: Text = ""
    round: Whole = None
    attempt: Whole = None
    waiting_for: Text = ""
    scored: Text = ""  # over how many clients the last mean is, and who is missing
    written: Time = None
    sites: Annotated[tuple[SiteStatus, ...], BeforeValidator(_sites)] = ()
    problem: Annotated[str, Field(exclude=True)] = ""


def read_status(folder: Path) -> FederationStatus | None:
    """Read the status in a run folder; None if there is no such file."""
    path = folder / STATUS
    if not path.exists():
        return None
    problems: list[str] = []
    table = read_table(path, json.loads, problems)
    if not problems and WHOLE in table and table[WHOLE] != of_table(table):
        problems = [f"{path} was changed since the server wrote it"]
    return FederationStatus(problem=problems[0]) if problems else status_of(table, str(path))


def status_of(table: Mapping[str, object], source: str = "the server") -> FederationStatus:
    """Return the status in a table that a server wrote or sent; ``source`` names it in problems."""
    status = FederationStatus.model_validate({**table, "problem": ""})
    if (status.format or FORMAT) > FORMAT:
        status.problem = (
            f"{source} has format {status.format}, newer than this fedgist: parts of it may be "
            "missing here"
        )
    return status


@dataclass
class StatusBoard:
    """The status of all sites, in memory, and in a file that is replaced."""

    folder: Path
    run: str
    federation: str
    address: str
    sites: dict[int, SiteStatus] = field(default_factory=dict)
    round: int = 0
    attempt: int = 1
    waiting_for: str = ""
    scored: str = ""
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
            site.refusals = (site.refusals or 0) + (state == "refused")
        self.write()

    def refusal(self, number: int, reason: str) -> None:
        """Count a stage that a site refused, or a reply of it that was refused."""
        with self.lock:
            site = self.sites[number]
            site.refusals, site.note = (site.refusals or 0) + 1, reason
            self.changed = True
        self.refresh()

    def moved(self, number: int, sent: int, received: int) -> None:
        """Count the bytes of a request to a site, which then works on it, or of its reply."""
        with self.lock:
            site = self.sites[number]
            site.sent_bytes = (site.sent_bytes or 0) + sent
            site.received_bytes = (site.received_bytes or 0) + received
            if site.state in AT_WORK:  # not of a site that was cut in the meantime
                site.state, site.since = "training" if sent else "ready", time.time()
            self.changed = True
        self.refresh()

    def refresh(self) -> None:
        """Write the status if it changed, but not more often than a person looks at it."""
        if self.changed and time.monotonic() - self.written > BETWEEN_S:
            self.write()

    def plain(self) -> dict[str, object]:
        """Return the status in JSON's types."""
        with self.lock:
            names = ("run", "federation", "address", "round", "attempt", "waiting_for", "scored")
            status = FederationStatus.model_construct(
                **{name: getattr(self, name) for name in names},
                written=time.time(),
                sites=tuple(site for _, site in sorted(self.sites.items())),
            )
            return status.model_dump(mode="json")

    def write(self) -> None:
        """Write the status into the run directory. Rounds and sites do so from two threads."""
        with self.writing:
            self.changed, self.written = False, time.monotonic()
            table = self.plain()
            text = json.dumps(table | {WHOLE: of_table(table)}) + "\n"
            try:
                files.write(self.folder / STATUS, text, durable=False)
            except (OSError, OutputError) as error:  # it is only a view: the run goes on
                LOG.warning("%s", error)
