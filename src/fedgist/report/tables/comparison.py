"""Compare runs: group them by settings, pair them by seed and division, summarize and test.

The result is the last round's score, as fixed before the run. The best round has a column of its
own, for those who ask for it, because a round selected by test accuracy is not a result. Rounds and
bytes to a target accuracy are counted for each seed, then averaged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedgist.core.objectives.metrics import PROBE, Metric
from fedgist.data.division import TEST_FRACTION
from fedgist.errors import ReportError, did_you_mean
from fedgist.recipe.reading import defaults, flat, role_of
from fedgist.report.tables.client_scores import note_on_few_rows, over_rows
from fedgist.report.tables.mean_counts import who_is_missing
from fedgist.report.tables.stats import (
    SIGNIFICANT,
    Better,
    Comparison,
    Draw,
    Estimate,
    by_division,
    estimate,
    holm,
    paired_difference,
    smallest_p,
)
from fedgist.report.troubles import KINDS, troubles
from fedgist.runs.divergence import divergence_notes
from fedgist.runs.files.columns import EPSILON, TRAIN_LOSS, ends_lost, measured
from fedgist.runs.files.record import summary
from fedgist.runs.finished.finished_run import OLD, FinishedRun
from fedgist.runs.finished.run_reader import readable
from fedgist.runs.versions import Computed

KeyedSettings = Mapping[str, Any]  # by dotted key
BROKEN = "seal"  # marks runs that do not match their seal: they form their own group
MARKS = (OLD, BROKEN)


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same settings, sorted by division and seed."""

    label: str
    settings: KeyedSettings
    runs: tuple[FinishedRun, ...]

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.settings["method.name"])


def group(runs: Sequence[FinishedRun]) -> tuple[list[RunGroup], list[str]]:
    """Return the groups, and a note on each run that repeats the settings and seed of another."""
    settings_by_text: dict[str, KeyedSettings] = {}
    members: dict[str, dict[Draw, FinishedRun]] = {}
    notes = []
    newest = _newest(runs)
    for run in runs:
        settings = _settings_of(run, newest[run.name])
        text = json.dumps(settings, sort_keys=True, default=str)
        settings_by_text.setdefault(text, settings)
        first = members.setdefault(text, {}).setdefault(draw_of(run), run)
        if first is not run:
            notes.append(
                f"{run.folder} repeats {first.folder} (same settings, seed and division) and is "
                "left out"
            )
    labels = group_labels(list(settings_by_text.values()))
    groups = [
        RunGroup(_name(label, drawn), settings, tuple(drawn[draw] for draw in sorted(drawn)))
        for label, settings, drawn in zip(
            labels, settings_by_text.values(), members.values(), strict=True
        )
    ]
    return groups, notes


def draw_of(run: FinishedRun) -> Draw:
    """Return what was drawn for a run."""
    return Draw(run.seed, run.division)


def _newest(runs: Sequence[FinishedRun]) -> dict[str, Computed]:
    """Return the newest versions that finished runs have, by method."""
    newest: dict[str, Computed] = {}
    for run in runs:
        newest[run.name] = max(newest.get(run.name, run.computed), run.computed)
    return newest


def _settings_of(run: FinishedRun, newest: Computed) -> dict[str, Any]:
    """Return the settings that group a run; an unfinished one counts as of the newest versions."""
    stated = {**defaults(), **flat(run.recipe)}
    settings = {k: v for k, v in stated.items() if role_of(k) is None}
    settings.setdefault("method.name", run.name)
    computed = run.computed if run.rounds and run.result else newest
    settings |= {"version": computed.method, "arithmetic": computed.arithmetic}
    marks = {OLD: run.age, BROKEN: run.mark}
    return settings | {kind: mark for kind, mark in marks.items() if mark}


def _name(label: str, drawn: Mapping[Draw, FinishedRun]) -> str:
    """Return the reader's name of a group, with its marks, or its label."""
    run = next(iter(drawn.values()))
    return " ".join(filter(None, (run.label, run.age, run.mark))) if run.label else label


