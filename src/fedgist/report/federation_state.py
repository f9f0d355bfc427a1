"""State of a federation's sites, as its server writes it to ``federation.json`` of a run folder.

Texts in this file come from other institutions, and the file may be of another version. A field
that is missing, or has an unexpected type, is read as not given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedgist.runs.record import read_table
from fedgist.runs.sealing import WHOLE, of_table

FEDERATION = "federation.json"
FORMAT = 1
READY, TRAINING, PREPARING = "ready", "training", "preparing"
ABSENT, REFUSED, REVOKED = "absent", "refused", "revoked"
SITE_STATES = (READY, TRAINING, PREPARING, ABSENT, REFUSED, REVOKED)
LONGEST = 300  # characters of a text that are kept: a site must not be able to flood the page
LARGEST = 10.0**15  # larger numbers are no times, rounds or bytes


@dataclass(frozen=True)
class SiteState:
    """One site; times are seconds since 1970, and None or "" means that the field is not given."""

    name: str = ""
    number: int | None = None
    state: str = ""  # one of SITE_STATES, or a state of a later version
    since: float | None = None
    last_round: int | None = None
    version: str = ""
    sent_bytes: int | None = None
    received_bytes: int | None = None
    refusals: int | None = None
    note: str = ""


@dataclass(frozen=True)
class FederationState:
    """A federation and its sites; ``problem`` says why the file cannot be used, or only in part."""

    run: str = ""
    federation: str = ""
    address: str = ""
    round: int | None = None
    attempt: int | None = None
    waiting_for: str = ""
    scored: str = ""  # over how many clients the last mean is, and who is missing
    written: float | None = None
    sites: tuple[SiteState, ...] = ()
    problem: str = ""


def read_federation(folder: Path) -> FederationState | None:
    """Read the file in a run folder; None if there is no such file."""
    path = folder / FEDERATION
    if not path.exists():
        return None
    problems: list[str] = []
    table = read_table(path, json.loads, problems)
    if not problems and WHOLE in table and table[WHOLE] != of_table(table):
        problems = [f"{path} was changed since the server wrote it"]
    return FederationState(problem=problems[0]) if problems else federation_of(table, str(path))


def federation_of(table: Mapping[str, object], source: str = "the server") -> FederationState:
    """Return the state in a table that a server wrote or sent; ``source`` names it in problems."""
    sites = table.get("sites")
    tables = sites if isinstance(sites, list) else []
    version = _whole(table, "format")
    newer = (
        f"{source} has format {version}, newer than this fedgist: parts of it may be missing here"
    )
    return FederationState(
        run=_text(table, "run"),
        federation=_text(table, "federation"),
        address=_text(table, "address"),
        round=_whole(table, "round"),
        attempt=_whole(table, "attempt"),
        waiting_for=_text(table, "waiting_for"),
        scored=_text(table, "scored"),
        written=_number(table, "written"),
        sites=tuple(_site(entry) for entry in tables if isinstance(entry, dict)),
        problem=newer if version is not None and version > FORMAT else "",
    )


def _site(table: Mapping[str, object]) -> SiteState:
    return SiteState(
        name=_text(table, "name"),
        number=_whole(table, "number"),
        state=_text(table, "state"),
        since=_number(table, "since"),
        last_round=_whole(table, "last_round"),
        version=_text(table, "version"),
        sent_bytes=_whole(table, "sent_bytes"),
        received_bytes=_whole(table, "received_bytes"),
        refusals=_whole(table, "refusals"),
        note=_text(table, "note"),
    )


def _text(table: Mapping[str, object], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str):
        return ""
    return value if len(value) <= LONGEST else f"{value[: LONGEST - 3]}..."


def _number(table: Mapping[str, object], key: str) -> float | None:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= LARGEST else None  # NaN is in no range


def _whole(table: Mapping[str, object], key: str) -> int | None:
    value = _number(table, key)
    return int(value) if value is not None and value == int(value) else None
