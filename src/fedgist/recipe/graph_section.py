"""The section of a recipe about peers: who hears whom."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from fedgist.recipe.section import CLOSED

GraphName = Literal["relay", "full", "ring", "random_regular", "erdos_renyi", "file"]
#: What each graph needs to be told.
NEEDED: Mapping[str, str] = MappingProxyType(
    {"random_regular": "degree", "erdos_renyi": "chance", "file": "path"}
)


class GraphSection(BaseModel):
    """Who hears whom: all through the server, as a relay, or each its neighbors alone."""

    model_config = CLOSED

    name: GraphName = "relay"
    degree: Annotated[int, Field(ge=1)] | None = None  # neighbors of each, of random_regular
    chance: Annotated[float, Field(gt=0, le=1)] | None = None  # of each pair, of erdos_renyi
    path: str | None = None  # a file of "client,hears" or "round,client,hears" lines
    changes: bool = False  # whether a random graph is drawn anew in every round

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
