"""Tables of ``fedgist show``: an overview of runs, and the rounds of one run."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedgist.core.objectives.metrics import ALL_ROWS, METRICS, Metric
from fedgist.report.formatting import NONE, Sheet, bytes_text, duration, replies, score_text
from fedgist.report.tables.comparison import (
    RunGroup,
    common_metric,
    draw_of,
    group,
    overlap_of,
)
from fedgist.report.tables.mean_counts import marked, marked_runs, part_of, sentence
from fedgist.report.tables.stats import by_division, standard_error
from fedgist.runs.files.columns import (
    DOWN_BYTES,
    EPSILON,
    MEAN,
    TRAIN_LOSS,
    UP_BYTES,
    measured,
    metric_of,
    models_of,
    of_all,
    of_server,
    spread_of,
)
from fedgist.runs.files.record import Line
from fedgist.runs.finished.finished_run import FinishedRun

SUMS_ALONE = "epsilon covers the noisy sums alone, as if the trained body did not know the rows"
FROZEN = "epsilon holds if the frozen bodies were made without the rows"
REPLIES = "replied"  # a column that is shown if not all answered in a shown round


def overview(runs: Sequence[FinishedRun]) -> Sheet:
    """Return a table with one row per setting, over its seeds and divisions.

    A run that is there twice has two rows. The columns are the final score (the objective's first
    metric, or the probe's), its spread over clients, the score of the server's models, and the
    bytes sent.
    """
    metric = common_metric(runs) if runs else ""
    metrics = {name: shown for run in runs for name, shown in run.metrics.items()}
    measure = metrics.get(metric, METRICS["accuracy"])
    score = measure.title.lower()
    by_settings = _groups(runs)
    names, groups = [_name(members) for members in by_settings], [m.runs for m in by_settings]
    models = dict.fromkeys(name for run in runs for name in run.models(metric))
    scores = {score: _score, "spread": _spread, "one model": _one_model}
    scores |= {name: functools.partial(_score_of, name) for name in models}
    missing = dict(zip(names, groups, strict=True))
    cells = [{title: cell(measure, seeds) for title, cell in scores.items()} for seeds in groups]
    titles = _filled([score], cells) if models else [*scores]
    # without a spread the scores are of no clients
    told = [t for t in titles if t != "spread" or any(line[t] != NONE for line in cells)]
    private = any(run.last(EPSILON) is not None for run in runs)
    lines = tuple(
        (name, *(texts[title] for title in titles), *_costs(seeds))
        + ((epsilon_text(_epsilon(seeds)),) if private else ())
        for name, seeds, texts in zip(names, groups, cells, strict=True)
    )
    return Sheet(
        "Round kept" if any(run.kept is not None for run in runs) else "Final round",
        ("method", *titles, "rounds", "sent up", "sent down") + (("epsilon",) if private else ()),
        lines,
        "; ".join(
            [
                _legend(told, [n for n in models if n in titles]),
                *simulated(runs),
                *filter(None, [sentence(missing, groups[0][0].column_of(metric)) if runs else ""]),
            ]
        ),
    )


def _legend(titles: Sequence[str], models: Sequence[str]) -> str:
    over = [f"{titles[0]}: mean of the server's models"]
    if "spread" in titles:
        over = [f"{titles[0]}: mean over clients", "spread: standard deviation over clients"]
    of_all_rows = f"one model: {titles[0]} of a global model on all test rows"
    single = [of_all_rows] if "one model" in titles else []
    own = [f"{', '.join(models)}: the server's models, all test rows"] if models else []
    return "; ".join([*over, *single, *own])


def _filled(always: Sequence[str], cells: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the titles of columns with any value, and of the columns in ``always``."""
    titles = cells[0] if cells else always
    return [t for t in titles if t in always or any(line[t] != NONE for line in cells)]


def simulated(runs: Iterable[FinishedRun]) -> list[str]:
    """Return notes on epsilons: what they cover, and whether their noise comes from a seed."""
    runs = list(runs)
    private = [run for run in runs if run.recipe.get("privacy", {}).get("unit", "none") != "none"]
    fixed = [run for run in private if run.recipe["privacy"].get("bodies", "fixed") != "dp_sgd"]
    frozen = [run for run in fixed if (run.recipe.get("model") or {}).get("frozen")]
    notes = [SUMS_ALONE] * (len(frozen) < len(fixed)) + [FROZEN] * bool(frozen)
    seeds = sorted({run.public_noise for run in runs if run.public_noise is not None})
    if not seeds:
        return notes
    whose = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return [*notes, f"epsilon: simulated, noise from {whose}, which anyone can subtract"]


def _epsilon(seeds: Sequence[FinishedRun]) -> float | None:
    """Return the largest epsilon of any run; None if none has one."""
    return max((e for run in seeds if (e := run.last(EPSILON)) is not None), default=None)


def epsilon_text(epsilon: float | None) -> str:
    """Return a spent privacy budget epsilon as text."""
    return NONE if epsilon is None else f"{epsilon:.3g}"


def _groups(runs: Sequence[FinishedRun]) -> list[RunGroup]:
    """Return the rows of ``compare``, and further rows for runs that repeat others."""
    groups, _ = group(runs)
    grouped = {run.folder for members in groups for run in members.runs}
    repeats = [run for run in runs if run.folder not in grouped]
    for again in _groups(repeats) if repeats else ():
        alike = (first.label for first in groups if first.settings == again.settings)
        groups.append(replace(again, label=next(alike, again.label)))
    return groups


def _name(members: RunGroup) -> str:
    runs = members.runs
    drawn = {"seeds": {run.seed for run in runs}, "divisions": {run.division for run in runs}}
    counts = [f"{len(some)} {word}" for word, some in drawn.items() if len(some) > 1]
    return ", ".join([members.label, *counts])


def _score(measure: Metric, seeds: Sequence[FinishedRun]) -> str:
    column = _column(measure, seeds)
    return marked(mean_and_error(seeds, column, measure), marked_runs(seeds, column))


def _column(measure: Metric, seeds: Sequence[FinishedRun]) -> str:
    """Return the column of a metric in the first run that has one; runs that diverged have none."""
    columns = [run.column_of(measure.name) for run in seeds]
    pairs = zip(seeds, columns, strict=True)
    return next((column for run, column in pairs if run.last(column) is not None), columns[0])


def _spread(measure: Metric, seeds: Sequence[FinishedRun]) -> str:
    column = spread_of(_column(measure, seeds)) or ""
    spreads = [value for run in seeds if (value := run.last(column)) is not None]
    return score_text(statistics.fmean(spreads), measure) if spreads else NONE


def _one_model(measure: Metric, seeds: Sequence[FinishedRun]) -> str:
    return mean_and_error(seeds, of_all(measure.name), measure)


def _score_of(model: str, measure: Metric, seeds: Sequence[FinishedRun]) -> str:
    column = of_server(model, ALL_ROWS, measure.name)
    return mean_and_error(seeds, column, measure)


def _costs(seeds: Sequence[FinishedRun]) -> tuple[str, ...]:
    rounds = [run.done for run in seeds]
    return (
        str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)}-{max(rounds)}",
        bytes_text(statistics.fmean([run.total(UP_BYTES) for run in seeds])),
        bytes_text(statistics.fmean([run.total(DOWN_BYTES) for run in seeds])),
    )


