"""Run directories as values: reads files only, so it serves any engine and any version of a running run."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.run.record import CLIENTS, RECIPE, RESULT, ROUNDS, Line

ACCURACY = "eval/client/accuracy_mean"
DEEPEST = 4  # folders below the one named in which runs are looked for: of seeds, sweeps, tables


class ReportError(ValueError):
    """A folder holds no run that can be shown."""


@dataclass(frozen=True)
class RunFiles:
    """One run directory, as far as it has come."""

    folder: Path
    recipe: dict[str, Any]
    rounds: list[Line]
    result: dict[str, Any]
    problems: tuple[str, ...] = ()  # lines that could not be read

    @property
    def name(self) -> str:
        """Name of the method."""
        method: str = self.recipe.get("method", {}).get("name", self.folder.name)
        return method

    @property
    def seed(self) -> int:
        """The seed of all its randomness."""
        seed: int = self.recipe.get("seed", 0)
        return seed

    @functools.cached_property
    def clients(self) -> list[Line]:
        """A line per client and evaluation: read when asked for, as it may be long."""
        return _lines(self.folder / CLIENTS)[0]

    @property
    def done(self) -> int:
        """The last round there is."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def planned(self) -> int:
        """How many rounds the recipe asks for."""
        planned: int = self.recipe.get("train", {}).get("num_rounds", self.done)
        return planned

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return bool(self.rounds) and self.done >= self.planned

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

    def sent(self) -> dict[int, tuple[int, int]]:
        """Bytes sent up and down until the end of each round."""
        out, up, down = {}, 0, 0
        for line in self.rounds:
            up += line.get("comm/up_bytes") or 0
            down += line.get("comm/down_bytes") or 0
            out[int(line["round"])] = up, down
        return out


def find(folders: Iterable[Path]) -> list[RunFiles]:
    """Return the runs in these folders: each one's own, or those below it (its seeds, the cells of a sweep)."""
    out: dict[Path, RunFiles] = {}
    for folder in folders:
        inner = list(_below(folder, DEEPEST))
        if not inner:
            msg = f"{folder} holds no run{'' if folder.is_dir() else ': there is no such folder'}"
            raise ReportError(msg)
        out |= {path.resolve(): _read(path) for path in inner if path.resolve() not in out}
    return list(out.values())


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / RECIPE).exists():
        yield folder
    elif depth and folder.is_dir():
        for child in sorted((p for p in folder.iterdir() if p.is_dir()), key=_natural):
            yield from _below(child, depth - 1)


def _natural(path: Path) -> tuple[str, int, str]:
    """Sort seed-10 after seed-9."""
    stem, _, number = path.name.rpartition("-")
    return (stem, int(number), path.name) if number.isdigit() else (path.name, -1, "")


def _read(folder: Path) -> RunFiles:
    try:
        recipe = _toml((folder / RECIPE).read_text(encoding="utf-8"))
        result = json.loads((folder / RESULT).read_text(encoding="utf-8")) if (folder / RESULT).exists() else {}
    except (OSError, ValueError) as error:
        msg = f"{folder}: {error}"
        raise ReportError(msg) from error
    rounds, problems = _lines(folder / ROUNDS)
    return RunFiles(folder, recipe, rounds, result, problems)


def _toml(text: str) -> dict[str, Any]:
    """Read a recipe; of many that differ in nothing but the seed, its first line, the rest is read once."""
    first, _, rest = text.partition("\n")
    if not first.startswith("seed = "):
        return tomllib.loads(text)
    return {"seed": int(first.removeprefix("seed = ")), **_parsed(rest)}


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _lines(path: Path) -> tuple[list[Line], tuple[str, ...]]:
    """Read a file of lines; those that cannot be read are named and skipped, a last one still being written is not."""
    if not path.exists():
        return [], ()
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines: list[Line] = []
    problems = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            sound = isinstance(line, dict) and isinstance(line.get("round"), int)
        except ValueError:
            sound = False
        if sound:
            lines.append(line)
        elif number < len(texts):
            problems.append(f"{path}: line {number} cannot be read and is left out")
    return lines, tuple(problems)
