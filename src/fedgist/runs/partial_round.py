"""A round that is not finished: what a checkpoint holds of it, between two stages."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from fedgist.core.method import Order
from fedgist.core.replies import Asked
from fedgist.runs.record import Line
from fedgist.runs.round_record import RoundRecord


class PausedError(Exception):
    """A round was left between two stages."""


@dataclass
class PartialRound:
    """The record so far, who was selected, how many stages are done, and the seconds they took.

    ``edges`` says what crossed from peer to peer.
    """

    record: RoundRecord
    selected: list[Order]
    done: int = 0
    seconds: float = 0.0
    edges: list[Line] = field(default_factory=list)

    def plain(self) -> Line:
        """Return it in JSON's types."""
        return asdict(self)


def under_way(table: Line) -> PartialRound:
    """Return the round that :meth:`PartialRound.plain` described."""
    record = dict(table["record"])
    for name in ("refused", "absent", "losses"):
        record[name] = [(Asked(*asked), value) for asked, value in record[name]]
    record["asked"] = [Asked(*asked) for asked in record["asked"]]
    record["pools"] = tuple(record["pools"])
    if record["wire_bytes"] is not None:
        record["wire_bytes"] = tuple(record["wire_bytes"])
    selected = [
        Order(o["client"], o["architecture"], None if o["hears"] is None else tuple(o["hears"]))
        for o in table["selected"]
    ]
    rest = {f.name: table[f.name] for f in fields(PartialRound)[2:]}
    return PartialRound(RoundRecord(**record), selected, **rest)
