"""Divergence: which models are not finite, since which round, and what a user may do."""

from __future__ import annotations

from collections.abc import Sequence

from fedgist.errors import listed
from fedgist.runs.files.columns import DIVERGED
from fedgist.runs.files.record import Line

MOST_NAMES = 8


def add(line: Line, entries: Sequence[Line]) -> None:
    """Add entries to the line of a round; the first reason of a model is kept."""
    there = line.get(DIVERGED, [])
    whos = [_who(entry) for entry in there]
    if every := [*there, *(entry for entry in entries if _who(entry) not in whos)]:
        line[DIVERGED] = every


def divergence_notes(rounds: Sequence[Line]) -> list[str]:
    """Return a note on the models that are not finite, each with its first round and reason.

    >>> lost = {"client": 3, "reason": "training loss nan"}
    >>> divergence_notes([{"round": 1, "diverged": [lost]}])
    ['not finite: client 3 from round 1 (training loss nan); try a smaller train.lr']
    """
    there: set[str] = set()
    groups: dict[str, list[str]] = {}
    for line in rounds:
        for entry in line.get(DIVERGED, []):
            if (who := _who(entry)) not in there:
                since = f"from round {line['round']} ({entry['reason']})"
                groups.setdefault(since, []).append(who)
                there.add(who)
    if not groups:
        return []
    parts = [f"{listed(whos, MOST_NAMES)} {since}" for since, whos in groups.items()]
    return [f"not finite: {'; '.join(parts)}; try a smaller train.lr"]


def _who(entry: Line) -> str:
    if "model" in entry:
        return f"the server's model {entry['model']}"
    who = str(entry.get("name", f"client {entry['client']}"))
    return f"{who} in pool {entry['pool']}" if "pool" in entry else who