def group_labels(groups: Sequence[KeyedSettings]) -> list[str]:
    """Label each group by its method and the settings that differ between groups of the method."""
    short = [_label(settings, groups, briefly=True) for settings in groups]
    return [
        label if short.count(label) == 1 else _label(settings, groups, briefly=False)
        for label, settings in zip(short, groups, strict=True)
    ]


def _label(settings: KeyedSettings, groups: Sequence[KeyedSettings], *, briefly: bool) -> str:
    same_method = [other for other in groups if other["method.name"] == settings["method.name"]]
    differing = [
        key
        for key in settings
        if key not in MARKS and any(other.get(key) != settings[key] for other in same_method)
    ]
    last_words = [key.removesuffix(".name").rpartition(".")[2] for key in differing]
    words = [settings["method.name"]]
    for key, last in zip(differing, last_words, strict=True):
        value = settings[key]
        text = f"{value:.3g}" if briefly and isinstance(value, float) else str(value)
        words.append(f"{last if briefly and last_words.count(last) == 1 else key}={text}")
    return " ".join([*words, *(settings[mark] for mark in MARKS if mark in settings)])


def common_metric(runs: Sequence[FinishedRun]) -> str:
    """Return the metric that most runs have: an objective's first metric, or a probe's accuracy."""
    names = dict.fromkeys([*(run.first for run in runs), PROBE.name])
    had = {name: [run.last(run.column_of(name)) is not None for run in runs] for name in names}
    return max(names, key=lambda name: sum(had[name]))


def common_column(runs: Sequence[FinishedRun]) -> str:
    """Return the common metric's column that most runs have; before evaluations, the loss."""
    metric = common_metric(runs)
    columns = dict.fromkeys(run.column_of(metric) for run in runs)
    had = {name: sum(run.last(name) is not None for run in runs) for name in columns}
    column = max(columns, key=had.__getitem__)
    learning = any(run.last(TRAIN_LOSS) is not None for run in runs)
    return TRAIN_LOSS if learning and not had[column] else column


@dataclass(frozen=True)
class Target:
    """Rounds and bytes until an accuracy was reached, and the number of seeds that reached it.

    For a seed that never reached it, the round of its highest accuracy counts (the papers' rule);
    such a row is marked.
    """

    reached: int
    rounds: Estimate
    up: Estimate
    down: Estimate
    both: Estimate

    @property
    def by_all(self) -> bool:
        """Whether every seed reached the target."""
        return self.reached == self.rounds.count


