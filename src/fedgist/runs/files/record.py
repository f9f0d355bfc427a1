"""The record of a run: a directory of small files, or memory alone.

``rounds.jsonl`` has a line per round, ``clients.jsonl`` a line per client and evaluation,
``edges.jsonl`` a line per message from peer to peer, ``result.json`` how the run ended. Lines are
appended, and are on the disk before a checkpoint that relies on them. After a kill, the files
are cut back to the checkpoint's round.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedgist.errors import CheckpointError, DataError, first_line, shown
from fedgist.runs.files import atomic_files as files
from fedgist.runs.files.columns import ends_lost
from fedgist.runs.files.file_checks import (
    fault_of_client,
    fault_of_edge,
    fault_of_round,
    parsed_line,
)

ROUNDS, CLIENTS, RESULT, RECIPE = "rounds.jsonl", "clients.jsonl", "result.json", "recipe.toml"
EDGES = "edges.jsonl"
PARTITION, METRICS_FILE = "partition.json", "metrics.json"
FEATURES, PREDICTIONS = "features.safetensors", "predictions.safetensors"
STATE = Path("checkpoint") / "state.safetensors"
RELEASES = Path("checkpoint/releases.safetensors")  # of a private run with noise of the system
LINES = (ROUNDS, CLIENTS, EDGES)
MOST_PROBLEMS = 5  # number of unusable lines of a file that are named
# the format of a run directory's lines, recipe, checkpoint and result; lines in memory lack it
FORMAT, FORMAT_KEY = 1, "format"
RECIPE_MARK = f"# {FORMAT_KEY} = {FORMAT}\n"  # the end of a run's recipe: to TOML a comment
Line = dict[str, Any]


class Record:
    """The lines of a run, in memory and, if it has a folder, in files."""

    def __init__(
        self, folder: Path | None, last_round: int = -1, digests: Mapping[str, str] | None = None
    ) -> None:
        """Go on after ``last_round``: lines of later rounds are dropped, with -1 all lines."""
        self.folder = folder
        self.rounds: list[Line] = []
        self.clients: list[Line] = []
        self.edges: list[Line] = []
        self._digests = {name: hashlib.sha256() for name in LINES}
        self.files: dict[str, str] = {}  # digests of the other files that were written, by name
        for name, lines in zip(LINES, (self.rounds, self.clients, self.edges), strict=True):
            kept = b""
            if folder and last_round >= 0:
                kept = _kept(folder / name, last_round, (digests or {}).get(name))
            self._digests[name].update(kept)
            lines += [_bare(json.loads(text)) for text in kept.splitlines()]
            if folder and (folder / name).exists():
                files.write(folder / name, kept)

    def add(self, line: Line, clients: Iterable[Line] = (), edges: Iterable[Line] = ()) -> None:
        """Append the line of a round, the clients' lines of its evaluation, and those of edges."""
        client_lines, edge_lines = list(clients), list(edges)
        self.rounds.append(line)
        self.clients += client_lines
        self.edges += edge_lines
        if self.folder:
            self._append(self.folder / CLIENTS, client_lines)
            if edge_lines:  # most runs have no such file
                self._append(self.folder / EDGES, edge_lines)
            self._append(self.folder / ROUNDS, [line])

    def seal(self) -> dict[str, str]:
        """Flush the lines to the disk; return the digest of each file."""
        if self.folder:
            for name in LINES:
                files.sync(self.folder / name)
        return {name: state.hexdigest() for name, state in self._digests.items()}

    def write(self, name: str, text: str) -> None:
        """Write another file of the run."""
        if self.folder:
            files.write(self.folder / name, text)
            self.files[name] = hashlib.sha256(text.encode()).hexdigest()

    def _append(self, path: Path, lines: Iterable[Line]) -> None:
        texts = (to_json({**line, FORMAT_KEY: FORMAT}) for line in lines)
        blob = "".join(f"{text}\n" for text in texts).encode()
        self._digests[path.name].update(blob)
        files.append(path, blob)


def _bare(line: Line) -> Line:
    """Return a line as it is in memory: without the number of its format."""
    line.pop(FORMAT_KEY, None)
    return line


def _kept(path: Path, last_round: int, digest: str | None) -> bytes:
    """Return the bytes of the lines up to a round."""
    kept = lines_up_to(read_bytes_or_empty(path), last_round)
    if digest in {None, hashlib.sha256(kept).hexdigest()}:
        return kept
    raise CheckpointError(
        f"{path} does not match the checkpoint of round {last_round}: {damage(path, last_round)}; "
        "put the file back from a copy, or start the run again with --overwrite"
    )


def lines_up_to(blob: bytes, last_round: int) -> bytes:
    """Return the part of a file of lines that holds those up to a round."""
    whole = [line for line in blob.splitlines(keepends=True) if line.endswith(b"\n")]
    return b"".join(itertools.takewhile(lambda line: _round_of(line) <= last_round, whole))


def damage(path: Path, last_round: int) -> str:
    """Describe what is wrong with lines up to a round whose digest does not match."""
    try:
        lines = read_lines(path)
    except DataError as error:
        return str(error).removeprefix(f"{path} ")
    numbers = [line["round"] for line in lines]
    lacking = [r for r in range(1, last_round + 1) if r not in numbers]
    if lacking and path.name == ROUNDS:
        return f"round {lacking[0]} is missing"
    return "a line was changed, or is missing"


