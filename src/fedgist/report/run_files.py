"""Run directories as values: read from files alone, so that a run may still be going on."""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.core.metrics import Metric
from fedgist.errors import ReportError
from fedgist.federation.columns import is_of_server, of_all, over_clients, read_described
from fedgist.federation.record import (
    CLIENTS,
    METRICS_FILE,
    PARTITION,
    RECIPE,
    RESULT,
    ROUNDS,
    Line,
    is_over,
)

NOT_FINITE = (math.inf, -math.inf)
DEEPEST = 4  # folders below the one named in which runs are looked for: of seeds, sweeps, tables


@dataclass(frozen=True)
class RunFiles:
    """One run directory, with the rounds that are done so far."""

    folder: Path
    recipe: dict[str, Any]
    rounds: list[Line]
    result: dict[str, Any]
    problems: tuple[str, ...] = ()  # sentences about what could not be read

    @property
    def name(self) -> str:
        """The name of the method."""
        method: str = self.recipe.get("method", {}).get("name", self.folder.name)
        return method

    @property
    def seed(self) -> int:
        """The seed of all the run's randomness."""
        seed: int = self.recipe.get("seed", 0)
        return seed

    @functools.cached_property
    def clients(self) -> list[Line]:
        """A line for each client and evaluation; read on first use, as the file may be long."""
        return _lines(self.folder / CLIENTS)[0]

    @property
    def done(self) -> int:
        """The number of the last round done, or 0."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def planned(self) -> int:
        """The number of rounds that the recipe asks for."""
        planned: int = self.recipe.get("train", {}).get("num_rounds", self.done)
        return planned

    @property
    def finished(self) -> bool:
        """Whether all planned rounds are done, or the run stopped early."""
        return bool(self.rounds) and is_over(self.planned, self.done, self.result)

    @property
    def kept(self) -> int | None:
        """The round whose models were kept, where that need not be the last one."""
        kept = self.result.get("kept_round")
        return kept if isinstance(kept, int) and self.finished else None

    @functools.cached_property
    def split(self) -> dict[str, Any] | None:
        """The names of ``classes``, and for each client its ``train`` rows of every class.

        None if the file is missing or cannot be used.
        """
        table = _table(self.folder / PARTITION, json.loads, [])
        counts, classes = table.get("train"), table.get("classes")
        if not (isinstance(classes, list) and isinstance(counts, list) and counts):
            return None
        sound = all(isinstance(row, list) and len(row) == len(classes) for row in counts)
        return table if sound else None

    @functools.cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics of the run's objective, as it describes them; the known ones without."""
        return read_described(_table(self.folder / METRICS_FILE, json.loads, []))

    @functools.cached_property
    def main(self) -> str:
        """The column of the objective's first metric: over clients, or of the one global model."""
        described = _table(self.folder / METRICS_FILE, json.loads, [])
        first = next(iter(described), "accuracy")
        columns = [over_clients("client", first), of_all(first)]
        of_models = (c for c in (self.rounds[-1] if self.rounds else {}) if is_of_server(c, first))
        columns += of_models
        return next((column for column in columns if self.last(column) is not None), columns[0])

    def last(self, key: str) -> float | None:
        """Return the last value of a column up to the round kept, or None if it has none."""
        rounds, values = self.column(key)
        pairs = zip(rounds, values, strict=True)
        return next((v for r, v in reversed([*pairs]) if self.kept is None or r <= self.kept), None)

    def total(self, key: str) -> int:
        """Return the sum of a column."""
        return sum(line.get(key) or 0 for line in self.rounds)

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Return the rounds in which a column has a value, and those values."""
        pairs = [(line["round"], line[key]) for line in self.rounds if line.get(key) is not None]
        return [r for r, _ in pairs], [v for _, v in pairs]

    def sent(self) -> dict[int, tuple[int, int]]:
        """Return for each round the bytes sent up and down from the start to its end."""
        totals, up, down = {}, 0, 0
        for line in self.rounds:
            up += line.get("comm/up_bytes") or 0
            down += line.get("comm/down_bytes") or 0
            totals[int(line["round"])] = up, down
        return totals


def find(folders: Iterable[Path]) -> list[RunFiles]:
    """Return the runs that these folders are or hold, such as the seeds of a sweep; each once.

    Raises
    ------
    ReportError
        If a folder holds no run.
    """
    runs: dict[Path, RunFiles] = {}
    for folder in folders:
        run_folders = list(_run_folders(folder, DEEPEST))
        if not run_folders:
            why = ": it is a file" if folder.exists() else ": there is no such folder"
            msg = f"{folder} holds no run{'' if folder.is_dir() else why}"
            raise ReportError(msg)
        runs |= {path.resolve(): _read(path) for path in run_folders if path.resolve() not in runs}
    return list(runs.values())


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / RECIPE).exists():
        yield folder
    elif depth and folder.is_dir():
        for child in sorted((p for p in folder.iterdir() if p.is_dir()), key=_natural):
            yield from _run_folders(child, depth - 1)


def _natural(path: Path) -> tuple[str, int, str]:
    """Sort seed-10 after seed-9."""
    stem, _, number = path.name.rpartition("-")
    return (stem, int(number), path.name) if number.isdigit() else (path.name, -1, "")


def _read(folder: Path) -> RunFiles:
    """Read a run, and name what cannot be read; a run without a usable recipe is left empty."""
    problems: list[str] = []
    recipe = _table(folder / RECIPE, _toml, problems)
    if not isinstance(recipe.get("method"), dict):
        problems.append(f"{folder / RECIPE} names no method: this run is left out")
        return RunFiles(folder, {}, [], {}, tuple(problems))
    result = _table(folder / RESULT, json.loads, problems) if (folder / RESULT).exists() else {}
    lines, line_problems = _lines(folder / ROUNDS)
    rounds, repeat_problems = _each_round_once(lines, folder / ROUNDS)
    return RunFiles(folder, recipe, rounds, result, (*problems, *line_problems, *repeat_problems))


def _table(path: Path, parse: Callable[[str], Any], problems: list[str]) -> dict[str, Any]:
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path} cannot be read")
        return {}
    return value


def _each_round_once(lines: list[Line], path: Path) -> tuple[list[Line], list[str]]:
    """Return one line for each round, in order, and what is wrong: the later of two lines counts.

    Rounds written once are left in the order of the file.
    """
    by_round = {line["round"]: line for line in lines}
    repeats = len(lines) - len(by_round)
    if not repeats:
        return lines, []
    problem = f"{path}: {repeats} round{'s' if repeats > 1 else ''} written twice; the later counts"
    return [by_round[number] for number in sorted(by_round)], [problem]


def _toml(text: str) -> dict[str, Any]:
    """Read a recipe; what follows the seed's line is parsed once for all seeds of a setting."""
    first, _, rest = text.partition("\n")
    if not first.startswith("seed = "):
        return tomllib.loads(text)
    return {"seed": int(first.removeprefix("seed = ")), **_parsed_once(rest)}


