"""The section of a recipe about peers: the graph of clients that exchange messages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, model_validator

from fedgist.core.bounds import Fraction, PositiveInt
from fedgist.options import CLOSED

GraphName = Literal["relay", "full", "ring", "random_regular", "erdos_renyi", "file"]
#: The key that each of these graphs needs.
NEEDED: Mapping[str, str] = MappingProxyType(
    {"random_regular": "degree", "erdos_renyi": "chance", "file": "path"}
)


class GraphSection(BaseModel):
    """Whose messages each client receives: a relay by the server, or a graph of peers."""

    model_config = CLOSED

    name: GraphName = "relay"
    """Whose messages each client receives.

    ``relay``: those of all other clients, through the server. The other names are graphs of peers:
    a client receives the messages of its neighbors only.
    """
    degree: PositiveInt | None = None
    """Number of neighbors of every client. Needed by ``random_regular``."""
    chance: Fraction | None = None
    """Probability that two clients are neighbors. Needed by ``erdos_renyi``."""
    path: str | None = None
    """A CSV file with the columns ``client,hears`` or ``round,client,hears``. Needed by ``file``.

    The lines of a round are the whole graph from that round on, until the next round with lines.
    """
    changes: bool = False
    """Whether a random graph is drawn again in every round."""

    @model_validator(mode="after")
    def _complete(self) -> GraphSection:
        for name, key in NEEDED.items():
            there = getattr(self, key) is not None
            if there != (self.name == name):
                why = f"name = {self.name!r} needs {key}" if not there else f"{key} is of {name!r}"
                raise ValueError(f"{why}, and name is {self.name!r}" if there else why)
        if self.changes and self.name not in {"random_regular", "erdos_renyi"}:
            raise ValueError(f"changes is of random graphs; name is {self.name!r}")
        return self
