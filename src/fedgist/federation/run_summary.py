"""What a run writes down before its first round and after its last."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from fedgist.core.objective import LOSS
from fedgist.federation.checkpoint import Checkpoint
from fedgist.federation.record import (
    METRICS_FILE,
    PARTITION,
    RECIPE,
    Record,
    summary,
    to_json,
    totals,
)
from fedgist.federation.round_loop import Federation
from fedgist.federation.world import World, class_counts


def open_record(world: World, folder: Path | None, saved: Checkpoint | None) -> Record:
    """Open the run's record, and write down what is known before round 1."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder, saved.round if saved else -1)
    record.write(RECIPE, world.server.recipe.to_toml())
    record.write(PARTITION, to_json(class_counts(world)) + "\n")
    objective = world.server.task.objective
    described = {m.name: m for m in (*objective.metrics, LOSS)}
    units = {
        n: {"title": m.title, "unit": m.unit, "better": m.better} for n, m in described.items()
    }
    record.write(METRICS_FILE, to_json(units) + "\n")
    return record


def plan_notes(world: World) -> list[str]:
    """Return what is to be said of the plans: models that run client by client."""
    plans = world.server.recipe.engine.plans.items()
    return [f"{name} {plan.note}" for name, plan in plans if plan.note]


def end_of(federation: Federation, record: Record, notes: Sequence[str]) -> dict[str, Any]:
    """Return how a run ended: each of its main numbers, what was sent, and what it depends on."""
    recipe = federation.side.recipe
    main = federation.task.objective.metrics[0]
    columns = (f"eval/client/{main.name}_mean", f"eval/global/{main.name}")
    there = [c for c in columns if any(c in line for line in record.rounds)]
    return {
        "status": "finished",
        "seed": recipe.seed,
        "method": recipe.method.name,
        "rounds": federation.round,
        **{column: summary(record.rounds, column, main.better) for column in there},
        "communication": totals(record.rounds),
        "notes": list(notes),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return what a result depends on."""
    names = ("fedgist", "torch", "numpy")
    return {
        "python": platform.python_version(),
        **{n: metadata.version(n) for n in names},
        "cores": str(os.cpu_count()),
    }
