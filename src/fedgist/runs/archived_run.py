"""A finished run as one small CSV file: its rounds below a header with its recipe and its result.

Lines above the table begin with ``#``. They are TOML: a digest of all the rest, so that a change
is noticed, the command, the recipe, how the run ended, and its metrics. In files of before there
were seals the digest is of the table alone. Numbers have six digits. What each client scored, times
of single rounds and metrics beside the objective's first one and a probe's are left out.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from fedgist.core.metrics import LOSS, PROBE, PROBES_BESIDE
from fedgist.errors import DataError, first_line, shown
from fedgist.runs.columns import (
    DOWN_BYTES,
    LEAST,
    MEAN,
    STD,
    TRAIN_LOSS,
    UP_BYTES,
    metric_of,
)
from fedgist.runs.record import (
    METRICS_FILE,
    RECIPE,
    ROUNDS,
    Line,
    blob_of,
    read_lines,
    read_result,
)

KIND, VERSION, TABLE_SEALED = "fedgist_run", 2, 1  # the last: of which only the table is sealed
TOTAL_S = "time/total_s"
COLUMNS = {TRAIN_LOSS, UP_BYTES, DOWN_BYTES}
PREFIXES = ("privacy/", "server/")
EVENTS = ("refused", "absent", "late", "events")  # lists in a round's line
OF_RESULT = (
    *("status", "computes", "rounds", "stopped_early", "kept_round", "rounds_raised"),
    *("privacy", "notes", "versions"),
)
SEAL = '# sha256 = "'  # how the first line begins
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
FILE = re.compile(r"seed-\d+\.csv")  # its name


@dataclass(frozen=True)
class ArchivedRun:
    """A finished run: the command that does it, and the files of its directory as values.

    ``whole`` says that all of its file is sealed, and not the table alone.
    """

    command: str
    recipe: Mapping[str, object]
    result: Mapping[str, object]
    metrics: Mapping[str, object]
    rounds: list[Line]
    whole: bool = True


def is_archived(path: Path) -> bool:
    """Return whether a path is, by its name, a file of this format."""
    return FILE.fullmatch(path.name) is not None and path.is_file()


def of_directory(folder: Path, command: str) -> ArchivedRun:
    """Return the finished run in a folder, for its archive file."""
    recipe = tomllib.loads((folder / RECIPE).read_text(encoding="utf-8"))
    metrics = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    kept = {name: metrics[name] for name in (*list(metrics)[:1], LOSS.name) if name in metrics}
    lines, result = read_lines(folder / ROUNDS), read_result(folder)
    seconds = max(float(str(result.get(TOTAL_S, 0))), _seconds(lines))
    end = {key: _whole(result[key]) for key in OF_RESULT if result.get(key) is not None}
    return ArchivedRun(
        command,
        _with_own_numbers(recipe),
        {**end, TOTAL_S: round(seconds, 1)},
        kept,
        [_short(line, next(iter(metrics), "accuracy")) for line in lines],
    )


def to_csv(run: ArchivedRun) -> str:
    """Return a run as text; :func:`read_csv` is its inverse."""
    events = [
        {"round": line["round"], **{key: line[key] for key in EVENTS if key in line}}
        for line in run.rounds
        if any(key in line for key in EVENTS)
    ]
    inside = [key for line in run.rounds for key in line if key not in {"round", *EVENTS}]
    columns = ["round", *dict.fromkeys(inside)]
    buffer = io.StringIO()
    rows = csv.writer(buffer, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows([_text(line.get(key)) for key in columns] for line in run.rounds)
    head = {
        KIND: VERSION,
        "command": run.command,
        **({"events": events} if events else {}),
        "result": run.result,
        "metrics": run.metrics,
        "recipe": run.recipe,
    }
    lines = tomli_w.dumps(head).removesuffix("\n").split("\n")
    text = "".join(f"# {line}\n" if line else "#\n" for line in lines) + buffer.getvalue()
    return f'{SEAL}{_digest(text)}"\n{text}'


def read_csv(path: Path) -> ArchivedRun:
    """Read a file that :func:`to_csv` wrote."""
    try:
        return _parse(blob_of(path).decode().replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be used as an archived run: {first_line(error)}") from error


def _parse(text: str) -> ArchivedRun:
    above = re.match(r"(#[^\n]*\n)*", text)
    length = above.end() if above else 0
    head = tomllib.loads("".join(line[1:] + "\n" for line in text[:length].split("\n")))
    if head.get(KIND) not in {VERSION, TABLE_SEALED}:
        raise ValueError(f"it has {KIND} = {shown(head.get(KIND))}, not {VERSION}")
    whole = head[KIND] == VERSION
    sealed = text.partition("\n")[2] if whole else text[length:]
    if head.get("sha256") != _digest(sealed) or text.startswith(SEAL) != whole:
        raise ValueError(f"{'it' if whole else 'its table'} was changed, or is not whole (sha256)")
    recipe, result, metrics = (_table(head, key) for key in ("recipe", "result", "metrics"))
    rounds = list(_rounds(text[length:]))
    by_number = {line["round"]: line for line in rounds}
    for entry in head.get("events", []):
        number = entry.get("round") if isinstance(entry, dict) else None
        if number not in by_number:
            raise ValueError(f"it has events of round {shown(number)}, which is not in its table")
        by_number[number].update({key: entry[key] for key in EVENTS if key in entry})
    command = str(head.get("command", ""))
    return ArchivedRun(command, recipe, result, metrics, rounds, whole)


def _table(head: Mapping[str, object], key: str) -> Mapping[str, object]:
    table = head.get(key)
    if isinstance(table, dict):
        return table
    raise ValueError(f"it has {key} = {shown(table)}, not a table")


def _rounds(table: str) -> Iterator[Line]:
    """Yield a line for each round of a table; cells without a value are left out."""
    columns, *rows = csv.reader(io.StringIO(table, newline=""), strict=True)
    if columns[:1] != ["round"] or len(set(columns)) < len(columns):
        raise ValueError(
            f"its columns are {shown(columns)}: the first must be round, and none be there twice"
        )
    before = -1
    for cells in rows:
        line: Line = {
            column: _number(cell, column)
            for column, cell in zip(columns, cells, strict=True)
            if cell
        }
        number = line.get("round")
        if not isinstance(number, int) or number <= before:
            raise ValueError(f"round {shown(number)} comes after {before}")
        before = number
        yield line


def _number(cell: str, column: str) -> float:
    if not NUMBER.fullmatch(cell):
        raise ValueError(f"its {column} is {shown(cell)}, not a number")
    return int(cell) if cell.lstrip("-").isdecimal() else float(cell)


def _digest(table: str) -> str:
    return hashlib.sha256(table.encode()).hexdigest()


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(line: Line, metric: str) -> Line:
    """Return the columns of a line that are kept: numbers of six digits, and events."""
    kept = {
        key: float(_text(value)) if isinstance(value, float) else value
        for key, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_kept(key, metric)
    }
    return {
        "round": line["round"],
        **kept,
        **{key: _whole(line[key]) for key in EVENTS if line.get(key)},
    }


def _is_kept(column: str, metric: str) -> bool:
    """Return whether a column is kept: of metrics the objective's first, probes, and the loss.

    >>> _is_kept("eval/client/finetuned_accuracy_std", "accuracy")
    True
    >>> _is_kept("eval/client/probe_min", "accuracy")
    True
    >>> _is_kept("eval/client/auroc_mean", "accuracy")
    False
    """
    if column in COLUMNS or (column.startswith(PREFIXES) and column.isprintable()):
        return True
    is_score = column.startswith("eval/") and column.isprintable()
    if not is_score:
        return False
    probes = (PROBE.name, *PROBES_BESIDE)
    kept = {m + statistic for m in (metric, *probes) for statistic in ("", MEAN, STD, LEAST)}
    return metric_of(column) in {*kept, f"{LOSS.name}{MEAN}"}


def _with_own_numbers(recipe: Mapping[str, object]) -> Mapping[str, object]:
    """Return a recipe whose ``[paper]`` holds only the numbers of the method that ran."""
    paper, method = recipe.get("paper"), recipe.get("method")
    if not isinstance(paper, dict) or not isinstance(method, dict):
        return recipe
    own = {
        key: {name: v for name, v in paper[key].items() if name == method.get("name")}
        for key in ("accuracy", "communication")
        if isinstance(paper.get(key), dict)
    }
    return {**recipe, "paper": {**paper, **own}}


def _seconds(lines: Sequence[Line]) -> float:
    return sum(float(line.get("time/round_s") or 0) for line in lines)


def _whole(value: object) -> object:
    """Return a value of JSON in TOML's types: what is None is left out."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_whole(inner) for inner in value if inner is not None]
    return value
