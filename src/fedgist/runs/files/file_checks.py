"""Validate what the files of a run hold before anything uses it.

Each function returns the first problem, as words that follow the file's name, or an empty text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedgist.errors import first_line, shown
from fedgist.runs.files.columns import DIVERGED, STEPS, UNSCORED, is_confusion, is_count

LARGEST_NUMBER = 1e100  # the largest allowed number: larger ones cannot be averaged or drawn
LARGEST_ROUND = 10**9
# prefixes of columns that are never negative
COUNTED = ("comm/", "time/", "clients/")


@dataclass(frozen=True)
class Kind:
    """A condition on a value, and its description in words."""

    fits: Callable[[Any], bool]
    words: str


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: object, least: float = -LARGEST_NUMBER) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value <= LARGEST_NUMBER  # false for NaN and infinity


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and _is_whole(value.get("client"))


def _is_lost(value: object) -> bool:
    if not (isinstance(value, dict) and isinstance(value.get("reason"), str)):
        return False
    return _is_entry(value) or isinstance(value.get("model"), str)


def _has_steps(value: object) -> bool:
    if not (_is_entry(value) and isinstance(value, dict)):
        return False
    return isinstance(value.get("stage"), str) and COUNTS.fits(value.get("steps"))


def _is_mean(value: object) -> bool:
    return isinstance(value, list) and len(value) in {1, 2} and all(map(_is_number, value))


def _all(fits: Callable[[Any], bool], kind: type = list) -> Callable[[Any], bool]:
    def fit(value: Any) -> bool:
        inside = value.values() if isinstance(value, dict) else value
        return isinstance(value, kind) and all(map(fits, inside))

    return fit


ROUND = Kind(lambda v: _is_whole(v) and 0 <= v <= LARGEST_ROUND, "a whole number from 0 on")
ROUND_OR_NONE = Kind(lambda v: v is None or ROUND.fits(v), ROUND.words)
WHOLE = Kind(_is_whole, "a whole number")
NUMBER = Kind(lambda v: v is None or _is_number(v), "a number")
COUNT = Kind(lambda v: v is None or _is_number(v, 0), "a number from 0 on")
TEXT = Kind(lambda v: isinstance(v, str), "a text")
TEXTS = Kind(_all(TEXT.fits), "a list of texts")
TABLE = Kind(lambda v: isinstance(v, dict), "a table")
ENTRIES = Kind(_all(_is_entry), "a list with a table for each client")
TAKEN = Kind(_all(_has_steps), "a list with a table, a stage and steps for each client")
LOST = Kind(_all(_is_lost), "a list with a table and a reason for each model")
NUMBERS = Kind(_all(_is_number, dict), "a table of numbers")
MEANS = Kind(_all(_is_mean, dict), "a table of means, each with its error or alone")
COUNTS = Kind(_all(ROUND.fits), "a list of whole numbers")

OF_ROUND = {
    "round": ROUND,
    "refused": ENTRIES,
    "absent": ENTRIES,
    "late": ENTRIES,
    UNSCORED: ENTRIES,
    STEPS: TAKEN,
    DIVERGED: LOST,
    "events": TEXTS,
}
OF_CLIENT = {"round": ROUND, "client": ROUND, "split": TEXT, "name": TEXT, "model": TEXT}
OF_EDGE = {"round": ROUND, "bytes": COUNT}
OF_RECIPE = {
    **dict.fromkeys(("method", "train", "data", "evaluate", "paper"), TABLE),
    "seed": WHOLE,
    "method.name": TEXT,
    "train.num_rounds": ROUND,
    "paper.source": TEXT,
    "paper.departs": TEXTS,
    "paper.target_accuracy": NUMBER,
    "paper.accuracy": MEANS,
    "paper.communication": NUMBERS,
}
OF_RESULT = {
    "status": TEXT,
    "rounds": ROUND,
    "kept_round": ROUND_OR_NONE,
    "time/total_s": COUNT,
    "versions": TABLE,
    UNSCORED: ENTRIES,
}


def parsed_line(text: bytes, fault: Callable[[object], str]) -> tuple[dict[str, object], str]:
    """Return the table in a line of JSON, and what is wrong with it."""
    try:
        line = json.loads(text.decode(), parse_constant=_refuse)
        problem = fault(line)
    except (ValueError, RecursionError) as error:
        return {}, f"is not JSON: {first_line(error)}"
    return line if isinstance(line, dict) else {}, problem


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def fault_of_round(line: object) -> str:
    """Return what is wrong with the line of a round, in a run folder or in an archived run."""
    if not isinstance(line, dict):
        return f"is {shown(line)}, not a table"
    columns = {
        key: COUNT if key.startswith(COUNTED) or is_count(key) else NUMBER
        for key in line
        if "/" in key and not is_confusion(key)
    }
    return _fault(line, {**OF_ROUND, **columns}, ["round"])


def fault_of_client(line: object) -> str:
    """Return what is wrong with a line of ``clients.jsonl``."""
    if not isinstance(line, dict):
        return f"is {shown(line)}, not a table"
    return _fault(line, dict.fromkeys(line, NUMBER) | OF_CLIENT, ["round", "client"])


def fault_of_edge(line: object) -> str:
    """Return what is wrong with a line of ``edges.jsonl``."""
    if not isinstance(line, dict):
        return f"is {shown(line)}, not a table"
    return _fault(line, OF_EDGE, ["round"])


def fault_of_recipe(recipe: Mapping[str, object]) -> str:
    """Return what is wrong with the keys of a recipe that reports read."""
    return _fault(recipe, OF_RECIPE, ["method"])


def fault_of_result(result: Mapping[str, object]) -> str:
    """Return what is wrong with the keys of ``result.json`` that reports read."""
    return _fault(result, OF_RESULT, [])


def fault_of_split(split: Mapping[str, object]) -> str:
    """Return what is wrong with ``partition.json``: counts by client and class, and names."""
    counts, classes, names = (split.get(key) for key in ("train", "classes", "clients"))
    if not isinstance(classes, list):
        return f"has classes = {shown(classes)}, not a list"
    if not isinstance(counts, list) or not counts:
        return f"has train = {shown(counts)}, not a list of lists"
    for client, row in enumerate(counts):
        if not COUNTS.fits(row) or len(row) != len(classes):
            return f"has train[{client}] = {shown(row)}, not a count for each class"
    for key, values in (("clients", names), ("models", split.get("models"))):
        if values and (not isinstance(values, list) or len(values) != len(counts)):
            return f"has {key} = {shown(values)}, not a text for each client"
    return ""


def _fault(table: Mapping[str, object], kinds: Mapping[str, Kind], needed: Iterable[str]) -> str:
    """Return the first problem of a table; a dotted key names a key of an inner table."""
    for key in needed:
        if key not in table:
            return f"has no {key}"
    for key, kind in kinds.items():
        outer, _, inner = key.partition(".") if key not in table else (key, "", "")
        inside = table.get(outer) if inner else table
        if not isinstance(inside, Mapping) or (inner or outer) not in inside:
            continue
        value = inside[inner or outer]
        if not kind.fits(value):
            return f"has {key} = {shown(value)}, not {kind.words}"
    return ""
