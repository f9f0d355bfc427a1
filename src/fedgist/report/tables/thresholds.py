"""Two classes: thresholds that are chosen on validation rows, and what they do on test rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedgist.errors import listed
from fedgist.report.formatting import NONE, Sheet
from fedgist.report.tables.client_scores import keeps_clients, rows_once
from fedgist.report.tables.comparison import Row
from fedgist.report.tables.stats import wilson
from fedgist.runs.files.prediction_file import TEST, VALIDATION
from fedgist.runs.finished.finished_run import FinishedRun

TWO = 2
HEAD = ("client", "method", "threshold", "sensitivity", "95 %", "specificity", "95 %")
SPECIFICITY = 0.95  # of a run whose recipe does not say
ROUNDING = 1e-9  # 0.95 x 20 is not exactly 19


@dataclass(frozen=True)
class AtThreshold:
    """A client's threshold, chosen on its validation rows, and its test rows by that threshold.

    ``fold`` is that of the test rows. ``odds`` is the threshold on the log-odds of the positive
    class. It was chosen on ``chosen_on`` negative rows, and ``separates`` says whether a positive
    one of these rows was above it. ``found`` are the positive test rows above it, and ``spared``
    the negative ones below it.
    """

    fold: int
    odds: float
    chosen_on: int
    separates: bool
    positives: int
    negatives: int
    found: int
    spared: int

    @property
    def threshold(self) -> float:
        """The threshold as a probability of the positive class."""
        return float(1 / (1 + np.exp(-self.odds)))


def class_names(run: FinishedRun) -> Sequence[str]:
    """Return the names of the two classes, or their numbers."""
    names = (run.split or {}).get("classes") or ()
    return names if len(names) == TWO else ("0", "1")


def positive_class(run: FinishedRun) -> int | None:
    """Return the number of the positive one of two classes; None if there are not two."""
    said = run.predictions
    if said is None or said.log_odds.shape[1] != TWO:
        return None
    stated, names = run.recipe.get("objective", {}).get("positive"), [*class_names(run)]
    return names.index(str(stated)) if str(stated) in names else 1


def threshold_of(score: Sequence[float], positive: Sequence[bool], specificity: float) -> float:
    """Return the least threshold at which enough negative rows are below; NaN without any.

    A row is called positive from the threshold on. The threshold is in the middle between the
    largest score of a negative row that must be below it and the next larger score of any row.

    >>> threshold_of([1.0, 3.0, 6.0, 9.0], [False, False, True, True], specificity=1.0)
    4.5
    >>> threshold_of([1.0, 7.0, 6.0], [False, False, True], specificity=0.5)
    3.5
    """
    scores, marks = np.asarray(score, dtype=np.float64), np.asarray(positive, dtype=bool)
    negatives = np.sort(scores[~marks])
    if not len(negatives) or not marks.any():
        return math.nan
    below = math.ceil(specificity * len(negatives) - ROUNDING)
    if not below:
        return float(scores.min())
    last = negatives[below - 1]
    above = scores[scores > last]
    return float((last + above.min()) / 2 if len(above) else np.nextafter(last, math.inf))


def at_thresholds(run: FinishedRun) -> dict[int, AtThreshold]:
    """Return what each client's threshold does on its test rows, by client.

    Clients without validation rows of both classes have no threshold.
    """
    said, positive = run.predictions, positive_class(run)
    if said is None or positive is None:
        return {}
    test, chosen_on = said.of(TEST), said.of(VALIDATION)
    found = {}
    for client in np.unique(test.client).tolist():
        rows, others = (part.take(part.client == client) for part in (test, chosen_on))
        # in 64 bits: a threshold between two scores of 32 may be one of them there
        tested, score = (part.log_odds[:, positive].astype(np.float64) for part in (rows, others))
        marks = others.label == positive
        odds = threshold_of(score.tolist(), marks.tolist(), least_specificity(run))
        if math.isnan(odds):
            continue
        is_positive, called = rows.label == positive, tested >= odds
        counts = is_positive, ~is_positive, is_positive & called, ~is_positive & ~called
        found[client] = AtThreshold(
            run.fold,
            odds,
            int((~marks).sum()),
            bool((score[marks] >= odds).any()),
            *(int(count.sum()) for count in counts),
        )
    return found


def least_specificity(run: FinishedRun) -> float:
    """Return the specificity that a threshold must have on validation rows."""
    return float(run.recipe.get("evaluate", {}).get("specificity", SPECIFICITY))


def threshold_sheet(rows: Sequence[Row]) -> Sheet | None:
    """Return the sensitivity and specificity of each row's models by client, or None without any.

    Counts are added up over runs. Intervals count a row that several runs test once.
    """
    runs = [run for row in rows for run in row.runs if positive_class(run) is not None]
    if not runs or not keeps_clients([run for row in rows for run in row.runs]):
        return None
    name, least = _kind(runs[0])
    others = [row.label for row in rows if any(_kind(run) != (name, least) for run in row.runs)]
    rows = [
        replace(row, runs=tuple(run for run in row.runs if _kind(run) == (name, least)))
        for row in rows
    ]
    tests = {row.label: _by_client(row) for row in rows}
    names = (runs[0].split or {}).get("clients") or ()
    clients = sorted({client for of_clients in tests.values() for client in of_clients})
    called = {client: names[client] if client < len(names) else str(client) for client in clients}
    lines = [
        (called[client], label, *_cells(of_clients[client]))
        for client in clients
        for label, of_clients in tests.items()
        if client in of_clients
    ]
    if not lines:
        return None
    left_out = f"; left out, of another class or specificity: runs of {listed(others)}"
    shown = [(called[c], label, of) for label, each in tests.items() for c, of in each.items()]
    return Sheet(
        f"Sensitivity and specificity for {name!r} by client (%)",
        HEAD,
        tuple(lines),
        f"of test rows, at each client's least threshold with {100 * least:g} % specificity on its "
        "validation rows, as a probability, mean over runs; 95 %: Wilson's interval of these "
        f"models and thresholds, over rows; {_rows_of(shown)}{_remarks(shown, least)}"
        f"{left_out if others else ''}",
        named_by=2,
    )


def positive_name(run: FinishedRun) -> str | None:
    """Return the name of the positive one of two classes; None if there are not two."""
    place = positive_class(run)
    return None if place is None else class_names(run)[place]


def _kind(run: FinishedRun) -> tuple[str | None, float]:
    return positive_name(run), least_specificity(run)


Tests = Sequence[AtThreshold]  # of one client, by run


def _by_client(row: Row) -> dict[int, list[AtThreshold]]:
    tests: dict[int, list[AtThreshold]] = {}
    for run in row.runs:
        for client, test in at_thresholds(run).items():
            tests.setdefault(client, []).append(test)
    return tests


def _once(tests: Tests) -> tuple[float, float]:
    """Return the numbers of positive and negative test rows, each of which several runs test."""
    positives = rows_once([(test.fold, test.positives) for test in tests])
    return positives, rows_once([(test.fold, test.negatives) for test in tests])


def _cells(tests: Tests) -> tuple[str, ...]:
    threshold = float(np.mean([test.threshold for test in tests]))
    positives = sum(test.found for test in tests), sum(test.positives for test in tests)
    negatives = sum(test.spared for test in tests), sum(test.negatives for test in tests)
    ill, well = _once(tests)
    return (f"{threshold:.3f}", *_share(*positives, ill), *_share(*negatives, well))


def _share(count: int, whole: int, once: float) -> tuple[str, str]:
    """Return a share in percent, and its interval by the number of different rows."""
    if not whole:
        return NONE, NONE
    low, high = wilson(count / whole, once)
    return f"{100 * count / whole:.1f}", f"[{100 * low:.1f}, {100 * high:.1f}]"


def _rows_of(shown: Sequence[tuple[str, str, Tests]]) -> str:
    """Return each client's numbers of test rows, and of those that thresholds were chosen on."""
    said: dict[str, str] = {}
    for name, _, tests in shown:
        positives, negatives = _once(tests)
        chosen_on = sum(test.chosen_on for test in tests) / len(tests)
        said.setdefault(name, f"{name} {positives:.4g} + {negatives:.4g}, {chosen_on:.3g}")
    return "positive + negative test rows, negative validation rows: " + "; ".join(said.values())


def _remarks(shown: Sequence[tuple[str, str, Tests]], least: float) -> str:
    """Return remarks on thresholds that were chosen on few rows, or that separate nothing."""
    enough = math.inf if least == 1 else 1 / (1 - least)
    few = {name for name, _, tests in shown if min(t.chosen_on for t in tests) < enough - ROUNDING}
    none = [
        f"{name}, {label} ({count} of {len(tests)})"
        for name, label, tests in shown
        if (count := sum(not test.separates for test in tests))
    ]
    remarks = ""
    if few and least < 1:
        remarks += (
            f"; with fewer than {enough:.0f} negative validation rows ({listed(sorted(few))}) none "
            "of them may be above the threshold, which is uncertain"
        )
    if none:
        remarks += f"; runs in which no positive validation row is above it: {listed(none)}"
    return remarks
