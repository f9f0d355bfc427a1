"""Ranks of methods over blocks: Friedman's test, and Nemenyi's critical difference.

A block is a data set as it was divided among clients. Its seeds are averaged first, because seeds
of one division share its test rows: they are no further samples.

References
----------
Demšar, Statistical comparisons of classifiers over multiple data sets, JMLR 7 (2006), section 3.2.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedgist.core.objectives.metrics import Metric
from fedgist.errors import ReportError, listed
from fedgist.recipe.reading import defaults, flat, role_of
from fedgist.report.formatting import Sheet
from fedgist.report.tables.comparison import common_column, draw_of, group_labels
from fedgist.report.tables.stats import (
    FEWEST_BLOCKS,
    FEWEST_METHODS,
    Draw,
    RankTest,
    ScoreTable,
    friedman,
    mean_ranks,
    together,
)
from fedgist.runs.files.columns import measured
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.finished.run_reader import readable

OF_BLOCKS = ("data.", "partition.", "clients.")  # settings by which blocks differ
FEW_BLOCKS = 10  # below which the test's distribution is rough


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods, the best first; rank 1 is best, and ties share the mean of theirs.

    ``scores`` holds each method's score in each block. ``test`` is None where none is possible.
    ``groups`` are the largest sets of neighbors, by place, that the test does not tell apart.
    """

    methods: tuple[str, ...]
    mean_ranks: tuple[float, ...]
    scores: tuple[tuple[float, ...], ...]  # (methods, blocks)
    blocks: tuple[str, ...]
    measure: Metric
    test: RankTest | None
    groups: tuple[tuple[int, int], ...]  # first and last place
    notes: tuple[str, ...] = ()

    def sheet(self) -> Sheet:
        """Return the ranks as a table, with letters for the groups."""
        letters = [
            "".join(chr(ord("a") + i) for i, (a, b) in enumerate(self.groups) if a <= place <= b)
            for place in range(len(self.methods))
        ]
        with_letters = self.test is not None
        rows = tuple(
            (name, f"{rank:.2f}", *([letter] if with_letters else []), *map(self.measure.text, own))
            for name, rank, letter, own in zip(
                self.methods, self.mean_ranks, letters, self.scores, strict=True
            )
        )
        head = ("method", "mean rank", *(["group"] if with_letters else []), *self.blocks)
        title = f"Ranks by {self.measure.title.lower()} over {_blocks(len(self.blocks))}"
        return Sheet(title, head, rows, self._caption())

    def _caption(self) -> str:
        if self.test is None:
            return ""
        count = len(self.methods)
        return (
            f"Friedman: chi-squared {self.test.statistic:.2f} with {count - 1} degrees of freedom, "
            f"p = {self.test.p:.2g}; critical difference of mean ranks at 5 % (Nemenyi): "
            f"{self.test.critical:.2f}; methods with a common letter are not told apart"
        )


def ranks_of(runs: Sequence[FinishedRun], metric: str | None = None) -> Ranks:
    """Return the ranks of the methods of runs.

    ``metric`` is a column of ``rounds.jsonl``; the default is that of a comparison.

    Raises
    ------
    ReportError
        If no two methods share a block, or runs of one method in one block have unlike settings.
    """
    runs, problems = readable(runs)
    metric = common_column(runs) if metric is None else metric
    measure = measured(metric, runs[0].metrics)
    entrants, blocks = _entrants(runs), _block_names(runs)
    values: dict[str, dict[str, dict[Draw, float]]] = {}
    firsts: dict[tuple[str, str, Draw], FinishedRun] = {}
    notes = [*problems]
    for run, entrant, block in zip(runs, entrants, blocks, strict=True):
        first = firsts.setdefault((entrant, block, draw_of(run)), run)
        if first is not run:
            notes.append(_repeated(entrant, block, first, run))
            continue
        if (value := run.last(metric)) is None:
            notes.append(f"{run.folder} is left out: it has no {metric!r}")
            continue
        if not run.finished:
            notes.append(f"{run.folder} is unfinished: its last value counts")
        values.setdefault(entrant, {}).setdefault(block, {})[draw_of(run)] = value
    notes += _unlike(list(firsts.values()))
    names, everywhere = list(values), [b for b in dict.fromkeys(blocks) if _in_all(values, b)]
    if len(names) == 1 or not everywhere:
        raise ReportError(
            f"--ranks: no block with {metric!r} of two methods or more; blocks: "
            f"{listed(list(dict.fromkeys(blocks)))}; methods: {listed(names) or 'none'}"
        )
    notes += [
        f"{block} is left out: it lacks {listed([n for n in names if block not in values[n]])}"
        for block in dict.fromkeys(blocks)
        if block not in everywhere
    ]
    draws = {b: set.intersection(*(set(values[n][b]) for n in names)) for b in everywhere}
    notes += [
        f"{n} in {b}: {len(draws[b])} of {len(values[n][b])} runs count, of the draws that all have"
        for b in everywhere
        for n in names
        if len(draws[b]) < len(values[n][b])
    ]
    if without := [b for b in everywhere if not draws[b]]:
        raise ReportError(f"--ranks: no seed in {without[0]} is one of all methods")
    scores = np.array(
        [
            [statistics.fmean(values[n][b][draw] for draw in sorted(draws[b])) for b in everywhere]
            for n in names
        ]
    )
    return ranked(names, scores, everywhere, measure, notes)