@dataclass(frozen=True)
class Paper:
    """The paper's numbers: accuracy with error, if given (fractions); bits to its target."""

    source: str
    accuracy: tuple[float, ...] | None
    bits: float | None
    departs: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A row of a study: runs that differ only in the seed and the division of their rows."""

    label: str
    method: str
    settings: KeyedSettings
    runs: tuple[FinishedRun, ...]
    metric: str  # a column of the record
    measure: Metric  # what that column measures
    final: Estimate | None
    last10: Estimate | None
    best: Estimate | None
    up: Estimate | None
    down: Estimate | None
    versus: Comparison | None = None
    target: Target | None = None
    paper: Paper | None = None
    epsilon: float | None = None  # the largest budget spent by a seed

    def curves(self, column: str = "") -> dict[Draw, dict[int, float]]:
        """Return each run's values of a column by round; the default is the row's metric."""
        columns = {draw_of(run): run.column(column or self.metric) for run in self.runs}
        return {
            draw: dict(zip(rounds, values, strict=True))
            for draw, (rounds, values) in columns.items()
            if rounds
        }

    def finals(self, column: str = "") -> dict[Draw, float]:
        """Return each run's result: the last value of a column, up to the kept round."""
        lasts = {draw_of(run): run.last(column or self.metric) for run in self.runs}
        return {draw: value for draw, value in lasts.items() if value is not None}

    def at(self, number: int, column: str = "") -> dict[Draw, float]:
        """Return each run's value of a column in a round."""
        curves = self.curves(column).items()
        return {draw: curve[number] for draw, curve in curves if number in curve}

    def bests(self, column: str = "") -> dict[Draw, float]:
        """Return each run's best value of a column, which is chosen afterwards: no result."""
        measure = measured(column, self.runs[0].metrics) if column else self.measure
        choose = min if measure.better == "lower" else max
        return {draw: choose(curve.values()) for draw, curve in self.curves(column).items()}

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs, in order, each once."""
        return sorted({run.seed for run in self.runs})

    @property
    def divisions(self) -> list[int]:
        """Divisions of the rows in the runs, in order, each once."""
        return sorted({run.division for run in self.runs})

    @property
    def overlap(self) -> float:
        """Test rows over training rows of a division if there are several, else 0."""
        return overlap_of(self.runs)

    @property
    def rounds(self) -> tuple[int, int]:
        """Smallest and largest number of completed rounds."""
        done = [run.done for run in self.runs]
        return min(done), max(done)

    @property
    def is_old(self) -> bool:
        """Whether a run is of an earlier version."""
        return any(run.age for run in self.runs)

    @property
    def unfinished(self) -> int:
        """Number of unfinished runs."""
        return sum(not run.finished for run in self.runs)


@dataclass(frozen=True)
class Study:
    """A study: its rows, their metric, and notes on what the numbers do not show."""

    rows: tuple[Row, ...]
    metric: str  # a column of the record
    measure: Metric  # what that column measures
    reference: str | None
    target_accuracy: float | None  # a fraction
    notes: tuple[str, ...]


LAST = 10  # number of evaluations in the mean of the last ones, of a run that has more


def study(
    runs: Sequence[FinishedRun],
    *,
    reference: str | None = None,
    metric: str | None = None,
    target_accuracy: float | None = None,
    order: Sequence[str] = (),
) -> Study:
    """Return a study: runs grouped by settings, paired by draw, and summarized.

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
    order
        Labels or methods of the rows that come first, or ``("final",)``: the best row first.
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
    rows = _ordered(rows, order)
    label = None if reference is None else _reference(reference, groups).label
    if label is not None:
        rows = _compared(rows, label)
    notes = (*problems, *repeats, *notes_on(rows, metric, label))
    return Study(rows, metric, measure, label, target_accuracy, notes)


BY_RESULT = "final"  # as an order of rows


def _ordered(rows: tuple[Row, ...], order: Sequence[str]) -> tuple[Row, ...]:
    """Return the rows in an order: those named first, or by their results."""
    if list(order) == [BY_RESULT]:
        sign = -1 if rows[0].measure.better == "higher" else 1
        return tuple(sorted(rows, key=lambda row: sign * row.final.mean if row.final else math.inf))
    names = {row.label for row in rows} | {row.method for row in rows}
    for name in order:
        if name not in names:
            raise ReportError(f"--order: unknown row {name!r}{did_you_mean(name, sorted(names))}")

    def place(row: Row) -> int:
        places = [i for i, name in enumerate(order) if name in {row.label, row.method}]
        return min(places, default=len(order))

    return tuple(sorted(rows, key=place))


def _compared(rows: Sequence[Row], reference: str) -> tuple[Row, ...]:
    """Return the rows with their differences from the reference, and p-values corrected by Holm."""
    other = next(row for row in rows if row.label == reference)
    versus = {
        row.label: difference
        for row in rows
        if row.label != reference and (difference := against(row, other))
    }
    tested = {
        label: difference.p for label, difference in versus.items() if difference.p is not None
    }
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    return tuple(
        replace(row, versus=replace(versus[row.label], p_holm=corrected.get(row.label)))
        if row.label in versus
        else row
        for row in rows
    )


def against(row: Row, reference: Row, *, two_sided: bool = True) -> Comparison | None:
    """Return a row's differences from another, paired by draw, and their p-value."""
    return paired_difference(
        row.finals(),
        reference.finals(),
        row.measure.better,
        overlap=row.overlap,
        two_sided=two_sided,
    )


def overlap_of(runs: Sequence[FinishedRun]) -> float:
    """Return the test rows over the rows trained on, of runs of several divisions; 0 of one."""
    if len({run.division for run in runs}) <= 1:
        return 0.0
    section = runs[0].recipe.get("data", {})
    folds = section.get("folds")
    share = 1 / folds if folds else section.get("test_fraction", TEST_FRACTION)
    return float(share / (1 - share) / (1 - section.get("validation", 0.0)))


