"""The record of a run: a directory of small files, or memory alone.

``rounds.jsonl`` has a line per round, ``clients.jsonl`` a line per client and evaluation,
``result.json`` how the run ended. Lines are appended and flushed; after a kill, the files are cut
back to the checkpoint's round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from fedgist.federation import atomic_files as files

ROUNDS, CLIENTS, RESULT, RECIPE = "rounds.jsonl", "clients.jsonl", "result.json", "recipe.toml"
PARTITION, METRICS_FILE = "partition.json", "metrics.json"
FEATURES, STATE = "features.safetensors", Path("checkpoint") / "state.safetensors"
Line = dict[str, Any]


class Record:
    """The lines of a run, in memory and, if it has a folder, in files."""

    def __init__(self, folder: Path | None, last_round: int = 0) -> None:
        """Go on after ``last_round``: lines of later rounds are dropped, with -1 all lines."""
        self.folder = folder
        self.rounds: list[Line] = []
        self.clients: list[Line] = []
        if folder:
            self.rounds, self.clients = (
                _cut(folder / name, last_round) for name in (ROUNDS, CLIENTS)
            )

    def add(self, line: Line, clients: Iterable[Line] = ()) -> None:
        """Append the line of a round, and the clients' lines of its evaluation."""
        client_lines = list(clients)
        self.rounds.append(line)
        self.clients += client_lines
        if self.folder:
            _append(self.folder / CLIENTS, client_lines)
            _append(self.folder / ROUNDS, [line])

    def write(self, name: str, text: str) -> None:
        """Write another file of the run."""
        if self.folder:
            files.write(self.folder / name, text)


def read_lines(path: Path) -> list[Line]:
    """Read a file of lines, up to the first that is not whole."""
    lines: list[Line] = []
    if path.exists():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines


def read_result(folder: Path) -> dict[str, object]:
    """Return how the run in a folder ended; nothing if it has not, or the file is not whole."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def is_over(planned: int, done: int, result: Mapping[str, object]) -> bool:
    """Return whether a run has no round left to do, given its result: it may have stopped early."""
    early = result.get("stopped_early") is True and result.get("rounds") == done
    return done >= planned or early


def totals(rounds: Iterable[Line]) -> dict[str, int]:
    """Return the payload bytes sent up, down and both ways in all rounds."""
    lines = list(rounds)
    up, down = (sum(line.get(f"comm/{way}_bytes", 0) for line in lines) for way in ("up", "down"))
    return {"up_bytes": up, "down_bytes": down, "total_bytes": up + down}


def to_json(value: Any) -> str:
    """Return one line of JSON; numbers that are not finite become null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def summary(
    rounds: list[Line],
    key: str,
    better: Literal["higher", "lower"] = "higher",
    kept: int | None = None,
) -> dict[str, Any]:
    """Return the final value of a column, its best, and its mean over the last ten lines.

    The final value is the result, that of the last round or of the round ``kept``; the best one
    never is.
    """
    values = [(line["round"], line[key]) for line in rounds if line.get(key) is not None]
    if not values:
        return {}
    best = (max if better == "higher" else min)(values, key=lambda pair: pair[1])
    last = [v for _, v in values[-10:]]
    final = next((pair for pair in values if pair[0] == kept), values[-1])
    return {
        "final": final[1],
        "final_round": final[0],
        "best": best[1],
        "best_round": best[0],
        "last10_mean": math.fsum(last) / len(last),
        "last10_count": len(last),
    }


def _cut(path: Path, last_round: int) -> list[Line]:
    lines = [line for line in read_lines(path) if line["round"] <= last_round]
    if path.exists():
        files.write(path, "".join(to_json(line) + "\n" for line in lines))
    return lines


def _append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with files.room_for(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(to_json(line) + "\n" for line in lines))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
