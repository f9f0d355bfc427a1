"""Over how many clients a mean is, if not over all: marks of tables, and sentences of captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedgist.errors import listed
from fedgist.runs.files.columns import UNSCORED, clients_in, ends_lost
from fedgist.runs.files.record import Line
from fedgist.runs.finished.finished_run import FinishedRun

MOST_NAMES = 8


def part_of(line: Line, column: str) -> str:
    """Return over how many clients a line's mean is; an empty text if over all, or not known.

    >>> line = {"eval/client/count": 2, "eval/client/missing": 1}
    >>> part_of(line, "eval/client/accuracy_mean")
    '2 of 3 clients'
    """
    counts = clients_in(line, column)
    if counts is None or counts[0] == counts[1]:
        return ""
    return f"{counts[0]} of {counts[1]} clients"


def line_of(run: FinishedRun, column: str) -> Line:
    """Return the line of a run's result in a column; an empty line if there is none."""
    kept = run.kept
    lines = (line for line in reversed(run.rounds) if kept is None or line["round"] <= kept)
    return next((line for line in lines if line.get(column) is not None), {})


def part_of_run(run: FinishedRun, column: str) -> str:
    """Return over how many clients the result of a run is, if not over all, or that it diverged."""
    if run.kept is None and (number := ends_lost(run.rounds, column)):
        return f"diverged in round {number}"
    return part_of(line_of(run, column), column)


def marked(text: str, part: str) -> str:
    """Return a score or a name with its mark, if it has one.

    >>> marked("78.84 %", "2 of 3 clients"), marked("78.84 %", "")
    ('78.84 % (2 of 3 clients)', '78.84 %')
    """
    return f"{text} ({part})" if part else text


def who_is_missing(run: FinishedRun, column: str) -> str:
    """Return over how many clients a run's result is, and who is missing; empty if over all."""
    line = line_of(run, column)
    part = part_of(line, column)
    if not part:
        return ""
    table = run.result.get(UNSCORED) or line.get(UNSCORED) or []
    names = [f"{entry.get('name', entry['client'])}: {entry.get('reason')}" for entry in table]
    return f"{part} (not {listed(names, MOST_NAMES)})" if names else part


def marked_runs(runs: Sequence[FinishedRun], column: str) -> str:
    """Return the mark of several runs, those of the seeds of a row: that of the first partial one.

    >>> marked_runs([], "eval/client/accuracy_mean")
    ''
    """
    parts = dict.fromkeys(part for run in runs if (part := part_of_run(run, column)))
    return ", ".join(parts)


def sentence(rows: Mapping[str, Sequence[FinishedRun]], column: str) -> str:
    """Return a sentence for a caption on the rows whose means are not over all clients."""
    parts = []
    for label, runs in rows.items():
        whos = dict.fromkeys(who for run in runs if (who := who_is_missing(run, column)))
        parts += [f"{label} over {who}" for who in whos]
    return f"Means over fewer than all clients: {'; '.join(parts)}." if parts else ""