def _check_metric(runs: Sequence[FinishedRun], metric: str) -> None:
    if any(len(run.column(metric)[0]) for run in runs):  # a run that diverged had it before
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


def _reference(name: str, groups: Sequence[RunGroup]) -> RunGroup:
    by_label = [members for members in groups if members.label == name]
    by_method = [members for members in groups if members.method == name]
    if by_label:
        return by_label[0]
    if len(by_method) == 1:
        return by_method[0]
    labels = [members.label for members in groups]
    raise ReportError(f"unknown reference {name!r}{did_you_mean(name, labels)}")


def _row(
    members: RunGroup,
    metric: str,
    measure: Metric,
    target_accuracy: float | None,
) -> Row:
    runs, better = members.runs, measure.better
    ends = {
        draw_of(run): end for run in runs if (end := summary(run.rounds, metric, better, run.kept))
    }
    overlap = overlap_of([run for run in runs if draw_of(run) in ends])

    # of runs that end at different rounds, some may have none: the mean of others is no row's
    has_last10 = all(len(run.column(metric)[0]) > LAST for run in runs if draw_of(run) in ends)

    def mean(values: Mapping[Draw, float]) -> Estimate | None:
        return _possible(estimate(by_division(values), overlap=overlap), measure)

    def over_runs(value: Callable[[FinishedRun], float]) -> Estimate | None:
        return estimate([value(run) for run in runs if run.rounds])

    return Row(
        label=members.label,
        method=members.method,
        settings=members.settings,
        runs=runs,
        metric=metric,
        measure=measure,
        final=mean({draw: end["final"] for draw, end in ends.items()}),
        last10=mean({draw: end["last10_mean"] for draw, end in ends.items()})
        if has_last10
        else None,
        best=mean({draw: end["best"] for draw, end in ends.items()}),
        up=over_runs(lambda run: run.total("comm/up_bytes")),
        down=over_runs(lambda run: run.total("comm/down_bytes")),
        target=None if target_accuracy is None else _target(runs, metric, target_accuracy, better),
        paper=paper_numbers(runs[0].recipe.get("paper", {}), members.method),
        epsilon=max((e for run in runs if (e := run.last(EPSILON)) is not None), default=None),
    )


def _possible(value: Estimate | None, measure: Metric) -> Estimate | None:
    """Return an estimate whose interval ends where the metric does, such as at 100 %."""
    if value is None or value.low is None or value.high is None:
        return value
    share = measure.unit == "fraction"
    least, most = (0.0, 1.0) if share else (measure.least, measure.most)
    low = value.low if least is None else max(value.low, least)
    high = value.high if most is None else min(value.high, most)
    return replace(value, low=low, high=high)


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


def paper_numbers(printed: Mapping[str, Any], method: str) -> Paper | None:
    """Return what the section ``[paper]`` of a recipe says of a method."""
    pair = printed.get("accuracy", {}).get(method)
    bits = printed.get("communication", {}).get(method)
    if pair is None and bits is None:
        return None
    accuracy = None if pair is None else tuple(value / 100 for value in pair)
    return Paper(printed.get("source", ""), accuracy, bits, tuple(printed.get("departs", ())))


def notes_on(rows: Sequence[Row], metric: str, reference: str | None) -> list[str]:
    """Return one sentence per note: on single rows, on all rows, on pairs of rows."""
    notes = _notes_on_runs([run for row in rows for run in row.runs], metric)
    notes += [note for row in rows for note in _notes_on_row(row, metric)]
    if len({row.settings.get("evaluate.on", "client") for row in rows}) > 1:
        notes.append(
            "mixed metrics: some runs are tested on each client's own rows, others on the whole "
            "test set"
        )
    data_sets = {str(row.settings.get("data.name")) for row in rows}
    if len(data_sets) > 1:
        notes.append(f"different data sets: {', '.join(sorted(data_sets))}")
    of_rows = [shown for row in rows if (shown := over_rows(row.runs, row.measure.name))]
    notes += dict.fromkeys(filter(None, map(note_on_few_rows, of_rows)))
    if reference is not None:
        notes += _notes_on_pairs(rows, reference)
    departures = sorted({row.paper.departs for row in rows if row.paper and row.paper.departs})
    return notes + [
        f"these runs depart from the paper's settings: {', '.join(settings)}"
        for settings in departures
    ]