def mean_and_error(runs: Sequence[FinishedRun], key: str, measure: Metric) -> str:
    """Return the mean of a column's last values with its unit, and its standard error.

    The samples are seeds, or the divisions of the rows if there are several. One has no error.
    """
    lasts = {draw_of(run): run.last(key) for run in runs}
    values = by_division({draw: value for draw, value in lasts.items() if value is not None})
    if not values:
        return NONE
    mean = score_text(statistics.fmean(values), measure)
    if len(values) == 1:
        return mean
    number, _, unit = mean.partition(" ")
    error, _, _ = score_text(standard_error(values, overlap_of(runs)), measure).partition(" ")
    return f"{number} ± {error} {unit}".rstrip()


def by_round(run: FinishedRun, most: int = 12) -> Sheet:
    """Return a table of at most ``most`` evenly spaced rounds of a run, including the last."""
    measure = measured(run.main, run.metrics)
    return rounds_sheet(f"{run.folder} {run.mark}".rstrip(), run.rounds, run.main, measure, most)


def rounds_sheet(
    title: str, rounds: Sequence[Line], main: str, measure: Metric, most: int
) -> Sheet:
    """Return a table of at most ``most`` evenly spaced lines of a record, including the last.

    ``main`` is the column with the score, and ``measure`` is its metric.
    """
    count = len(rounds)
    shown = min(count, most)
    places = sorted({round(k * (count - 1) / max(1, shown - 1)) for k in range(shown)})
    metric = metric_of(main).removesuffix(MEAN)
    models = models_of({name: None for line in rounds for name in line}, metric)
    score = measure.title.lower()
    columns = {score: main, "spread": spread_of(main) or ""}
    columns |= {name: of_server(name, ALL_ROWS, metric) for name in models}
    cells = [
        {t: score_text(line.get(key), measure) for t, key in columns.items()}
        | {score: marked(score_text(line.get(main), measure), part_of(line, main))}
        | {REPLIES: replies(line).removesuffix(" replied") or NONE}
        for line in rounds
    ]
    titles = _filled([score], cells) if models else [*columns]
    titles += [REPLIES] if any(cells[place][REPLIES] != NONE for place in places) else []
    private = any(EPSILON in rounds[place] for place in places)
    lines = tuple(
        (str(rounds[place]["round"]), *(cells[place][title] for title in titles))
        + _rest_of(rounds[place])
        + ((epsilon_text(rounds[place].get(EPSILON)),) if private else ())
        for place in places
    )
    rest = ("train loss", "sent up", "sent down", "time") + (("epsilon",) if private else ())
    thinned = f"{shown} of {count} rounds, evenly spaced" if shown < count else ""
    return Sheet(title, ("round", *titles, *rest), lines, thinned)


def _rest_of(line: Line) -> tuple[str, ...]:
    loss = line.get(TRAIN_LOSS)
    return (
        NONE if loss is None else f"{loss:.4f}",
        bytes_text(line.get(UP_BYTES) or 0),
        bytes_text(line.get(DOWN_BYTES) or 0),
        duration(line.get("time/round_s") or 0.0),
    )
