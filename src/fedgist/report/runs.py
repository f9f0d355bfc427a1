"""Run directories as values: reads files only, so it serves any engine and any version of a running run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.run.record import CLIENTS, RECIPE, RESULT, ROUNDS, Line, read_lines

ACCURACY = "eval/client/accuracy_mean"


class ReportError(ValueError):
    """A folder holds no run that can be shown."""


@dataclass(frozen=True)
class RunFiles:
    """One run directory, as far as it has come."""

    folder: Path
    recipe: dict[str, Any]
    rounds: list[Line]
    clients: list[Line]
    result: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the method, and of the seed's folder if it has one."""
        method: str = self.recipe.get("method", {}).get("name", self.folder.name)
        return method

    def last(self, key: str) -> float | None:
        """The last value of a column."""
        values: list[float] = [line[key] for line in self.rounds if line.get(key) is not None]
        return values[-1] if values else None

    def total(self, key: str) -> int:
        """The sum of a column."""
        return sum(line.get(key) or 0 for line in self.rounds)

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """The rounds that have a column, and its values."""
        pairs = [(line["round"], line[key]) for line in self.rounds if line.get(key) is not None]
        return [r for r, _ in pairs], [v for _, v in pairs]


def find(folders: Iterable[Path]) -> list[RunFiles]:
    """Return the runs in these folders: each one's own, or those of its seeds."""
    out: list[RunFiles] = []
    for folder in folders:
        inner = sorted(folder.glob("seed-*/" + RECIPE)) if not (folder / RECIPE).exists() else [folder / RECIPE]
        if not inner:
            msg = f"{folder} holds no run"
            raise ReportError(msg)
        out += [_read(path.parent) for path in inner]
    return out


def _read(folder: Path) -> RunFiles:
    try:
        recipe = tomllib.loads((folder / RECIPE).read_text(encoding="utf-8"))
        result = json.loads((folder / RESULT).read_text(encoding="utf-8")) if (folder / RESULT).exists() else {}
    except (OSError, ValueError) as error:
        msg = f"{folder}: {error}"
        raise ReportError(msg) from error
    return RunFiles(folder, recipe, read_lines(folder / ROUNDS), read_lines(folder / CLIENTS), result)
