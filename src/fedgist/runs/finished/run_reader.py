"""Read finished runs from run folders or archived files. All tables and pictures use this reader.

Runs in progress are read as well. Unusable content is left out and named.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgist.errors import DataError, ReportError, SealError
from fedgist.recipe.reading import tables_of
from fedgist.runs.files.file_checks import fault_of_recipe, fault_of_result
from fedgist.runs.files.record import (
    METRICS_FILE,
    MOST_PROBLEMS,
    RECIPE,
    RESULT,
    ROUNDS,
    Line,
    read_table,
    read_usable_lines,
)
from fedgist.runs.files.seals import Seal, seal_of
from fedgist.runs.finished.archived_run import ENDING, is_archived, read_csv
from fedgist.runs.finished.finished_run import FinishedRun

DEEPEST = 4  # depth of the search for runs below a folder: seeds, sweeps, tables


def read_run(path: Path) -> FinishedRun:
    """Read a run folder or an archived run, and collect its problems.

    A run without a usable recipe stays empty.
    """
    if is_archived(path):
        return _read_archived(path)
    problems: list[str] = []
    seal = seal_of(path)
    recipe = read_table(path / RECIPE, _toml, problems, fault_of_recipe)
    if not recipe:
        faults = [] if seal.problems else problems
        left_out = tuple(f"{fault}: this run is left out" for fault in faults)
        return FinishedRun(path, {}, [], {}, {}, problems=left_out, seal=seal)
    result = _if_there(path / RESULT, problems, fault_of_result)
    described = _if_there(path / METRICS_FILE, problems)
    lines = read_usable_lines(path / ROUNDS)
    rounds, order_problems = _each_round_once(lines.lines, path / ROUNDS)
    problems += [*lines.problems, *order_problems]
    shown = () if seal.is_broken else tuple(problems)  # the seal's message covers them
    return FinishedRun(path, recipe, rounds, result, described, problems=shown, seal=seal)


def _if_there(
    path: Path, problems: list[str], fault: Callable[[Mapping[str, object]], str] = lambda _: ""
) -> Line:
    return read_table(path, json.loads, problems, fault) if path.exists() else {}


def _read_archived(path: Path) -> FinishedRun:
    try:
        return read_csv(path)
    except DataError as error:
        left_out = (f"{error}: this run is left out",)
        return FinishedRun(path, {}, [], {}, {}, problems=left_out, seal=Seal("broken"))


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
        return tables_of(text)
    return {**tables_of(first), **_parsed_once(rest)}


_parsed_once = functools.lru_cache(maxsize=256)(tables_of)


def find(folders: Iterable[Path], *, trust: bool = False) -> list[FinishedRun]:
    """Return the runs in these folders and below them, such as a sweep's seeds, each once.

    ``trust`` also accepts runs whose files do not match their seal.
    """
    runs: dict[Path, FinishedRun] = {}
    for folder in folders:
        run_folders = list(_run_folders(folder, DEEPEST))
        if not run_folders:
            why = ": it is a file" if folder.exists() else ": there is no such folder"
            raise ReportError(f"{folder} holds no run{'' if folder.is_dir() else why}")
        runs |= {
            path.resolve(): read_run(path) for path in run_folders if path.resolve() not in runs
        }
    return [replace(run, trusted=trust) for run in runs.values()]


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_archived(folder) or (folder / RECIPE).exists():
        yield folder
    elif depth and folder.is_dir():
        inside = (p for p in folder.iterdir() if p.is_dir() or is_archived(p))
        for child in sorted(inside, key=natural_order):
            yield from _run_folders(child, depth - 1)


def natural_order(path: Path) -> tuple[list[str | float], str]:
    """Return a key that sorts seed-10 after seed-9, and epsilon=10 after epsilon=5."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", path.name.removesuffix(ENDING))
    return [float(part) if place % 2 else part for place, part in enumerate(parts)], path.name


def readable(runs: Sequence[FinishedRun]) -> tuple[list[FinishedRun], list[str]]:
    """Return the usable runs, and a sentence about each problem; raise ReportError without runs."""
    problems = problems_of(runs)
    usable = [run for run in runs if run.usable]
    if not usable:
        kind = SealError if any(run.seal.is_broken for run in runs) else ReportError
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise kind(problems[0] + more if problems else "there is no run")
    return usable, problems


def problems_of(runs: Iterable[FinishedRun]) -> list[str]:
    """Return a sentence about each unusable part of the runs, or broken seal."""
    return [problem for run in runs for problem in (*_misfits(run), *run.problems)]


def _misfits(run: FinishedRun) -> list[str]:
    if run.seal.behind:
        return [f"{run.folder}: {run.seal.behind}"]
    if not run.seal.problems:
        return []
    faults, more = run.seal.problems[:MOST_PROBLEMS], len(run.seal.problems) - MOST_PROBLEMS
    text = "; ".join([*faults, *([f"and {more} more"] if more > 0 else [])])
    trust = " (--trust shows it, marked)" if run.recipe else ""
    end = "" if run.usable else f": this run is left out{trust}"
    return [f"{run.folder} does not match its seal: {text}{end}"]
