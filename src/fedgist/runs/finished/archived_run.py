"""A finished run as one small CSV file: its rounds below a header with its recipe and its result.

Lines above the table begin with ``#``. They are TOML: a digest of all the rest, so that a change
is noticed, the command, the recipe, how the run ended, and its metrics. Numbers have six digits.
What each client scored, times of single rounds and metrics beside the objective's first one and a
probe's are left out, and so is the folder of a user's code: it has another path on each machine.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

from fedgist.core.objectives.metrics import LOSS, PROBE, PROBES_BESIDE
from fedgist.errors import DataError, first_line, shown
from fedgist.recipe.reading import tables_of
from fedgist.runs.files.columns import (
    COUNT,
    COUNT_OF,
    DIVERGED,
    DOWN_BYTES,
    LEAST,
    MEAN,
    MISSING,
    STD,
    STEPS,
    TRAIN_LOSS,
    UNSCORED,
    UP_BYTES,
    metric_of,
)
from fedgist.runs.files.file_checks import fault_of_recipe, fault_of_result, fault_of_round
from fedgist.runs.files.record import Line, read_bytes_or_empty
from fedgist.runs.files.run_directory import is_of_seed
from fedgist.runs.files.seals import SEALED
from fedgist.runs.finished.finished_run import FinishedRun

KIND, VERSION, ENDING = "fedgist_run", 2, ".csv"
TOTAL_S = "time/total_s"
COLUMNS = {TRAIN_LOSS, UP_BYTES, DOWN_BYTES}
PREFIXES = ("privacy/", "server/")
STATISTICS = (MEAN, STD, LEAST, COUNT_OF)
LISTS = ("refused", "absent", "late", UNSCORED, STEPS, DIVERGED, "events")  # in a round's line
OF_RESULT = (
    *("status", "rounds", "stopped_early", "kept_round", "rounds_raised"),
    *("privacy", "notes", "versions", UNSCORED),
)
SEAL = '# sha256 = "'  # how the first line begins
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


def is_archived(path: Path) -> bool:
    """Return whether a path is, by its name, a file of this format."""
    return path.suffix == ENDING and is_of_seed(path.stem) and path.is_file()


def archived_part(run: FinishedRun, command: str) -> FinishedRun:
    """Return what the archive keeps of the finished run in a folder."""
    names = (*list(run.described)[:1], LOSS.name)
    seconds = max(float(run.result.get(TOTAL_S, 0)), _seconds(run.rounds))
    end = {key: _whole(run.result[key]) for key in OF_RESULT if run.result.get(key) is not None}
    return replace(
        run,
        command=command,
        recipe=_of_any_machine(_with_own_numbers(run.recipe)),
        result={**end, TOTAL_S: round(seconds, 1)},
        described={name: run.described[name] for name in names if name in run.described},
        rounds=[_short(line, run.first) for line in run.rounds],
    )


def to_csv(run: FinishedRun) -> str:
    """Return a run as text; :func:`read_csv` is its inverse."""
    events = [
        {"round": line["round"], **{key: line[key] for key in LISTS if key in line}}
        for line in run.rounds
        if any(key in line for key in LISTS)
    ]
    inside = [key for line in run.rounds for key in line if key not in {"round", *LISTS}]
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
        "metrics": run.described,
        "recipe": run.recipe,
    }
    lines = tomli_w.dumps(head).removesuffix("\n").split("\n")
    text = "".join(f"# {line}\n" if line else "#\n" for line in lines) + buffer.getvalue()
    return f'{SEAL}{_digest(text)}"\n{text}'


def read_csv(path: Path) -> FinishedRun:
    """Read a file that :func:`to_csv` wrote; raise DataError if anything in it is unusable."""
    try:
        return _parse(read_bytes_or_empty(path).decode().replace("\r\n", "\n"), path)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be used as an archived run: {first_line(error)}") from error


def _parse(text: str, path: Path) -> FinishedRun:
    above = re.match(r"(#[^\n]*\n)*", text)
    length = above.end() if above else 0
    head = tables_of("".join(line[1:] + "\n" for line in text[:length].split("\n")))
    if head.get(KIND) != VERSION:
        raise ValueError(f"it has {KIND} = {shown(head.get(KIND))}, not {VERSION}")
    rest = text.partition("\n")[2]
    if head.get("sha256") != _digest(rest) or not text.startswith(SEAL):
        raise ValueError("it was changed, or is not whole (sha256)")
    return FinishedRun(
        path,
        _table(head, "recipe", fault_of_recipe),
        _with_events(list(_rounds(text[length:])), head.get("events", [])),
        _table(head, "result", fault_of_result),
        _table(head, "metrics"),
        str(head.get("command", "")),
        seal=SEALED,
    )


def _table(
    head: Mapping[str, object],
    key: str,
    fault: Callable[[Mapping[str, object]], str] = lambda _: "",
) -> dict[str, object]:
    table = head.get(key)
    problem = fault(table) if isinstance(table, dict) else f"is {shown(table)}, not a table"
    if isinstance(table, dict) and not problem:
        return table
    raise ValueError(f"its {key} {problem}")


def _rounds(table: str) -> Iterator[Line]:
    """Yield a line for each round of a table; cells without a value are left out."""
    columns, *rows = csv.reader(io.StringIO(table, newline=""), strict=True)
    if columns[:1] != ["round"] or len(set(columns)) < len(columns):
        raise ValueError(
            f"its columns are {shown(columns)}: the first must be round, and none be there twice"
        )
    before = -1
    for number, cells in enumerate(rows, 1):
        pairs = zip(columns, cells, strict=True)
        line = {column: _number(cell, column) for column, cell in pairs if cell}
        if problem := fault_of_round(line):
            raise ValueError(f"line {number} of its table {problem}")
        if line["round"] <= before:
            raise ValueError(f"round {line['round']} comes after {before}")
        before = int(line["round"])
        yield line


def _with_events(rounds: list[Line], events: object) -> list[Line]:
    """Return the lines of rounds with the events that the header has of them."""
    by_number = {line["round"]: line for line in rounds}
    for entry in events if isinstance(events, list) else [events]:
        table = entry if isinstance(entry, dict) else {}
        number = table.get("round")
        line = by_number.get(number) if isinstance(number, int) else None
        if line is None:
            raise ValueError(f"it has events of round {shown(number)}, which is not in its table")
        line.update({key: table[key] for key in LISTS if key in table})
        if problem := fault_of_round(line):
            raise ValueError(f"round {number} {problem}")
    return rounds


def _number(cell: str, column: str) -> float:
    if not NUMBER.fullmatch(cell):
        raise ValueError(f"its {column} is {shown(cell)}, not a number")
    return int(cell) if cell.lstrip("-").isdecimal() else float(cell)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
        **{key: _whole(line[key]) for key in LISTS if line.get(key)},
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
    kept = {m + statistic for m in (metric, *probes) for statistic in ("", *STATISTICS)}
    return metric_of(column) in {*kept, f"{LOSS.name}{MEAN}", COUNT, MISSING}


def _with_own_numbers(recipe: dict[str, object]) -> dict[str, object]:
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


def _of_any_machine(recipe: dict[str, object]) -> dict[str, object]:
    """Return a recipe without the path of its user's code, which is this machine's."""
    engine = recipe.get("engine")
    if not isinstance(engine, dict):
        return recipe
    return {**recipe, "engine": {k: v for k, v in engine.items() if k != "code_folder"}}


def _seconds(lines: Sequence[Line]) -> float:
    return sum(float(line.get("time/round_s") or 0) for line in lines)


def _whole(value: object) -> object:
    """Return a value of JSON in TOML's types: what is None is left out."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_whole(inner) for inner in value if inner is not None]
    return value
