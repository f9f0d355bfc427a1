"""Run directories written by hand, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgist.recipe.reading import make
from fedgist.report.federation_state import FEDERATION

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
    columns: Mapping[str, float] | None = None,
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
            json.dumps({"status": "finished", "time/total_s": 12.0})
        )
    return folder


def write_federation(folder: Path, state: object) -> Path:
    """Write the state of a federation into a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FEDERATION).write_text(json.dumps(state))
    return folder


def change_line(folder: Path, number: int, **columns: object) -> None:
    """Change columns of a round's line."""
    path = folder / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[number - 1] |= columns
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
