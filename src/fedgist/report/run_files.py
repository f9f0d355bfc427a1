"""Read runs from run directories or archives, also while the runs are in progress."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedgist.core.metrics import Metric
from fedgist.errors import DataError, ReportError, SealError, listed
from fedgist.report.checked_files import (
    MOST_PROBLEMS,
    CheckedLines,
    read_checked,
    read_checked_table,
)
from fedgist.report.file_checks import (
    fault_of_client,
    fault_of_recipe,
    fault_of_result,
    fault_of_round,
    fault_of_split,
)
from fedgist.runs.archived_run import is_archived, read_csv
from fedgist.runs.columns import (
    is_of_server,
    models_of,
    of_all,
    over_clients,
    over_models,
    read_described,
)
from fedgist.runs.corrections import computed_by, lacking
from fedgist.runs.record import (
    CLIENTS,
    METRICS_FILE,
    PARTITION,
    RECIPE,
    RESULT,
    ROUNDS,
    Line,
    is_over,
)
from fedgist.runs.run_seals import NOT_SEALED, Seal, seal_of

DEEPEST = 4  # depth of the search for runs below a folder: seeds, sweeps, tables


@dataclass(frozen=True)
class RunFiles:
    """A run read from its directory, with the rounds done so far, or from its archived file."""

    folder: Path
    recipe: dict[str, Any]
    rounds: list[Line]
    result: dict[str, Any]
    problems: tuple[str, ...] = ()  # sentences about unreadable content
    described: Mapping[str, object] | None = None  # its metrics, if no file describes them
    seal: Seal = NOT_SEALED
    trusted: bool = False  # show the run although its files do not match its seal

    @property
    def usable(self) -> bool:
        """Whether the run is shown: it has a recipe, and its seal is unbroken or ignored."""
        return bool(self.recipe) and (self.trusted or not self.seal.is_broken)

    @property
    def mark(self) -> str:
        """A mark for output about a run whose files do not match its seal."""
        return "(seal broken)" if self.seal.is_broken else ""

    @property
    def called(self) -> str:
        """Name of the method, followed by the run's mark."""
        return f"{self.name} {self.mark}".rstrip()

    @property
    def name(self) -> str:
        """Name of the method."""
        method: str = self.recipe.get("method", {}).get("name", self.folder.name)
        return method

    @property
    def seed(self) -> int:
        """Seed of all the run's random numbers."""
        seed: int = self.recipe.get("seed", 0)
        return seed

    @functools.cached_property
    def clients(self) -> CheckedLines:
        """Lines for each client and evaluation, read at first use because the file may be long."""
        return read_checked(self.folder / CLIENTS, fault_of_client)

    @property
    def public_noise(self) -> int | None:
        """Seed of the run's noise, which anyone can subtract; None: no noise, or the system's."""
        privacy = self.recipe.get("privacy", {})
        simulated = privacy.get("unit", "none") != "none" and privacy.get("noise", "seed") == "seed"
        return self.seed if simulated else None

    @property
    def done(self) -> int:
        """Number of the last completed round, or 0."""
        return int(self.rounds[-1]["round"]) if self.rounds else 0

    @property
    def planned(self) -> int:
        """Number of rounds in the recipe."""
        planned: int = self.recipe.get("train", {}).get("num_rounds", self.done)
        return planned

    @property
    def before(self) -> str:
        """The first correction that the run lacks, as "before correction 2", or an empty text."""
        missed = lacking(self.recipe, computed_by(self.result))
        return f"before correction {missed[0].number}" if missed else ""

    @property
    def finished(self) -> bool:
        """Whether all planned rounds are done, or the run stopped early."""
        return bool(self.rounds) and is_over(self.planned, self.done, self.result)

    @property
    def kept(self) -> int | None:
        """The round whose models were kept, if the best round is kept instead of the last one."""
        kept = self.result.get("kept_round")
        return kept if isinstance(kept, int) and self.finished else None

    @functools.cached_property
    def split(self) -> dict[str, Any] | None:
        """Names of ``classes`` and ``clients``, and ``train`` rows by client and class.

        None if the file is missing or unusable.
        """
        return self._split[0] or None

    @property
    def split_problems(self) -> list[str]:
        """Problems of the partition's file, if the file exists."""
        return self._split[1] if (self.folder / PARTITION).exists() else []

    @functools.cached_property
    def _split(self) -> tuple[dict[str, Any], list[str]]:
        problems: list[str] = []
        return read_checked_table(
            self.folder / PARTITION, json.loads, problems, fault_of_split
        ), problems

    @functools.cached_property
    def metrics(self) -> dict[str, Metric]:
        """Metrics described by the run's objective; without a description, the built-in ones."""
        return read_described(self._described)

    @property
    def _described(self) -> Mapping[str, object]:
        if self.described is not None:
            return self.described
        return read_checked_table(self.folder / METRICS_FILE, json.loads, [])

    @property
    def first(self) -> str:
        """Name of the objective's first metric."""
        return next(iter(self._described), "accuracy")

    @functools.cached_property
    def main(self) -> str:
        """Column of the first metric: the mean over clients, or the global model's score."""
        return self.column_of(self.first)

    def column_of(self, metric: str) -> str:
        """Return the column of a metric: over clients, or else of the server's models."""
        columns = [over_clients("client", metric), of_all(metric), over_models(metric)]
        last = self.rounds[-1] if self.rounds else {}
        columns += (column for column in last if is_of_server(column, metric))
        return next((column for column in columns if self.last(column) is not None), columns[0])

    def models(self, metric: str) -> list[str]:
        """Return the names of the server's models that have this metric on all test rows."""
        return models_of({name: None for line in self.rounds for name in line}, metric)

    def last(self, key: str) -> float | None:
        """Return the last value of a column up to the kept round, or None if it has no value."""
        rounds, values = self.column(key)
        pairs = zip(rounds, values, strict=True)
        return next((v for r, v in reversed([*pairs]) if self.kept is None or r <= self.kept), None)

    def total(self, key: str) -> int:
        """Return the sum of a column."""
        return sum(line.get(key) or 0 for line in self.rounds)

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Return the rounds with a value in a column, and the values."""
        pairs = [(line["round"], line[key]) for line in self.rounds if line.get(key) is not None]
        return [r for r, _ in pairs], [v for _, v in pairs]

    def sent(self) -> dict[int, tuple[int, int]]:
        """Return the cumulative bytes sent up and down by round."""
        totals, up, down = {}, 0, 0
        for line in self.rounds:
            up += line.get("comm/up_bytes") or 0
            down += line.get("comm/down_bytes") or 0
            totals[int(line["round"])] = up, down
        return totals


def find(folders: Iterable[Path], *, trust: bool = False) -> list[RunFiles]:
    """Return the runs in these folders and below them, such as a sweep's seeds, each once.

    ``trust`` also accepts runs whose files do not match their seal.
    """
    runs: dict[Path, RunFiles] = {}
    for folder in folders:
        run_folders = list(_run_folders(folder, DEEPEST))
        if not run_folders:
            why = ": it is a file" if folder.exists() else ": there is no such folder"
            raise ReportError(f"{folder} holds no run{'' if folder.is_dir() else why}")
        runs |= {path.resolve(): _read(path) for path in run_folders if path.resolve() not in runs}
    return [replace(run, trusted=trust) for run in runs.values()]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_archived(folder) or (folder / RECIPE).exists():
        yield folder
    elif depth and folder.is_dir():
        inside = (p for p in folder.iterdir() if p.is_dir() or is_archived(p))
        for child in sorted(inside, key=_natural):
            yield from _run_folders(child, depth - 1)


def _natural(path: Path) -> tuple[str, int, str]:
    """Sort seed-10 after seed-9."""
    stem, _, number = path.name.removesuffix(".csv").rpartition("-")
    return (stem, int(number), path.name) if number.isdigit() else (path.name, -1, "")


def usable_runs(runs: Sequence[RunFiles]) -> tuple[list[RunFiles], list[str]]:
    """Return the usable runs, and a sentence about each problem; raise ReportError without runs."""
    problems = problems_of(runs)
    usable = [run for run in runs if run.usable]
    if not usable:
        kind = SealError if any(run.seal.is_broken for run in runs) else ReportError
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise kind(problems[0] + more if problems else "there is no run")
    return usable, problems


def problems_of(runs: Iterable[RunFiles]) -> list[str]:
    """Return a sentence about each unusable part of the runs, or broken seal."""
    return [problem for run in runs for problem in (*_misfits(run), *run.problems)]


def _misfits(run: RunFiles) -> list[str]:
    if run.seal.behind:
        return [f"{run.folder}: {run.seal.behind}"]
    if not run.seal.problems:
        return []
    faults, more = run.seal.problems[:MOST_PROBLEMS], len(run.seal.problems) - MOST_PROBLEMS
    text = "; ".join([*faults, *([f"and {more} more"] if more > 0 else [])])
    trust = " (--trust shows it, marked)" if run.recipe else ""
    end = "" if run.usable else f": this run is left out{trust}"
    return [f"{run.folder} does not fit its seal: {text}{end}"]


def not_sealed(runs: Iterable[RunFiles]) -> list[str]:
    """Return one sentence per kind about runs without a seal, or with a sealed table only."""
    why = {
        "not sealed": "an earlier fedgist wrote them, so changes are not noticed",
        "table sealed": "of these archived runs, what is above the table is not checked",
    }
    named = {kind: [run.folder for run in runs if run.seal.state == kind] for kind in why}
    return [
        f"{kind} ({why[kind]}): {listed(folders, 3)}" for kind, folders in named.items() if folders
    ]


def _read(folder: Path) -> RunFiles:
    """Read a run and collect its problems; a run without a usable recipe stays empty."""
    if is_archived(folder):
        return _read_archived(folder)
    problems: list[str] = []
    seal = seal_of(folder)
    recipe = read_checked_table(folder / RECIPE, _toml, problems, fault_of_recipe)
    if not recipe:
        faults = [] if seal.problems else problems
        left_out = tuple(f"{fault}: this run is left out" for fault in faults)
        return RunFiles(folder, {}, [], {}, left_out, seal=seal)
    result = _if_there(folder / RESULT, problems, fault_of_result)
    _if_there(folder / METRICS_FILE, problems)
    lines = read_checked(folder / ROUNDS, fault_of_round)
    rounds, order_problems = _each_round_once(lines.lines, folder / ROUNDS)
    problems += [*lines.problems, *order_problems]
    reported = () if seal.is_broken else tuple(problems)  # the seal's message covers them
    return RunFiles(folder, recipe, rounds, result, reported, seal=seal)


def _if_there(
    path: Path, problems: list[str], fault: Callable[[Mapping[str, object]], str] = lambda _: ""
) -> Line:
    return read_checked_table(path, json.loads, problems, fault) if path.exists() else {}


def _read_archived(path: Path) -> RunFiles:
    try:
        run = read_csv(path)
    except DataError as error:
        left_out = (f"{error}: this run is left out",)
        return RunFiles(path, {}, [], {}, left_out, seal=Seal("broken"))
    checks = ((fault_of_recipe, run.recipe), (fault_of_result, run.result))
    faults = [f"{path} {fault}" for check, value in checks if (fault := check(value))]
    faults += [f"{path} {fault}" for line in run.rounds if (fault := fault_of_round(line))]
    if faults:
        return RunFiles(path, {}, [], {}, (f"{faults[0]}: this run is left out",))
    seal = Seal("sealed" if run.whole else "table sealed")
    recipe, result = dict(run.recipe), dict(run.result)
    return RunFiles(path, recipe, run.rounds, result, described=run.metrics, seal=seal)


def _each_round_once(lines: list[Line], path: Path) -> tuple[list[Line], list[str]]:
    """Return one line per round, in order, and the problems; the later of two lines counts."""
    by_round = {line["round"]: line for line in lines}
    numbers = sorted(by_round)
    problems = []
    if repeats := len(lines) - len(by_round):
        times = "1 round" if repeats == 1 else f"{repeats} rounds"
        problems.append(f"{path}: {times} written twice; the later counts")
    elif [line["round"] for line in lines] != numbers:
        problems.append(f"{path}: its rounds are not in order")
    if lacking := _lacking(numbers):
        problems.append(f"{path}: {lacking}")
    return [by_round[number] for number in numbers], problems


def _lacking(numbers: Sequence[int]) -> str:
    """Return a description of missing rounds between 1 and the last one, or an empty text."""
    done = [number for number in numbers if number > 0]
    count = (done[-1] if done else 0) - len(done)
    first = next((i for i, number in enumerate(done, 1) if number != i), 0)
    if count == 1:
        return f"round {first} is missing; its bytes are not counted"
    missing = f"{count} rounds are missing, the first is round {first}"
    return f"{missing}; their bytes are not counted" if count else ""


def _toml(text: str) -> dict[str, Any]:
    """Parse a recipe; the text after the seed's line is parsed once for all seeds of a setting."""
    first, _, rest = text.partition("\n")
    if not first.startswith("seed = "):
        return tomllib.loads(text)
    return {**tomllib.loads(first), **_parsed_once(rest)}


@functools.lru_cache(maxsize=256)
def _parsed_once(text: str) -> dict[str, Any]:
    return tomllib.loads(text)
