"""Runs into a table that can be defended: grouped by their settings, paired by their seeds.

Which round is reported is fixed beforehand (the last one); the best round stands beside it,
labelled, because picking it by test accuracy is no result. Communication to a target is counted
seed by seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgist.errors import ReportError, one_of
from fedgist.federation.record import summary
from fedgist.report.run_files import ACCURACY, RunFiles
from fedgist.report.stats import Better, Comparison, Estimate, compare, estimate, smallest_p

# what does not make an experiment another one: the seed, how the work was done, what the paper
# printed
ASIDE = ("seed", "engine.", "paper.", "evaluate.every", "evaluate.save_features")
SIGNIFICANT = 0.05
SIGNIFICANT_SEEDS = math.ceil(
    -math.log2(SIGNIFICANT)
)  # the fewest pairs that can give such a p, one-tailed
LAST = 10  # evaluations that a mean of the last ones takes


@dataclass(frozen=True)
class Target:
    """What it took to reach an accuracy: rounds and bytes, and how many seeds reached it.

    For a seed that never did, the round of its highest accuracy counts (the papers' rule): such a
    row is marked.
    """

    reached: int
    rounds: Estimate
    up: Estimate
    down: Estimate
    both: Estimate


@dataclass(frozen=True)
class Paper:
    """What the paper printed: accuracy and its standard error (fractions), bits to its target."""

    source: str
    accuracy: tuple[float, float] | None
    bits: float | None
    departs: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """Runs that differ in nothing but the seed."""

    label: str
    method: str
    settings: Mapping[str, Any]
    runs: tuple[RunFiles, ...]
    final: Estimate | None
    last10: Estimate | None
    best: Estimate | None
    up: Estimate | None
    down: Estimate | None
    versus: Comparison | None = None
    target: Target | None = None
    paper: Paper | None = None

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return [run.seed for run in self.runs]

    @property
    def rounds(self) -> tuple[int, int]:
        """The fewest and the most rounds done."""
        done = [run.done for run in self.runs]
        return min(done), max(done)

    @property
    def unfinished(self) -> int:
        """How many of the runs have not come to their end."""
        return sum(not run.finished for run in self.runs)


@dataclass(frozen=True)
class Study:
    """The rows, what they are measured by, and what a reader has to know beside the numbers."""

    rows: tuple[Row, ...]
    metric: str
    better: Better
    reference: str | None
    target_accuracy: float | None  # a fraction
    notes: tuple[str, ...]


def study(
    runs: Sequence[RunFiles],
    *,
    reference: str | None = None,
    metric: str = ACCURACY,
    target_accuracy: float | None = None,
) -> Study:
    """Group, pair and summarize runs.

    Parameters
    ----------
    reference
        Label or method of the row that the others are compared with.
    metric
        Column of ``rounds.jsonl``; one whose name speaks of loss is better when lower.
    target_accuracy
        A fraction; if not given, the paper's, where all recipes name one.

    Raises
    ------
    ReportError
        If no run has the metric, or there is no such reference.
    """
    better: Better = "lower" if "loss" in metric else "higher"
    if target_accuracy is not None and "accuracy" not in metric:
        msg = f"a target accuracy is no target for {metric}"
        raise ReportError(msg)
    notes = [problem for run in runs for problem in run.problems]
    runs = [run for run in runs if run.recipe]
    if not runs:
        raise ReportError(notes[0] if notes else "there is no run")  # said once
    groups = _groups(runs, notes)
    if not any(run.last(metric) is not None for run in runs):
        columns = sorted(
            {
                k
                for run in runs
                for line in run.rounds[-1:]
                for k in line
                if k.startswith(("eval/", "train/"))
            }
        )
        msg = f"no run has {metric!r}; columns: {', '.join(columns) or 'none (no round is done)'}"
        raise ReportError(msg)
    if target_accuracy is None:
        named = {run.recipe.get("paper", {}).get("target_accuracy") for run in runs}
        target_accuracy = named.pop() if len(named) == 1 and "accuracy" in metric else None
        target_accuracy = None if target_accuracy is None else target_accuracy / 100
    labels = _labels([settings for settings, _ in groups])
    chosen = _reference(reference, labels, [s["method.name"] for s, _ in groups])
    reference_values = _finals(groups[chosen][1], metric) if chosen is not None else {}
    rows = tuple(
        _row(
            label,
            settings,
            some,
            metric,
            better,
            target_accuracy,
            reference_values if i != chosen else {},
        )
        for i, (label, (settings, some)) in enumerate(zip(labels, groups, strict=True))
    )
    notes += _remarks(rows, metric, None if chosen is None else labels[chosen])
    return Study(
        rows,
        metric,
        better,
        None if chosen is None else labels[chosen],
        target_accuracy,
        tuple(notes),
    )


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a recipe's settings by dotted key."""
    out: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}{key}"
        out |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return out


