"""Runs as they go.

A line each, read from their files, so that it serves any engine on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.progress_bar import ProgressBar
from rich.table import Table

from fedgist.federation.record import ROUNDS
from fedgist.report.formatting import duration, percent, size
from fedgist.report.run_files import ACCURACY, RunFiles
from fedgist.studies.tune import OBJECTIVE

BLOCKS = "▁▂▃▄▅▆▇█"
SILENT = 5  # rounds' time without a new one after which a run is called silent
LEAST_S = 60.0


def state(run: RunFiles, now: float | None = None) -> str:
    """Say how a run is doing: finished, running, or silent for too long to be running."""
    if run.finished or run.result.get("status") == "finished":
        return "finished"
    last = _last_sign(run.folder)
    seconds = [line.get("time/round_s") or 0.0 for line in run.rounds]
    patience = max(LEAST_S, SILENT * max(seconds, default=0.0))
    quiet = (time.time() if now is None else now) - last
    return "running" if quiet < patience else f"silent for {duration(quiet)}"


def left(run: RunFiles) -> float | None:
    """Estimate the seconds to go from the last ten rounds; None if there is nothing to go by."""
    recent = [line["time/round_s"] for line in run.rounds[-10:] if line.get("time/round_s")]
    return (
        None if run.finished or not recent else (run.planned - run.done) * sum(recent) / len(recent)
    )


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Draw values in blocks, evenly picked, the last one always."""
    if not values:
        return ""
    count = min(width, len(values))
    some = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    low, high = min(some), max(some)
    return "".join(BLOCKS[round((v - low) / (high - low) * 7) if high > low else 0] for v in some)


def overview(runs: Sequence[RunFiles]) -> Table:
    """Return a line a run: how far, how good, how much sent, how long still."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "", "round", "accuracy", "", "sent", "left"):
        table.add_column(
            name, justify="left" if name in {"", "run"} else "right", no_wrap=name != "run"
        )
    for run in runs:
        _, values = run.column(_metric(run))
        now = state(run)
        rest = left(run)
        table.add_row(
            f"{run.name} {run.seed}  {run.folder}",
            ProgressBar(run.planned, run.done, width=12),
            f"{run.done}/{run.planned}",
            _accuracy(run),
            sparkline(values),
            size(run.total("comm/up_bytes") + run.total("comm/down_bytes")),
            now if now != "running" else "-" if rest is None else duration(rest),
        )
    return table


def lines(runs: Sequence[RunFiles]) -> list[str]:
    """Return the same in plain words, for a pipe."""
    return [
        f"{run.folder} round {run.done}/{run.planned} accuracy {_accuracy(run)} {state(run)}"
        for run in runs
    ]


def _metric(run: RunFiles) -> str:
    """Of a run that holds out validation rows those are shown.

    Who watches decides, and the test is not for that.
    """
    return ACCURACY if run.last(OBJECTIVE) is None else OBJECTIVE


def _accuracy(run: RunFiles) -> str:
    metric = _metric(run)
    return percent(run.last(metric)) + (" (validation)" if metric == OBJECTIVE else "")


def _last_sign(folder: Path) -> float:
    times = [
        path.stat().st_mtime for path in (folder / ROUNDS, folder / "recipe.toml") if path.exists()
    ]
    return max(times, default=0.0)
