"""The state of runs that are going on, a line each, read from their files alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.progress_bar import ProgressBar
from rich.table import Table

from fedgist.federation.columns import ACCURACY
from fedgist.federation.record import ROUNDS
from fedgist.report.formatting import duration, percent, size
from fedgist.report.run_files import RunFiles
from fedgist.studies.tune import OBJECTIVE

BLOCKS = "▁▂▃▄▅▆▇█"
SILENT = 5  # times the longest round: after so long without a new one a run is called silent
LEAST_S = 60.0  # no run is called silent sooner


def state(run: RunFiles, now: float | None = None) -> str:
    """Return "finished", "running", or "silent for" the time since the last round."""
    if run.finished or run.result.get("status") == "finished":
        return "finished"
    seconds = [line.get("time/round_s") or 0.0 for line in run.rounds]
    patience = max(LEAST_S, SILENT * max(seconds, default=0.0))
    quiet = (time.time() if now is None else now) - _last_change(run.folder)
    return "running" if quiet < patience else f"silent for {duration(quiet)}"


def left(run: RunFiles) -> float | None:
    """Return the seconds left, estimated from the last ten rounds; None if that is impossible."""
    recent = [line["time/round_s"] for line in run.rounds[-10:] if line.get("time/round_s")]
    if run.finished or not recent:
        return None
    return (run.planned - run.done) * float(sum(recent)) / len(recent)


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Return values drawn in blocks, evenly picked, the last value always."""
    if not values:
        return ""
    count = min(width, len(values))
    picks = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    low, high = min(picks), max(picks)
    return "".join(BLOCKS[round((v - low) / (high - low) * 7) if high > low else 0] for v in picks)


def overview(runs: Sequence[RunFiles]) -> Table:
    """Return a table with a line for each run: rounds, accuracy, bytes sent, time left."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "", "round", "accuracy", "", "sent", "left"):
        table.add_column(
            name, justify="left" if name in {"", "run"} else "right", no_wrap=name != "run"
        )
    for run in runs:
        _, values = run.column(_metric(run))
        status = state(run)
        seconds = left(run)
        table.add_row(
            f"{run.name} {run.seed}  {run.folder}",
            ProgressBar(run.planned, run.done, width=12),
            f"{run.done}/{run.planned}",
            _accuracy(run),
            sparkline(values),
            size(run.total("comm/up_bytes") + run.total("comm/down_bytes")),
            status if status != "running" else "-" if seconds is None else duration(seconds),
        )
    return table


def lines(runs: Sequence[RunFiles]) -> list[str]:
    """Return a line of plain words for each run, for a pipe."""
    return [
        f"{run.folder} round {run.done}/{run.planned} accuracy {_accuracy(run)} {state(run)}"
        for run in runs
    ]


def _metric(run: RunFiles) -> str:
    """Return the column to show: validation accuracy where rows are held out for it.

    Whoever watches makes decisions, which test rows must not be used for.
    """
    return ACCURACY if run.last(OBJECTIVE) is None else OBJECTIVE


def _accuracy(run: RunFiles) -> str:
    metric = _metric(run)
    return percent(run.last(metric)) + (" (validation)" if metric == OBJECTIVE else "")


def _last_change(folder: Path) -> float:
    times = [
        path.stat().st_mtime for path in (folder / ROUNDS, folder / "recipe.toml") if path.exists()
    ]
    return max(times, default=0.0)
