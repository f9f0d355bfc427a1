"""The tables of ``fedgist show``: runs one below the other, and the rounds of one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import groupby

from fedgist.federation.columns import (
    DOWN_BYTES,
    EPSILON,
    TRAIN_LOSS,
    UP_BYTES,
    measured,
    of_all,
    spread_of,
)
from fedgist.federation.record import Line
from fedgist.report.formatting import duration, percent, size
from fedgist.report.run_files import RunFiles
from fedgist.report.sheet import Sheet


def overview(runs: Sequence[RunFiles]) -> Sheet:
    """Return a table with a line for each run, or for each set of seeds.

    Final score over clients (the first metric of the objective), its spread, and the bytes sent.
    """
    score = measured(runs[0].main, runs[0].metrics).title.lower() if runs else "accuracy"
    by_folder = groupby(runs, key=lambda run: (_folder_of_seeds(run), run.name))
    private = any(run.last(EPSILON) is not None for run in runs)
    lines = [(name, list(seeds)) for (_, name), seeds in by_folder]
    columns = ("method", score, "spread", "one model", "rounds", "sent up", "sent down")
    return Sheet(
        "Round kept" if any(run.kept is not None for run in runs) else "Final round",
        columns + (("epsilon",) if private else ()),
        tuple(
            _summary_of(name, seeds) + ((spent(seeds[0].last(EPSILON)),) if private else ())
            for name, seeds in lines
        ),
        "mean and spread over clients; one model: a global one, all test rows",
    )


def spent(epsilon: float | None) -> str:
    """Return how much privacy was spent, as text."""
    return "-" if epsilon is None else f"{epsilon:.3g}"


def _summary_of(name: str, seeds: Sequence[RunFiles]) -> tuple[str, ...]:
    main = seeds[0].main
    spreads = _last_values(seeds, spread_of(main) or "")
    rounds = [run.done for run in seeds]
    return (
        name if len(seeds) == 1 else f"{name}, {len(seeds)} seeds",
        mean_and_error(_last_values(seeds, main)),
        percent(statistics.fmean(spreads)) if spreads else "-",
        mean_and_error(_last_values(seeds, of_all(seeds[0].first))),
        str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)}-{max(rounds)}",
        size(statistics.fmean([run.total(UP_BYTES) for run in seeds])),
        size(statistics.fmean([run.total(DOWN_BYTES) for run in seeds])),
    )


def _folder_of_seeds(run: RunFiles) -> str:
    return str(run.folder.parent if run.folder.name.startswith("seed-") else run.folder)


def _last_values(runs: Sequence[RunFiles], key: str) -> list[float]:
    return [value for run in runs if (value := run.last(key)) is not None]


def mean_and_error(values: Sequence[float]) -> str:
    """Return the mean as percent, with its standard error where there are two values or more."""
    if not values:
        return "-"
    if len(values) == 1:
        return percent(values[0])
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{100 * statistics.fmean(values):.2f} ± {100 * error:.2f} %"


def by_round(run: RunFiles, most: int = 12) -> Sheet:
    """Return a table of at most ``most`` rounds of a run, evenly spread, the last among them."""
    score = measured(run.main, run.metrics).title.lower()
    return rounds_sheet(str(run.folder), run.rounds, run.main, score, most)


def rounds_sheet(title: str, rounds: Sequence[Line], main: str, score: str, most: int) -> Sheet:
    """Return a table of at most ``most`` lines of a record, evenly spread, the last among them.

    ``main`` is the column with the score, and ``score`` what to call it.
    """
    count = len(rounds)
    shown = min(count, most)
    places = sorted({round(k * (count - 1) / max(1, shown - 1)) for k in range(shown)})
    columns = ("round", score, "spread", "train loss", "sent up", "sent down", "time")
    lines = [rounds[place] for place in places]
    if not any(EPSILON in line for line in lines):
        return Sheet(title, columns, tuple(_line_of(line, main) for line in lines))
    with_epsilon = tuple((*_line_of(line, main), spent(line.get(EPSILON))) for line in lines)
    return Sheet(title, (*columns, "epsilon"), with_epsilon)


def _line_of(line: Line, main: str) -> tuple[str, ...]:
    loss = line.get(TRAIN_LOSS)
    return (
        str(line["round"]),
        percent(line.get(main)),
        percent(line.get(spread_of(main) or "")),
        "-" if loss is None else f"{loss:.4f}",
        size(line.get(UP_BYTES) or 0),
        size(line.get(DOWN_BYTES) or 0),
        duration(line.get("time/round_s") or 0.0),
    )
