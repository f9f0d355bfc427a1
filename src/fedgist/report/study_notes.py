"""Notes on a study: facts that its numbers do not show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedgist.report.stats import smallest_p
from fedgist.report.study_rows import Row
from fedgist.runs.finished.finished_run import FinishedRun

SIGNIFICANT = 0.05
FEW_SEEDS = 5  # with fewer seeds an interval is little more than the range of the values


def notes_on(
    rows: Sequence[Row], metric: str, reference: str | None, *, two_sided: bool = False
) -> list[str]:
    """Return one sentence per note: on single rows, on all rows, on pairs of rows."""
    notes = [note for row in rows for note in _notes_on_row(row, metric)]
    few = [len(row.runs) for row in rows if 1 < len(row.runs) < FEW_SEEDS]
    if few:
        notes.append(f"with {min(few)} seeds the interval is little more than the seeds' range")
    if len({row.settings.get("evaluate.on", "client") for row in rows}) > 1:
        notes.append(
            "mixed metrics: some runs are tested on each client's own rows, others on the whole "
            "test set"
        )
    data_sets = {str(row.settings.get("data.name")) for row in rows}
    if len(data_sets) > 1:
        notes.append(f"different data sets: {', '.join(sorted(data_sets))}")
    if reference is not None:
        notes += _notes_on_pairs(rows, reference, two_sided=two_sided)
    departures = sorted({row.paper.departs for row in rows if row.paper and row.paper.departs})
    return notes + [
        f"these runs depart from the paper's settings: {', '.join(settings)}"
        for settings in departures
    ]


def _notes_on_row(row: Row, metric: str) -> list[str]:
    notes = [note for run in row.runs for note in _notes_on_run(run, metric)]
    missing = [run.folder for run in row.runs if run.rounds and run.last(metric) is None]
    if missing:
        notes.append(f"{row.label}: {len(missing)} of {len(row.runs)} runs have no {metric}")
    fewest, most = row.rounds
    if fewest != most:
        notes.append(f"{row.label}: its seeds are at different rounds, {fewest} to {most}")
    return notes


def _notes_on_run(run: FinishedRun, metric: str) -> list[str]:
    notes = []
    if run.kept is not None:
        notes.append(f"{run.folder}: round {run.kept} of {run.done} counts, by validation data")
    if not run.finished:
        notes.append(f"{run.folder} is unfinished: round {run.done} of {run.planned}")
    refused = [upload for line in run.rounds for upload in line.get("refused") or ()]
    if refused:
        uploads = "1 upload was" if len(refused) == 1 else f"{len(refused)} uploads were"
        reason = refused[0].get("reason")
        notes.append(f"{run.folder}: {uploads} refused; reason of the first: {reason}")
    late = sum(len(line.get("late") or ()) for line in run.rounds)
    absent = sum(len(line.get("absent") or ()) for line in run.rounds) - late
    if late:
        notes.append(f"{run.folder}: replies that came too late and were not used: {late}")
    if absent > 0:
        notes.append(f"{run.folder}: clients asked that did not answer, over all rounds: {absent}")
    rounds, _ = run.column(metric)
    if rounds and rounds[-1] != run.done:
        notes.append(
            f"{run.folder}: its last value of {metric} is from round {rounds[-1]}, not {run.done}"
        )
    return notes


def _notes_on_pairs(rows: Sequence[Row], reference: str, *, two_sided: bool) -> list[str]:
    compared = [row for row in rows if row.label != reference]
    notes = [
        f"{row.label} has no seed in common with {reference}: not compared"
        for row in compared
        if row.versus is None
    ]
    pairs = [row.versus.difference.count for row in compared if row.versus]
    tests = sum(bool(row.versus and row.versus.p is not None) for row in compared)
    if not pairs:
        return notes
    least = smallest_p(min(pairs), two_sided=two_sided)
    if min(1.0, max(1, tests) * least) < SIGNIFICANT:
        return notes
    count, sides = min(pairs), "two-sided" if two_sided else "one-sided"
    corrected = f", {min(1.0, tests * least):.4g} after Holm's correction" if tests > 1 else ""
    enough = _enough(max(1, tests), two_sided=two_sided)
    few = f"{count} pair{'s' if count > 1 else ''}: the smallest p possible is {least:.4g} {sides}"
    return [*notes, f"{few}{corrected}; p < {SIGNIFICANT} takes {enough} seeds"]


def _enough(tests: int, *, two_sided: bool) -> int:
    """Return the fewest pairs whose smallest p is significant after Holm's correction."""
    return math.floor(math.log2(tests * (2 if two_sided else 1) / SIGNIFICANT)) + 1
