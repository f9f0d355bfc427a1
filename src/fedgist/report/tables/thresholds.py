"""Two classes: thresholds that are chosen on validation rows, and what they do on test rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedgist.report.formatting import NONE, Sheet
from fedgist.report.tables.client_scores import keeps_clients
from fedgist.report.tables.comparison import Row
from fedgist.report.tables.stats import wilson
from fedgist.runs.files.prediction_file import TEST, VALIDATION, Predictions
from fedgist.runs.finished.finished_run import FinishedRun

TWO = 2
HEAD = ("client", "method", "threshold", "sensitivity", "95 %", "specificity", "95 %", "rows")
SPECIFICITY = 0.95  # of a run whose recipe does not say


@dataclass(frozen=True)
class AtThreshold:
    """A client's threshold, chosen on its validation rows, and its test rows by that threshold.

    It was chosen on ``chosen_on`` rows. ``found`` are the positive rows at or above it, and
    ``spared`` the negative rows below it.
    """

    threshold: float
    chosen_on: int
    positives: int
    negatives: int
    found: int
    spared: int


def class_names(run: FinishedRun) -> Sequence[str]:
    """Return the names of the two classes, or their numbers."""
    names = (run.split or {}).get("classes") or ()
    return names if len(names) == TWO else ("0", "1")


def positive_class(run: FinishedRun) -> int | None:
    """Return the number of the positive one of two classes; None if there are not two."""
    said = run.predictions
    if said is None or said.probability.shape[1] != TWO:
        return None
    stated, names = run.recipe.get("objective", {}).get("positive"), [*class_names(run)]
    return names.index(str(stated)) if str(stated) in names else 1


def threshold_of(score: Sequence[float], positive: Sequence[bool], specificity: float) -> float:
    """Return the least probability at which enough negative rows are below; NaN without any.

    A row is called positive from the threshold on. The result is the probability of a row, or the
    next number above the largest one of a negative row.

    >>> threshold_of([0.1, 0.3, 0.6, 0.9], [False, False, True, True], specificity=1.0)
    0.6
    >>> threshold_of([0.1, 0.7, 0.6], [False, False, True], specificity=0.5)
    0.6
    """
    scores, marks = np.asarray(score, dtype=np.float64), np.asarray(positive, dtype=bool)
    negatives = np.sort(scores[~marks])
    if not len(negatives) or not marks.any():
        return math.nan
    above = float(np.nextafter(negatives[-1], math.inf))
    for candidate in [*np.unique(scores).tolist(), above]:
        if np.searchsorted(negatives, candidate) >= specificity * len(negatives) - 1e-9:
            return float(candidate)
    return above


def at_thresholds(run: FinishedRun) -> dict[int, AtThreshold]:
    """Return what each client's threshold does on its test rows, by client.

    Clients without validation rows of both classes have no threshold.
    """
    said, positive = run.predictions, positive_class(run)
    if said is None or positive is None:
        return {}
    least = run.recipe.get("evaluate", {}).get("specificity", SPECIFICITY)
    test, chosen_on = said.of(TEST), said.of(VALIDATION)
    found = {}
    for client in np.unique(test.client).tolist():
        rows, others = (part.take(part.client == client) for part in (test, chosen_on))
        score, is_positive = others.probability[:, positive], others.label == positive
        threshold = threshold_of(score.tolist(), is_positive.tolist(), least)
        if not math.isnan(threshold):
            found[client] = _applied(rows, positive, threshold, len(others.row))
    return found


def _applied(rows: Predictions, positive: int, threshold: float, chosen_on: int) -> AtThreshold:
    # in double precision: the next number above a score would be rounded back to it
    called = rows.probability[:, positive].astype(np.float64) >= threshold
    is_positive = rows.label == positive
    counts = is_positive, ~is_positive, is_positive & called, ~is_positive & ~called
    return AtThreshold(threshold, chosen_on, *(int(count.sum()) for count in counts))


def threshold_sheet(rows: Sequence[Row]) -> Sheet | None:
    """Return the sensitivity and specificity of each row's models by client, or None without any.

    Counts are added up over runs. Intervals count a row that several runs test once.
    """
    runs = [run for row in rows for run in row.runs]
    if not keeps_clients(runs):
        return None
    lines = [line for row in rows for line in _lines(row)]
    if not lines:
        return None
    first = next(run for run in runs if positive_class(run) is not None)
    name = class_names(first)[positive_class(first) or 0]
    least = first.recipe.get("evaluate", {}).get("specificity", SPECIFICITY)
    return Sheet(
        f"Sensitivity and specificity for {name!r} by client (%)",
        HEAD,
        tuple(sorted(lines, key=lambda line: line[0])),
        f"each client's threshold is the least one with {100 * least:g} % specificity on its "
        "validation rows; sensitivity and specificity are of its test rows, with Wilson's 95 % "
        "interval of these models over rows; rows: positive + negative test rows, then those that "
        "the threshold was chosen on; threshold: mean over runs",
        named_by=2,
    )


def _lines(row: Row) -> Iterator[tuple[str, ...]]:
    """Yield the lines of one row of a study, a line for each client with a threshold."""
    of_runs = [at_thresholds(run) for run in row.runs]
    names = (row.runs[0].split or {}).get("clients") or ()
    folds = max((run.recipe.get("data", {}).get("folds") or 1 for run in row.runs), default=1)
    times = max(1.0, len(row.runs) / folds)  # that each row is tested
    for client in sorted({client for found in of_runs for client in found}):
        tests = [found[client] for found in of_runs if client in found]
        threshold = float(np.mean([test.threshold for test in tests]))
        pairs = [
            (sum(test.found for test in tests), sum(test.positives for test in tests)),
            (sum(test.spared for test in tests), sum(test.negatives for test in tests)),
        ]
        shown = [cell for count, whole in pairs for cell in _share(count, whole, times)]
        name = names[client] if client < len(names) else str(client)
        counts = [whole / times for _, whole in pairs]
        chosen_on = float(np.mean([test.chosen_on for test in tests]))
        rows = f"{counts[0]:.4g} + {counts[1]:.4g}, {chosen_on:.4g}"
        yield (name, row.label, f"{threshold:.3f}", *shown, rows)


def _share(count: int, whole: int, times: float) -> tuple[str, str]:
    """Return a share in percent, and its interval."""
    if not whole:
        return NONE, NONE
    low, high = wilson(count / whole, whole / times)
    return f"{100 * count / whole:.1f}", f"[{100 * low:.1f}, {100 * high:.1f}]"