def _groups(
    runs: Sequence[RunFiles], notes: list[str]
) -> list[tuple[dict[str, Any], list[RunFiles]]]:
    groups: dict[str, tuple[dict[str, Any], dict[int, RunFiles]]] = {}
    for run in runs:
        settings = {k: v for k, v in flat(run.recipe).items() if not k.startswith(ASIDE)}
        settings.setdefault("method.name", run.name)
        _, members = groups.setdefault(
            json.dumps(settings, sort_keys=True, default=str), (settings, {})
        )
        if run.seed in members:
            notes.append(
                f"{run.folder} repeats {members[run.seed].folder} (same settings and seed) and "
                "is left out"
            )
        else:
            members[run.seed] = run
    return [(s, [members[seed] for seed in sorted(members)]) for s, members in groups.values()]


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each row by its method, and by those settings in which rows of that method differ."""
    short = [_label(mine, settings, briefly=True) for mine in settings]
    return [
        label if short.count(label) == 1 else _label(mine, settings, briefly=False)
        for label, mine in zip(short, settings, strict=True)
    ]


def _label(mine: Mapping[str, Any], settings: Sequence[Mapping[str, Any]], *, briefly: bool) -> str:
    alike = [s for s in settings if s["method.name"] == mine["method.name"]]
    differing = [k for k in mine if any(other.get(k) != mine[k] for other in alike)]
    words = [mine["method.name"]]
    for key in differing:
        last = key.rpartition(".")[2]
        alone = sum(k.rpartition(".")[2] == last for k in differing) == 1
        value = f"{mine[key]:.3g}" if briefly and isinstance(mine[key], float) else str(mine[key])
        words.append(f"{last if briefly and alone else key}={value}")
    return " ".join(words)


def _reference(name: str | None, labels: Sequence[str], methods: Sequence[str]) -> int | None:
    if name is None:
        return None
    if name in labels:
        return labels.index(name)
    if methods.count(name) == 1:
        return methods.index(name)
    try:
        one_of(name, labels, "reference")
    except ValueError as error:
        raise ReportError(str(error)) from error
    raise AssertionError  # one_of knows the labels: one of them would have been found above


def _finals(runs: Iterable[RunFiles], metric: str) -> dict[int, float]:
    return {run.seed: value for run in runs if (value := run.last(metric)) is not None}


def _row(
    label: str,
    settings: Mapping[str, Any],
    runs: Sequence[RunFiles],
    metric: str,
    better: Better,
    target_accuracy: float | None,
    reference: Mapping[int, float],
) -> Row:
    ends = [end for run in runs if (end := summary(run.rounds, metric, better))]

    def over_seeds(value: Callable[[RunFiles], float]) -> Estimate | None:
        return estimate([value(run) for run in runs if run.rounds])

    return Row(
        label=label,
        method=settings["method.name"],
        settings=settings,
        runs=tuple(runs),
        final=estimate([end["final"] for end in ends], interval=True),
        last10=estimate([end["last10_mean"] for end in ends if end["last10_count"] == LAST]),
        best=estimate([end["best"] for end in ends]),
        up=over_seeds(lambda run: run.total("comm/up_bytes")),
        down=over_seeds(lambda run: run.total("comm/down_bytes")),
        versus=compare(_finals(runs, metric), reference, better),
        target=None if target_accuracy is None else _target(runs, metric, target_accuracy, better),
        paper=_paper(runs, settings["method.name"]),
    )


def _target(runs: Sequence[RunFiles], metric: str, goal: float, better: Better) -> Target | None:
    reached, ends = 0, []
    for run in runs:
        rounds, values = run.column(metric)
        if not rounds:
            continue
        sign = 1 if better == "higher" else -1
        hits = [r for r, v in zip(rounds, values, strict=True) if sign * v >= sign * goal]
        reached += bool(hits)
        at = (
            hits[0]
            if hits
            else max(zip(rounds, values, strict=True), key=lambda pair: sign * pair[1])[0]
        )
        ends.append((at, *run.sent()[at]))
    if not ends:
        return None
    found = [
        estimate(column)
        for column in ([e[0] for e in ends], [e[1] for e in ends], [e[2] for e in ends])
    ]
    both = estimate([up + down for _, up, down in ends])
    rounds_, up_, down_ = (e for e in found if e is not None)
    assert both is not None  # there is at least one
    return Target(reached, rounds_, up_, down_, both)


def _paper(runs: Sequence[RunFiles], method: str) -> Paper | None:
    printed = runs[0].recipe.get("paper", {})
    pair, bits = (
        printed.get("accuracy", {}).get(method),
        printed.get("communication", {}).get(method),
    )
    if pair is None and bits is None:
        return None
    accuracy = None if pair is None else (pair[0] / 100, pair[1] / 100)
    return Paper(printed.get("source", ""), accuracy, bits, tuple(printed.get("departs", ())))


def _remarks(rows: Sequence[Row], metric: str, reference: str | None) -> list[str]:
    """Say what the numbers alone do not."""
    notes = [note for row in rows for note in _remarks_on_row(row, metric)]
    few = [len(row.runs) for row in rows if 1 < len(row.runs) < SIGNIFICANT_SEEDS]
    if few:
        notes.append(f"{min(few)} seeds: the interval of so few is little more than their range")
    if len({row.settings.get("evaluate.on", "client") for row in rows}) > 1:
        notes.append(
            "mixed metrics: some runs are tested on each client's own rows, others on the whole "
            "test set"
        )
    data = {str(row.settings.get("data.name")) for row in rows}
    if len(data) > 1:
        notes.append(f"different data sets: {', '.join(sorted(data))}")
    if reference is not None:
        notes += _remarks_on_pairs(rows, reference)
    departs = sorted({row.paper.departs for row in rows if row.paper and row.paper.departs})
    return notes + [
        f"these runs depart from the paper's settings: {', '.join(some)}" for some in departs
    ]


def _remarks_on_row(row: Row, metric: str) -> list[str]:
    notes = []
    for run in row.runs:
        rounds, _ = run.column(metric)
        if not run.finished:
            notes.append(f"{run.folder} is unfinished: round {run.done} of {run.planned}")
        if any(line.get("refused") for line in run.rounds):
            notes.append(_refusals(run))
        if rounds and rounds[-1] != run.done:
            notes.append(
                f"{run.folder}: its last {metric} is of round {rounds[-1]}, not {run.done}"
            )
    missing = [run.folder for run in row.runs if run.rounds and run.last(metric) is None]
    if missing:
        notes.append(f"{row.label}: {len(missing)} of {len(row.runs)} runs have no {metric}")
    if row.rounds[0] != row.rounds[1]:
        notes.append(
            f"{row.label}: its seeds have come to different rounds, {row.rounds[0]} to "
            f"{row.rounds[1]}"
        )
    return notes


def _refusals(run: RunFiles) -> str:
    refused = [one for line in run.rounds for one in line.get("refused") or ()]
    return (
        f"{run.folder}: {len(refused)} uploads were refused; the first: {refused[0].get('reason')}"
    )


def _remarks_on_pairs(rows: Sequence[Row], reference: str) -> list[str]:
    compared = [row for row in rows if row.label != reference]
    notes = [
        f"{row.label} has no seed in common with {reference}: not compared"
        for row in compared
        if row.versus is None
    ]
    pairs = [row.versus.difference.count for row in compared if row.versus]
    if pairs and (least := smallest_p(min(pairs))) > SIGNIFICANT / 2:
        few, enough = min(pairs), SIGNIFICANT_SEEDS
        possible = (
            f"the smallest p possible is {least:.4g} one-tailed, {min(1.0, 2 * least):.4g} "
            "two-sided"
        )
        more = f"; p < {SIGNIFICANT} takes {enough} seeds" if few < enough else ""
        notes.append(f"{few} pair{'s' if few > 1 else ''}: {possible}{more}")
    return notes