def _notes_on_row(row: Row, metric: str) -> list[str]:
    notes = []
    missing = [run.folder for run in row.runs if run.rounds and run.last(metric) is None]
    if missing:
        notes.append(f"{row.label}: {len(missing)} of {len(row.runs)} runs have no {metric}")
    fewest, most = row.rounds
    if fewest != most:
        notes.append(f"{row.label}: its seeds are at different rounds, {fewest} to {most}")
    return notes


def _notes_on_runs(runs: Sequence[FinishedRun], metric: str) -> list[str]:
    """Return the notes on single runs; one that several runs share is given once."""
    folders: dict[str, list[str]] = {}
    for run in runs:
        for note in _notes_on_run(run, metric):
            folders.setdefault(note, []).append(str(run.folder))
    return [
        f"{of[0]}: {note}" if len(of) == 1 else f"{len(of)} runs, such as {of[0]}: {note}"
        for note, of in folders.items()
    ]


def _notes_on_run(run: FinishedRun, metric: str) -> list[str]:
    notes = []
    if run.kept is not None:
        notes.append(f"round {run.kept} of {run.done} counts, by validation data")
    if not run.finished:
        notes.append(f"unfinished: round {run.done} of {run.planned}")
    happened = [trouble for line in run.rounds for trouble in troubles(line)]
    refused, absent, late = (
        sum(len(t.clients) for t in happened if t.kind == kind) for kind in KINDS
    )
    if refused:
        uploads = "1 upload was" if refused == 1 else f"{refused} uploads were"
        reason = next(t.reason for t in happened if t.kind == "refused")
        notes.append(f"{uploads} refused; reason of the first: {reason}")
    if late:
        notes.append(f"replies that came too late and were not used: {late}")
    absent -= late
    if absent > 0:
        notes.append(f"clients asked that did not answer, over all rounds: {absent}")
    notes += divergence_notes(run.rounds)
    if part := who_is_missing(run, metric):
        notes.append(f"its {metric} is the mean over {part}")
    rounds, _ = run.column(metric)
    lost = run.kept is None and ends_lost(run.rounds, metric)
    if lost:
        notes.append(f"no model has a score from round {lost} on, so it has no result")
    elif rounds and rounds[-1] != run.done:
        notes.append(f"its last value of {metric} is from round {rounds[-1]}, not {run.done}")
    return notes


def _notes_on_pairs(rows: Sequence[Row], reference: str) -> list[str]:
    compared = [row for row in rows if row.label != reference]
    notes = [
        f"{row.label} has no seed and division in common with {reference}: not compared"
        for row in compared
        if row.versus is None
    ]
    pairs = [r.versus.difference.count for r in compared if r.versus and len(r.divisions) == 1]
    least, tests = smallest_p(min(pairs, default=0)), max(1, len(pairs))
    if not pairs or min(1.0, tests * least) <= SIGNIFICANT:
        return notes
    count, enough = min(pairs), _enough(tests)
    few = f"{count} pair{'s' if count > 1 else ''}: the smallest p possible is {least:.4g}"
    shown = "" if least <= SIGNIFICANT else ", so no p is shown"
    corrected = f", {min(1.0, tests * least):.4g} after Holm's correction" if tests > 1 else ""
    seeds = f"p < {SIGNIFICANT} takes {enough} seeds; for a table, use at least {max(10, enough)}"
    return [*notes, f"{few}{corrected}{shown}; {seeds}"]


def _enough(tests: int) -> int:
    """Return the fewest pairs whose smallest p is significant after Holm's correction."""
    return math.floor(math.log2(2 * tests / SIGNIFICANT)) + 1