def ranked(
    names: Sequence[str],
    scores: ScoreTable,
    blocks: Sequence[str],
    measure: Metric,
    notes: Sequence[str] = (),
) -> Ranks:
    """Return the ranks of methods by their ``scores`` (methods, blocks)."""
    means = mean_ranks(scores, measure.better)
    order = np.argsort(means, kind="stable")
    test = friedman(scores)
    sorted_means = tuple(means[order].tolist())
    return Ranks(
        tuple(names[i] for i in order),
        sorted_means,
        tuple(map(tuple, scores[order].tolist())),
        tuple(blocks),
        measure,
        test,
        () if test is None else together(sorted_means, test.critical),
        (*notes, *_notes_on(*scores.shape)),
    )


def _notes_on(methods: int, blocks: int) -> list[str]:
    if methods < FEWEST_METHODS:
        return [f"{methods} methods have no critical difference: use --reference"]
    if blocks < FEWEST_BLOCKS:
        why = "one block has no critical difference: seeds of one division are no further blocks"
        return [f"{why}; add data sets, or divisions of the rows (data.division)"]
    if blocks < FEW_BLOCKS:
        return [f"of {blocks} blocks the test tells only large differences"]
    return []


def _in_all(values: Mapping[str, Mapping[str, object]], block: str) -> bool:
    return all(block in own for own in values.values())


def _entrants(runs: Sequence[FinishedRun]) -> list[str]:
    """Return each run's method as a name: the reader's own, or with the options that differ."""
    own = [_settings(run, ("method.",)) for run in runs]
    distinct = {_text(settings): settings for settings in own}
    labels = dict(zip(distinct, group_labels(list(distinct.values())), strict=True))
    return [run.label or labels[_text(settings)] for run, settings in zip(runs, own, strict=True)]


def _block_names(runs: Sequence[FinishedRun]) -> list[str]:
    """Return each run's block as a name: its data set, and what else differs between blocks."""
    own = [_settings(run, OF_BLOCKS) for run in runs]
    keys = {key for settings in own for key in settings}
    differing = sorted(k for k in keys if len({_text(s.get(k)) for s in own}) > 1)
    others = [key for key in differing if key != "data.name"]
    return [
        " ".join([str(s.get("data.name", "data")), *(_setting(key, s.get(key)) for key in others)])
        for s in own
    ]


def _setting(key: str, value: object) -> str:
    last = key.removesuffix(".name").rpartition(".")[2]
    return f"{last}={value:.3g}" if isinstance(value, float) else f"{last}={value}"


def _settings(run: FinishedRun, starts: tuple[str, ...]) -> dict[str, object]:
    stated = {**defaults(), **flat(run.recipe)}
    stated.setdefault("method.name", run.name)
    return {key: value for key, value in stated.items() if key.startswith(starts)}


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _repeated(entrant: str, block: str, first: FinishedRun, run: FinishedRun) -> str:
    """Return a note on a run that repeats another.

    Raises
    ------
    ReportError
        If the two are of unlike settings: one name would stand for both.
    """
    one, other = ({**defaults(), **flat(each.recipe)} for each in (first, run))
    differing = [k for k in {**one, **other} if role_of(k) is None and one.get(k) != other.get(k)]
    if differing:
        raise ReportError(
            f"--ranks: {first.folder} and {run.folder} are both {entrant} on {block}, and differ "
            f"in {listed(sorted(differing))}: leave one out, or name it with --label"
        )
    return f"{run.folder} repeats {first.folder} and is left out"


def _unlike(runs: Sequence[FinishedRun]) -> list[str]:
    """Return a note on settings that differ between runs beside their methods and blocks."""
    stated = [{**defaults(), **flat(run.recipe)} for run in runs]
    keys = dict.fromkeys(key for settings in stated for key in settings)
    differing = [
        key
        for key in keys
        if role_of(key) is None
        and not key.startswith(("method.", *OF_BLOCKS))
        and len({_text(settings.get(key)) for settings in stated}) > 1
    ]
    return [f"runs also differ in {listed(sorted(differing))}"] if differing else []


def _blocks(count: int) -> str:
    return f"{count} block{'s' if count > 1 else ''}"
