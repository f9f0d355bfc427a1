"""Read and check the tables and JSON lines of a run's files; unusable content is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.errors import first_line, shown
from fedgist.runs.record import FORMAT_KEY, Line

MOST_PROBLEMS = 5  # number of unusable lines of a file that are named


@dataclass(frozen=True)
class CheckedLines:
    """The usable lines of a file, and a sentence about each unusable line."""

    lines: list[Line]
    problems: tuple[str, ...] = ()


def read_checked_table(
    path: Path,
    parse: Callable[[str], object],
    problems: list[str],
    fault: Callable[[Mapping[str, object]], str] = lambda _: "",
) -> dict[str, Any]:
    """Return the table in a file; if it is unusable, append the reason to ``problems``."""
    try:
        value = parse(blob_of_file(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {first_line(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path} is {shown(value)}, not a table")
        return {}
    if problem := fault(value):
        problems.append(f"{path} {problem}")
        return {}
    return value


def blob_of_file(path: Path) -> bytes:
    """Return a file's content; raise ValueError for a pipe, a device or a folder."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    return path.read_bytes()


def read_checked(path: Path, fault: Callable[[object], str]) -> CheckedLines:
    """Read a file of JSON lines; return the valid lines, and what is wrong with the others.

    A last line without a line end is still being written and is skipped silently.
    """
    if not path.exists():
        return CheckedLines([])
    try:
        *texts, _ = blob_of_file(path).split(b"\n")
    except (OSError, ValueError) as error:
        return CheckedLines([], (f"{path} cannot be read: {first_line(error)}",))
    lines: list[Line] = []
    problems = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text.decode(), parse_constant=_refuse)
            problem = fault(line)
        except (ValueError, RecursionError) as error:
            line, problem = {}, f"is not JSON: {first_line(error)}"
        if isinstance(line, dict):
            line.pop(FORMAT_KEY, None)
        if problem:
            problems.append(f"{path} line {number} {problem}: it is left out")
        else:
            lines.append(line)
    more = len(problems) - MOST_PROBLEMS
    rest = [f"{path}: {more} more lines cannot be used, and are left out"] if more > 0 else []
    return CheckedLines(lines, (*problems[:MOST_PROBLEMS], *rest))


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")
