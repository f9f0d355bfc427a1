"""Numbers in words, and the tables of ``fedgist show``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from fedgist.federation.columns import GLOBAL_ACCURACY, measured, spread_of
from fedgist.report.run_files import RunFiles

MINUTE = 60  # seconds; and an hour has as many minutes
UNITS = ("B", "kB", "MB", "GB", "TB")


def percent(value: float | None, digits: int = 2) -> str:
    """Return a fraction as percent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def size(count: float) -> str:
    """Return a number of bytes with its unit, in steps of a thousand."""
    power = min(int(math.log10(count) // 3), len(UNITS) - 1) if count >= 1 else 0
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {UNITS[power]}"


def bits(count: float) -> str:
    """Return a number of bits with its unit, in steps of a thousand, as the papers print them."""
    return size(count).removesuffix("B") + "b"


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), MINUTE)
    hours = minutes // MINUTE
    return f"{hours} h {minutes % MINUTE:02d} min" if hours else f"{minutes} min {rest:02d} s"


def overview(runs: Sequence[RunFiles]) -> Table:
    """Return a table with a line for each run, or for each set of seeds.

    Final score over clients (the first metric of the objective), its spread, and the bytes sent.
    """
    caption = "mean and spread over clients; one model: a global one, all test rows"
    table = Table(
        title="Final round", title_justify="left", caption=caption, caption_justify="left"
    )
    score = measured(runs[0].main, runs[0].metrics).title.lower() if runs else "accuracy"
    for name in ("method", "rounds", score, "spread", "one model", "sent up", "sent down"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for (_, name), group in groupby(runs, key=lambda run: (_folder_of_seeds(run), run.name)):
        seeds = list(group)
        main = seeds[0].main
        spreads = _last_values(seeds, spread_of(main) or "")
        rounds = [run.done for run in seeds]
        table.add_row(
            name if len(seeds) == 1 else f"{name}, {len(seeds)} seeds",
            str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)}-{max(rounds)}",
            mean_and_error(_last_values(seeds, main)),
            percent(statistics.fmean(spreads)) if spreads else "-",
            mean_and_error(_last_values(seeds, GLOBAL_ACCURACY)),
            size(statistics.fmean([run.total("comm/up_bytes") for run in seeds])),
            size(statistics.fmean([run.total("comm/down_bytes") for run in seeds])),
        )
    return table


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


def by_round(run: RunFiles, most: int = 12) -> Table:
    """Return a table of at most ``most`` rounds of a run, evenly spread, the last among them."""
    table = Table(title=str(run.folder), title_justify="left")
    score = measured(run.main, run.metrics).title.lower()
    for name in ("round", score, "spread", "train loss", "sent up", "sent down", "time"):
        table.add_column(name, justify="right")
    count = len(run.rounds)
    shown = min(count, most)
    places = sorted({round(k * (count - 1) / max(1, shown - 1)) for k in range(shown)})
    for line in [run.rounds[place] for place in places]:
        loss = line.get("train/loss")
        table.add_row(
            str(line["round"]),
            percent(line.get(run.main)),
            percent(line.get(spread_of(run.main) or "")),
            "-" if loss is None else f"{loss:.4f}",
            size(line["comm/up_bytes"]),
            size(line["comm/down_bytes"]),
            duration(line.get("time/round_s", 0.0)),
        )
    return table
