"""Run directories as values.

Reads files only, so it serves any engine and any version of a running run.
"""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.errors import ReportError
from fedgist.federation.record import CLIENTS, PARTITION, RECIPE, RESULT, ROUNDS, Line

ACCURACY = "eval/client/accuracy_mean"
NOT_FINITE = (math.inf, -math.inf)
DEEPEST = 4  # folders below the one named in which runs are looked for: of seeds, sweeps, tables


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

    @functools.cached_property
    def split(self) -> dict[str, Any] | None:
        """Who has what: names of ``classes``, and each client's ``train`` rows of them.

        None if it is not there.
        """
        kept = _table(self.folder / PARTITION, json.loads, [])
        counts, classes = kept.get("train"), kept.get("classes")
        if not (isinstance(classes, list) and isinstance(counts, list) and counts):
            return None
        return (
            kept if all(isinstance(li, list) and len(li) == len(classes) for li in counts) else None
        )

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
    """Return the runs in these folders.

    Each one's own, or those below it (its seeds, the cells of a sweep).
    """
    out: dict[Path, RunFiles] = {}
    for folder in folders:
        inner = list(_below(folder, DEEPEST))
        if not inner:
            why = (
                ""
                if folder.is_dir()
                else ": it is a file"
                if folder.exists()
                else ": there is no such folder"
            )
            msg = f"{folder} holds no run{why}"
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
    """Read a run; what cannot be read is named. A run without a recipe has no rounds either.

    Nothing counts.
    """
    problems: list[str] = []
    recipe = _table(folder / RECIPE, _toml, problems)
    if not isinstance(recipe.get("method"), dict):
        problems.append(f"{folder / RECIPE} names no method: this run is left out")
        return RunFiles(folder, {}, [], {}, tuple(problems))
    result = _table(folder / RESULT, json.loads, problems) if (folder / RESULT).exists() else {}
    rounds, broken = _lines(folder / ROUNDS)
    return RunFiles(
        folder, recipe, _once(rounds, broken, folder / ROUNDS), result, (*problems, *broken)
    )


def _table(path: Path, parse: Callable[[str], Any], problems: list[str]) -> dict[str, Any]:
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path} cannot be read")
        return {}
    return value


def _once(lines: list[Line], broken: list[str], path: Path) -> list[Line]:
    """Return each round once, in order.

    Of a round that stands there twice the later line counts.
    """
    by_round = {line["round"]: line for line in lines}
    if len(by_round) < len(lines):
        broken.append(
            f"{path}: {len(lines) - len(by_round)} rounds stand there twice; the later lines count"
        )
    return (
        lines if len(by_round) == len(lines) else [by_round[number] for number in sorted(by_round)]
    )


def _toml(text: str) -> dict[str, Any]:
    """Read a recipe.

    Of many that differ in nothing but the seed, its first line, the rest is read once.
    """
    first, _, rest = text.partition("\n")
    if not first.startswith("seed = "):
        return tomllib.loads(text)
    return {"seed": int(first.removeprefix("seed = ")), **_parsed(rest)}


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _no_number(key: str, value: object) -> bool:
    return (isinstance(value, str) and key != "split") or (
        isinstance(value, float) and value in NOT_FINITE
    )


def _refuse(constant: str) -> float:
    raise ValueError(constant)  # NaN, Infinity: no JSON


def _lines(path: Path) -> tuple[list[Line], list[str]]:
    """Read a file of lines.

    Those that cannot be read are named and skipped, a last one still being written is not.
    """
    if not path.exists():
        return [], []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines: list[Line] = []
    bad = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text, parse_constant=_refuse)
            sound = isinstance(line, dict) and isinstance(line.get("round"), int)
            sound = sound and not any(_no_number(key, value) for key, value in line.items())
        except ValueError:
            sound = False
        if sound:
            lines.append(line)
        elif number < len(texts):
            bad.append(number)
    if not bad:
        return lines, []
    which = f"line {bad[0]}" if len(bad) == 1 else f"{len(bad)} lines, the first of them {bad[0]},"
    return lines, [f"{path}: {which} cannot be read and left out, also of the bytes counted"]
