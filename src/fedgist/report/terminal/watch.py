"""State of runs in progress, one line per run, read only from their files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fedgist.report.formatting import Sheet, bytes_text, duration, score_text, seconds_left
from fedgist.report.tables.mean_counts import marked, part_of_run
from fedgist.runs.files.columns import DOWN_BYTES, UP_BYTES, measured, over_clients
from fedgist.runs.files.record import ROUNDS
from fedgist.runs.files.run_directory import LOCK, is_held
from fedgist.runs.finished.finished_run import FinishedRun

BLOCKS = "▁▂▃▄▅▆▇█"
SILENT = 5  # a run is silent after this multiple of its longest round without a new one
RUNNING, STOPPED, FINISHED = "running", "stopped", "finished"
LOCKED_S = 5.0  # a run without a lock is called stopped only after so many seconds of silence
LEAST_S = 60.0  # smallest number of seconds before a run is called silent
AHEAD_S = 60.0  # clocks of machines with a shared disk differ by less


def state(run: FinishedRun, now: float | None = None) -> str:
    """Return "running", "silent for" the time since the last round, "stopped", or "finished".

    A run is stopped if no process holds its lock. A disk may not support locks, so a run that is
    still writing is running in any case. A time in the future says nothing: the clock was set back,
    or the files are copies.
    """
    if run.finished or run.result.get("status") == "finished":
        return FINISHED
    longest = max((line.get("time/round_s") or 0.0 for line in run.rounds), default=0.0)
    quiet = (time.time() if now is None else now) - _last_change(run.folder)
    silent = quiet > max(LOCKED_S, 2 * longest) or quiet < -AHEAD_S
    if silent and (run.folder / LOCK).exists() and not is_held(run.folder):
        return STOPPED
    patience = max(LEAST_S, SILENT * longest)
    return RUNNING if quiet < patience else f"silent for {duration(quiet)}"


def in_order(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs with those first that are running, then stopped ones, then finished ones."""
    states = {id(run): state(run) for run in runs}
    later = {STOPPED: 1, FINISHED: 2}
    return sorted(runs, key=lambda run: later.get(states[id(run)], 0))


def is_over(run: FinishedRun) -> bool:
    """Return whether no more rounds will come unless someone resumes the run."""
    return state(run) in {STOPPED, FINISHED}


def left(run: FinishedRun) -> float | None:
    """Return the remaining seconds, estimated from the last ten rounds, or None."""
    seconds = [line["time/round_s"] for line in run.rounds if line.get("time/round_s")]
    return None if run.finished else seconds_left(seconds, run.planned - run.done)


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Return a sparkline of evenly picked values, including the last one."""
    if not values:
        return ""
    count = min(width, len(values))
    picks = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    low, high = min(picks), max(picks)
    return "".join(BLOCKS[round((v - low) / (high - low) * 7) if high > low else 0] for v in picks)


def overview(runs: Sequence[FinishedRun]) -> Sheet:
    """Return a table with one row per run: rounds, score, bytes sent, time left."""
    titles = {title_of(run) for run in runs}
    title = titles.pop() if len(titles) == 1 else "score"
    return Sheet(
        "", ("run", title, "", "round", "", "sent", "left"), tuple(_state(run) for run in runs)
    )


def title_of(run: FinishedRun) -> str:
    """Return the name of the run's main metric."""
    return measured(run.main, run.metrics).title.lower()


def _state(run: FinishedRun) -> tuple[str, ...]:
    status, seconds = state(run), left(run)
    time_left = status if status != RUNNING else "-" if seconds is None else duration(seconds)
    return (
        f"{run.called} {run.seed}  {run.folder}",
        score(run),
        sparkline(run.column(shown_column(run))[1]),
        f"{run.done}/{run.planned}",
        bar(run.done / max(1, run.planned)),
        bytes_text(run.total(UP_BYTES) + run.total(DOWN_BYTES)),
        time_left,
    )


def bar(share: float, width: int = 12) -> str:
    """Return a progress bar with the given share filled.

    >>> bar(0.5, 4)
    '━━──'
    """
    full = round(width * min(1.0, max(0.0, share)))
    return "━" * full + "─" * (width - full)


def lines(runs: Sequence[FinishedRun]) -> list[str]:
    """Return one line of plain text per run, for a pipe."""
    return [
        f"{run.folder} round {run.done}/{run.planned} {title_of(run)} {score(run)} {_progress(run)}"
        + (f" {run.mark}" if run.mark else "")
        for run in runs
    ]


def _progress(run: FinishedRun) -> str:
    """Return the state, and the time left of a run that is running."""
    status, seconds = state(run), left(run)
    return status if status != RUNNING or seconds is None else f"{status}, {duration(seconds)} left"


def shown_column(run: FinishedRun) -> str:
    """Return the column to show: the score on validation rows if any are held out.

    People who watch a run make decisions, and test rows must not be used for decisions.
    """
    column = over_clients("validation", run.first)
    return run.main if run.last(column) is None else column


def score(run: FinishedRun) -> str:
    """Return the last score in the column to show; a score on validation rows says so."""
    column = shown_column(run)
    text = score_text(run.last(column), measured(column, run.metrics))
    text = marked(text, part_of_run(run, column))
    return text if column == run.main else f"{text} (validation)"


def _last_change(folder: Path) -> float:
    times = [
        path.stat().st_mtime for path in (folder / ROUNDS, folder / "recipe.toml") if path.exists()
    ]
    return max(times, default=0.0)
