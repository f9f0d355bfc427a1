"""Troubles of a round: clients that were refused, absent or late, and totals that were withheld."""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.runs.files.record import Line

KINDS = ("refused", "absent", "late")  # keys of a round's line, each with a list of clients
EVENT = "event"  # a trouble of no single client
MOST_NAMES = 8  # clients that are named
LONGEST = 300  # characters of a name or reason: a client must not be able to flood a page


@dataclass(frozen=True)
class Trouble:
    """Clients of one round that were refused, absent or late for the same reason; or an event."""

    round: int
    kind: str
    clients: tuple[str, ...]
    reason: str

    @property
    def who(self) -> str:
        """The first clients' names, and how many more there are."""
        more = len(self.clients) - MOST_NAMES
        return ", ".join(self.clients[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def troubles(line: Line) -> list[Trouble]:
    """Return the troubles of a round, clients with one reason together."""
    found = []
    for kind in KINDS:
        clients: dict[str, list[str]] = {}
        for entry in line.get(kind) or ():
            clients.setdefault(_reason(entry), []).append(_name(entry))
        found += [
            Trouble(line["round"], kind, tuple(names), reason) for reason, names in clients.items()
        ]
    events = line.get("events") or ()
    return found + [Trouble(line["round"], EVENT, (), text) for text in events]


def _reason(entry: Line) -> str:
    late = f"its reply to round {entry['answers']} is not used" if "answers" in entry else ""
    return _cut(str(entry.get("reason", late)))


def _name(entry: Line) -> str:
    """Return a client's name, or its number if it has none, and its pool."""
    name = _cut(str(entry.get("name", entry["client"])))
    return f"{name} ({entry['pool']})" if "pool" in entry else name


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