@functools.lru_cache(maxsize=256)
def _parsed_once(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _not_a_number(key: str, value: object) -> bool:
    return (isinstance(value, str) and key != "split") or (
        isinstance(value, float) and value in NOT_FINITE
    )


def _refuse(constant: str) -> float:
    raise ValueError(constant)  # NaN and Infinity are not JSON


def _lines(path: Path) -> tuple[list[Line], list[str]]:
    """Read a file of JSON lines; return them, and a sentence about those that cannot be read.

    A last line without its end is still being written: it is skipped without a word.
    """
    if not path.exists():
        return [], []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines: list[Line] = []
    bad_numbers = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text, parse_constant=_refuse)
            sound = isinstance(line, dict) and isinstance(line.get("round"), int)
            sound = sound and not any(_not_a_number(key, value) for key, value in line.items())
        except ValueError:
            sound = False
        if sound:
            lines.append(line)
        elif number < len(texts):
            bad_numbers.append(number)
    if not bad_numbers:
        return lines, []
    count, first = len(bad_numbers), bad_numbers[0]
    if count == 1:
        what = f"line {first} cannot be read: it is left out, and its bytes are not counted"
    else:
        what = f"{count} lines (first: {first}) cannot be read: they are left out, and their bytes "
        what += "are not counted"
    return lines, [f"{path}: {what}"]