def _round_of(line: Any) -> float:
    """Return the round of a line; one that cannot be read counts among those that are kept."""
    try:
        number = json.loads(line)["round"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return -math.inf
    return number if isinstance(number, int) else -math.inf


@dataclass(frozen=True)
class Lines:
    """The usable lines of a file, and a sentence about each unusable line."""

    lines: list[Line]
    problems: tuple[str, ...] = ()


def read_lines(path: Path) -> list[Line]:
    """Read a file of lines; raise DataError at the first that is unusable or out of order."""
    lines: list[Line] = []
    for number, line, problem in _parsed(path):
        before = lines[-1]["round"] if lines else 0
        back = not problem and line["round"] < before
        if problem or back:
            backwards = f"goes back from round {before} to {line.get('round')}"
            raise DataError(f"{path} line {number} {problem or backwards}")
        lines.append(line)
    return lines


def read_usable_lines(path: Path) -> Lines:
    """Read a file of lines; return the usable ones, and what is wrong with the others."""
    lines, problems = [], []
    try:
        for number, line, problem in _parsed(path):
            if problem:
                problems.append(f"{path} line {number} {problem}: it is left out")
            else:
                lines.append(line)
    except DataError as error:
        return Lines([], (str(error),))
    more = len(problems) - MOST_PROBLEMS
    rest = [f"{path}: {more} more lines cannot be used, and are left out"] if more > 0 else []
    return Lines(lines, (*problems[:MOST_PROBLEMS], *rest))


def _parsed(path: Path) -> Iterator[tuple[int, Line, str]]:
    """Yield the number of each line, its table, and what is wrong with it.

    A last line without a line end is still being written and is skipped.
    """
    fault = {CLIENTS: fault_of_client, EDGES: fault_of_edge}.get(path.name, fault_of_round)
    *texts, _ = read_bytes_or_empty(path).split(b"\n")
    for number, text in enumerate(texts, 1):
        line, problem = parsed_line(text, fault)
        yield number, _bare(line), problem


def read_table(
    path: Path,
    parse: Callable[[str], object],
    problems: list[str],
    fault: Callable[[Mapping[str, object]], str] = lambda _: "",
) -> dict[str, Any]:
    """Return the table in a file; if it is unusable, append the reason to ``problems``."""
    try:
        value = parse(read_bytes_or_empty(path).decode())
    except DataError as error:
        problems.append(str(error))
        return {}
    except (ValueError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {first_line(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path} is {shown(value)}, not a table")
        return {}
    if problem := fault(value):
        problems.append(f"{path} {problem}")
        return {}
    return value


def read_result(folder: Path) -> dict[str, object]:
    """Return the result of the run in a folder; nothing if it has none, or the file is damaged."""
    return read_table(folder / RESULT, json.loads, [])


def is_over(planned: int, done: int, result: Mapping[str, object]) -> bool:
    """Return whether a run is finished, given its result; it may have stopped early."""
    early = result.get("stopped_early") is True and result.get("rounds") == done
    return done >= planned or early


def read_bytes_or_empty(path: Path) -> bytes:
    """Return a file's content; nothing if there is no such file. A pipe or a folder is refused."""
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise DataError(f"{path} cannot be read: it is no file")
    try:
        return path.read_bytes() if path.exists() else b""
    except (OSError, MemoryError) as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}") from error


def is_round(number: object) -> bool:
    """Return whether a number can be a round's: a whole number from 0 on."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def features_of(number: int | str) -> str:
    """Return the name of the file of features as they were after a round."""
    return FEATURES.replace(".", f"-{number}.")


def saved_arrays_in(folder: Path) -> list[str]:
    """Return the names of the files of saved features and predictions in a folder."""
    patterns = (FEATURES, features_of("*"), PREDICTIONS)
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def totals(rounds: Iterable[Line]) -> dict[str, int]:
    """Return the payload bytes sent up, down and both ways in all rounds."""
    lines = list(rounds)
    up, down = (sum(line.get(f"comm/{way}_bytes", 0) for line in lines) for way in ("up", "down"))
    return {"up_bytes": up, "down_bytes": down, "total_bytes": up + down}


def to_json(value: Any) -> str:
    """Return one line of printable JSON; numbers that are not finite become null."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in text)


def summary(
    rounds: list[Line],
    key: str,
    better: Literal["higher", "lower"] = "higher",
    kept: int | None = None,
) -> dict[str, Any]:
    """Return the final value of a column, its best, and its mean over the last ten lines.

    The final value is the result: the last one, or the last one up to the round ``kept``. The best
    value is reported beside it and is never used as the result. A run without a value up to that
    round, or whose models diverged after the last value, has no result.
    """
    values = [(line["round"], line[key]) for line in rounds if line.get(key) is not None]
    up_to = [pair for pair in values if kept is None or pair[0] <= kept]
    if not up_to or (kept is None and ends_lost(rounds, key)):
        return {}
    best = (max if better == "higher" else min)(values, key=lambda pair: pair[1])
    last = [v for _, v in values[-10:]]
    return {
        "final": up_to[-1][1],
        "final_round": up_to[-1][0],
        "best": best[1],
        "best_round": best[0],
        "last10_mean": math.fsum(last) / len(last),
        "last10_count": len(last),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
