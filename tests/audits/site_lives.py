"""All that a private site sends in its life, over plans, rounds, kills and sources of rows."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.core.privacy import sensitivity
from fedgist.core.tree import named
from fedgist.errors import FedgistError, OwnerError
from fedgist.federation.site.agent import SiteAgent
from fedgist.federation.site.file import SiteFile, SiteTable
from fedgist.wire.envelope import unseal
from private_sites import ANY_SIZE, PRIVATE, plan_of, request, side_of
from three_sites import recipe

MOST = 60
Row = tuple[tuple[float, ...], str]  # inputs and a class
Step = Callable[["Life"], None]
INPUTS, CLASSES = 3, ("a", "b", "c")
RUNS = ("a" * 16, "b" * 16)
# the condition of the promise is kept: bodies do not learn
FROZEN = {"model": {"name": "mlp", "hidden": [8], "frozen": True}}
SHORT = {"batch_size": 8, "local_epochs": 1}


def rows_of(count: int = 40) -> list[Row]:
    """Rows of three numbers, some of them equal, and their classes."""
    draws = np.random.default_rng(0)
    numbers = draws.integers(0, 3, (count, INPUTS))
    classes = draws.integers(0, len(CLASSES), count)
    return [
        (tuple(map(float, x)), CLASSES[y]) for x, y in zip(numbers, classes.tolist(), strict=True)
    ]


def as_npz(path: Path, rows: Sequence[Row]) -> None:
    """Write rows into an .npz file without test rows."""
    x = np.array([x for x, _ in rows], dtype=np.float32)
    np.savez(path, x=x, y=np.array([y for _, y in rows]))


def as_table(path: Path, rows: Sequence[Row]) -> None:
    """Write rows into a .csv file: two columns of numbers and one of categories, and the label."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["one", "two", "kind", "label"])
        for x, y in rows:
            writer.writerow([*x[:2], {0.0: "p", 1.0: "q"}.get(x[2], f"k{x[2]:g}"), y])


COLUMNS = {"one": "number", "two": "number", "kind": ["p", "q", "k2"]}
SOURCES: dict[str, tuple[Callable[[Path, Sequence[Row]], None], dict[str, Any], dict[str, Any]]] = {
    "npz": (as_npz, {"name": "npz", "path": "rows.npz"}, {"input_shape": [INPUTS]}),
    "table": (
        as_table,
        {"name": "table", "path": "rows.csv", "label": "label"},
        {"columns": COLUMNS},
    ),
}


@dataclass
class Life:
    """A site, the plans that it was given, and what it sent: texts, and numbers of releases."""

    folder: Path
    source: str
    policy: dict[str, Any]
    sections: dict[str, Any]
    agent: SiteAgent | None = None
    sent: list[str | Tensor] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)  # of each release

    def recipe(self, **changes: Any) -> dict[str, Any]:
        """The recipe of the server, with changes."""
        facts = SOURCES[self.source][2]
        data = {"classes": list(CLASSES), "normalize": "none", "mean": [], "std": []}
        clients = {"max_rows": MOST} | changes.pop("clients", {})
        data |= self.sections.get("data", {}) | changes.pop("data", {})
        changes["privacy"] = PRIVATE["privacy"] | self.sections.get("privacy", {})
        given = {"method": {"name": "fedlog"}, **self.sections, **changes, "data": data}
        name = given["method"]["name"]
        raw = PRIVATE | FROZEN | given | {"clients": clients, "facts": facts, "train": SHORT}
        made = recipe(name, 2, **raw)
        made["facts"] = facts
        return made

    def live(self) -> SiteAgent:
        """The site's process, begun again if it was killed."""
        if self.agent is None:
            data = SOURCES[self.source][1]
            policy = {"epsilon": 1000.0, "delta": 0.5, "max_rows": MOST, **self.policy}
            table = SiteTable.model_validate({"data": data, "policy": policy})
            self.agent = SiteAgent(SiteFile(self.folder / "site.toml", table))
        return self.agent

    def plan(self, run: str = RUNS[0], **changes: Any) -> None:
        """Give the site a plan; take down its hello, its refusal, or that it ends."""
        try:
            self.sent.append(json.dumps(self.live().prepare(plan_of(self.side(**changes), run))))
        except OwnerError:
            self.sent.append("ended")
        except FedgistError as error:
            self.sent.append(str(error).replace(str(self.folder), ""))

    def side(self, **changes: Any) -> Any:
        """The server's context."""
        return side_of(self.recipe(**changes))

    def ask(self, number: int, run: str = RUNS[0]) -> None:
        """Ask for a round; take down the upload or the refusal."""
        side = self.side()
        header, messages = unseal(self.live().answer(request(side, number, run)), ANY_SIZE)
        if header.purpose != "reply":
            self.sent.append(f"{header.purpose}: {header.reason}")
            return
        arrays = [array.double().flatten() for array in named(messages["upload"]).values()]
        self.sent += [",".join(sorted(messages)), torch.cat(arrays)]
        self.sums.append(side.method.record_terms)

    def kill(self) -> None:
        """End the site's process."""
        self.live().close()
        self.agent = None


def begun(
    folder: Path, source: str, rows: Sequence[Row], sections: dict[str, Any], **policy: Any
) -> Life:
    """A site with these rows before its first plan; its secret is always the same."""
    write, options, _ = SOURCES[source]
    write(folder / options["path"], rows)
    (folder / "state").mkdir()
    (folder / "state/secret").write_text("5\n")
    return Life(folder, source, policy, sections)


def largest_change(first: Life, second: Life) -> float:
    """The largest change of a release between two lives, over the accounted sensitivity.

    It is infinite if the site sends another text, or another number of releases.
    """
    kinds = [[s if isinstance(s, str) else "" for s in life.sent] for life in (first, second)]
    if kinds[0] != kinds[1]:
        return math.inf
    clip = (PRIVATE["privacy"] | first.sections.get("privacy", {}))["clip"]
    bound = sensitivity("record", clip)
    pairs = [(a, b) for a, b in zip(first.sent, second.sent, strict=True) if isinstance(a, Tensor)]
    changes = [
        float((a - b).norm()) / (bound * math.sqrt(terms))
        for (a, b), terms in zip(pairs, first.sums, strict=True)
        if isinstance(b, Tensor)
    ]
    return max(changes, default=0.0)
