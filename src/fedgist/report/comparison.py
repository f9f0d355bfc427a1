"""Compare runs: group them by settings, pair them by seed, summarize and test.

The result is the last round's score, as fixed before the run. The best round is shown next to it
under its own name, because a round selected by test accuracy is not a result. Rounds and bytes to a
target accuracy are counted for each seed, then averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedgist.core.metrics import Metric
from fedgist.errors import ReportError, did_you_mean
from fedgist.report.run_groups import Group, common_column, group
from fedgist.report.stats import Better, Comparison, Estimate, compare, estimate, holm
from fedgist.report.study_notes import notes_on
from fedgist.report.study_rows import Paper, Row, Study, Target
from fedgist.runs.columns import EPSILON, measured
from fedgist.runs.corrections import Table
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.finished.run_reader import readable
from fedgist.runs.record import summary

LAST = 10  # number of evaluations in the mean of the last ones


def study(
    runs: Sequence[FinishedRun],
    *,
    reference: str | None = None,
    metric: str | None = None,
    target_accuracy: float | None = None,
    two_sided: bool = False,
) -> Study:
    """Return a study: runs grouped by settings, paired by seed, and summarized.

    Parameters
    ----------
    reference
        Label or method of the row that all other rows are compared with.
    metric
        Column of ``rounds.jsonl``. The default is the first metric of the runs' objective or of
        their probe, whichever more runs have; before the first evaluation it is the training loss.
        The objective defines whether higher or lower is better.
    target_accuracy
        A fraction. The default is the paper's target, if all recipes name the same one.
    two_sided
        Test whether a row differs from the reference, not whether the reference is better.
    """
    runs, problems = readable(runs)
    metric = common_column(runs) if metric is None else metric
    measure = measured(metric, runs[0].metrics)
    if target_accuracy is not None and measure.unit != "fraction":
        raise ReportError(
            f"a target accuracy cannot be used with the metric {metric!r}, which is no share"
        )
    groups, repeats = group(runs)
    _check_metric(runs, metric)
    if target_accuracy is None and measure.name == "accuracy":
        target_accuracy = _target_of_paper(runs)
    rows = tuple(_row(members, metric, measure, target_accuracy) for members in groups)
    label = None if reference is None else _reference(reference, groups).label
    if label is not None:
        rows = _compared(rows, label, two_sided=two_sided)
    notes = (*problems, *repeats, *notes_on(rows, metric, label, two_sided=two_sided))
    return Study(rows, metric, measure, label, target_accuracy, notes, two_sided)


def _compared(rows: Sequence[Row], reference: str, *, two_sided: bool) -> tuple[Row, ...]:
    """Return the rows with their differences from the reference, and p-values corrected by Holm."""
    other = next(row for row in rows if row.label == reference)
    versus = {
        row.label: found
        for row in rows
        if row.label != reference and (found := against(row, other, two_sided=two_sided))
    }
    tested = {label: found.p for label, found in versus.items() if found.p is not None}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    return tuple(
        replace(row, versus=replace(versus[row.label], p_holm=corrected.get(row.label)))
        if row.label in versus
        else row
        for row in rows
    )


def against(row: Row, reference: Row, *, two_sided: bool = False) -> Comparison | None:
    """Return a row's differences from another, paired by seed, and their p-value."""
    better: Better = row.measure.better
    return compare(row.finals(), reference.finals(), better, two_sided=two_sided)


def _check_metric(runs: Sequence[FinishedRun], metric: str) -> None:
    if any(run.last(metric) is not None for run in runs):
        return
    last_lines = [line for run in runs for line in run.rounds[-1:]]
    columns = sorted(
        {key for line in last_lines for key in line if key.startswith(("eval/", "train/"))}
    )
    without = "none (the clients kept their scores)" if last_lines else "none (no round is done)"
    raise ReportError(f"no run has {metric!r}; columns: {', '.join(columns) or without}")


def _target_of_paper(runs: Sequence[FinishedRun]) -> float | None:
    """Return the target that all recipes share, as a fraction, or None."""
    percents = {run.recipe.get("paper", {}).get("target_accuracy") for run in runs}
    percent = percents.pop() if len(percents) == 1 else None
    return None if percent is None else float(percent) / 100


def _reference(name: str, groups: Sequence[Group]) -> Group:
    by_label = [members for members in groups if members.label == name]
    by_method = [members for members in groups if members.method == name]
    if by_label:
        return by_label[0]
    if len(by_method) == 1:
        return by_method[0]
    labels = [members.label for members in groups]
    raise ReportError(f"unknown reference {name!r}{did_you_mean(name, labels)}")


def _row(
    members: Group,
    metric: str,
    measure: Metric,
    target_accuracy: float | None,
) -> Row:
    runs, better = members.runs, measure.better
    ends = [end for run in runs if (end := summary(run.rounds, metric, better, run.kept))]

    def over_seeds(value: Callable[[FinishedRun], float]) -> Estimate | None:
        return estimate([value(run) for run in runs if run.rounds])

    return Row(
        label=members.label,
        method=members.method,
        settings=members.settings,
        runs=runs,
        metric=metric,
        measure=measure,
        final=estimate([end["final"] for end in ends], interval=True),
        last10=estimate([end["last10_mean"] for end in ends if end["last10_count"] == LAST]),
        best=estimate([end["best"] for end in ends]),
        up=over_seeds(lambda run: run.total("comm/up_bytes")),
        down=over_seeds(lambda run: run.total("comm/down_bytes")),
        target=None if target_accuracy is None else _target(runs, metric, target_accuracy, better),
        paper=paper_numbers(runs[0].recipe.get("paper", {}), members.method),
        epsilon=max((e for run in runs if (e := run.last(EPSILON)) is not None), default=None),
    )


def _target(runs: Sequence[FinishedRun], metric: str, goal: float, better: Better) -> Target | None:
    sign = 1 if better == "higher" else -1
    reached = 0
    rounds_to_goal, up_bytes, down_bytes = [], [], []
    for run in runs:
        rounds, values = run.column(metric)
        if not rounds:
            continue
        hits = [r for r, v in zip(rounds, values, strict=True) if sign * v >= sign * goal]
        best = max(zip(rounds, values, strict=True), key=lambda pair: sign * pair[1])[0]
        reached += bool(hits)
        end = hits[0] if hits else best
        up, down = run.sent()[end]
        rounds_to_goal.append(end)
        up_bytes.append(up)
        down_bytes.append(down)
    totals = [up + down for up, down in zip(up_bytes, down_bytes, strict=True)]
    columns = (rounds_to_goal, up_bytes, down_bytes, totals)
    estimates = [e for column in columns if (e := estimate(column)) is not None]
    return Target(reached, *estimates) if estimates else None


def paper_numbers(printed: Table, method: str) -> Paper | None:
    """Return what the section ``[paper]`` of a recipe says of a method."""
    pair = printed.get("accuracy", {}).get(method)
    bits = printed.get("communication", {}).get(method)
    if pair is None and bits is None:
        return None
    accuracy = None if pair is None else tuple(value / 100 for value in pair)
    return Paper(printed.get("source", ""), accuracy, bits, tuple(printed.get("departs", ())))
