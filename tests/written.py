"""Run directories written by hand, for tests of what reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgist.federation.server.status import STATUS
from fedgist.recipe.reading import make
from fedgist.runs.files.checkpoint import Binding, Checkpoint, save
from fedgist.runs.files.record import (
    FORMAT,
    FORMAT_KEY,
    LINES,
    RESULT,
    ROUNDS,
    STATE,
    read_bytes_or_empty,
    read_usable_lines,
)
from fedgist.runs.files.seals import DIGESTS, files_in, of_files, sealed

# what the server of a federation writes into the folder of its run
FEDERATION_STATE: dict[str, Any] = {
    "format": 1,
    "run": "a3f1",
    "federation": "sepsis",
    "address": "fed.example.org:8443",
    "round": 13,
    "attempt": 2,
    "waiting_for": "waiting for ulm; round 1 begins with 3 of 3, and 2 are ready",
    "written": 1764062000.5,
    "sites": [
        {
            "name": "berlin",
            "number": 0,
            "state": "ready",
            "since": 1764061990.5,
            "last_round": 12,
            "version": "0.1.0",
            "sent_bytes": 123_000,
            "received_bytes": 456,
            "refusals": 1,
            "note": "policy: at night",
        },
        {"name": "ulm", "state": "absent"},
    ],
}


def write_run(
    folder: Path,
    accuracies: Sequence[float],
    *,
    seed: int = 0,
    method: str = "fedlog",
    planned: int | None = None,
    up: int = 100,
    down: int = 300,
    result: bool = True,
    clients: Sequence[float] = (),
    raw: Mapping[str, Any] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run with these accuracies by round."""
    folder.mkdir(parents=True)
    sections = dict(raw or {})
    sections["train"] = {"num_rounds": planned or max(1, len(accuracies))} | sections.get(
        "train", {}
    )
    sections["method"] = {"name": method} | sections.get("method", {})
    (folder / "recipe.toml").write_text(make({"seed": seed, **sections}).to_toml())
    lines = [
        {
            "round": r,
            "comm/up_bytes": up,
            "comm/down_bytes": down,
            "time/train_s": 0.5,
            "time/round_s": 1.0,
            "eval/client/accuracy_mean": a,
            "eval/client/accuracy_std": 0.1,
            **(columns or {}),
        }
        for r, a in enumerate(accuracies, 1)
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "clients.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "round": len(accuracies),
                    "client": i,
                    "split": "client",
                    "rows": 10,
                    "accuracy": a,
                }
            )
            + "\n"
            for i, a in enumerate(clients)
        )
    )
    if result:
        (folder / "result.json").write_text(
            json.dumps(
                {
                    "status": "finished",
                    "versions": {"method": 1, "arithmetic": 1},
                    "time/total_s": 12.0,
                }
            )
        )
    return sealed_run(folder)


def sealed_run(folder: Path) -> Path:
    """Seal a run's files as they are, by its result or by a checkpoint."""
    blobs = {name: read_bytes_or_empty(folder / name) for name in LINES}
    digests = {name: hashlib.sha256(blob).hexdigest() for name, blob in blobs.items()}
    files = of_files(folder, files_in(folder))
    lines = read_usable_lines(folder / ROUNDS).lines
    done = int(lines[-1]["round"]) if lines else 0
    result = folder / RESULT
    if result.exists():
        table = json.loads(result.read_text())
        table |= {"rounds": done, FORMAT_KEY: FORMAT, DIGESTS: digests | files}
        result.write_text(json.dumps(sealed(table)))
    elif lines:
        (folder / STATE).parent.mkdir(exist_ok=True)
        save(folder, Checkpoint(done, {}, {}, binding=Binding(lines=digests, files=files)))
    return folder


def write_federation(folder: Path, state: object) -> Path:
    """Write the state of a federation into a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATUS).write_text(json.dumps(state))
    return folder


def change_line(folder: Path, number: int, **columns: object) -> None:
    """Change columns of a round's line."""
    path = folder / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[number - 1] |= columns
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sealed_run(folder)
