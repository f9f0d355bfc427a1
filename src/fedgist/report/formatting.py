"""Numbers and tables for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from fedgist.report.run_files import ACCURACY, RunFiles

MINUTE = 60  # seconds; and an hour has as many minutes
UNITS = ("B", "kB", "MB", "GB", "TB")


def percent(value: float | None, digits: int = 2) -> str:
    """A fraction as percent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def size(count: float) -> str:
    """Bytes, in thousands."""
    power = min(int(math.log10(count) // 3), len(UNITS) - 1) if count >= 1 else 0
    return f"{count / 1000**power:.{0 if power == 0 else 1}f} {UNITS[power]}"


def bits(count: float) -> str:
    """Bits, in thousands, as the papers print them."""
    return size(count).removesuffix("B") + "b"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), MINUTE)
    hours = minutes // MINUTE
    return f"{hours} h {minutes % MINUTE:02d} min" if hours else f"{minutes} min {rest:02d} s"


def overview(runs: Sequence[RunFiles]) -> Table:
    """A line per run, or per set of seeds.

    Final accuracy over clients, its spread, and what was sent.
    """
    caption = "mean and spread over clients; one model: a global one, all test rows"
    table = Table(
        title="Final round", title_justify="left", caption=caption, caption_justify="left"
    )
    for name in ("method", "rounds", "accuracy", "spread", "one model", "sent up", "sent down"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for (_, name), group in groupby(runs, key=lambda run: (_family(run), run.name)):
        some = list(group)
        accuracies = [a for run in some if (a := run.last(ACCURACY)) is not None]
        spreads = [a for run in some if (a := run.last("eval/client/accuracy_std")) is not None]
        whole = [a for run in some if (a := run.last("eval/global/accuracy")) is not None]
        rounds = [run.rounds[-1]["round"] if run.rounds else 0 for run in some]
        table.add_row(
            name if len(some) == 1 else f"{name}, {len(some)} seeds",
            str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)}-{max(rounds)}",
            mean_and_error(accuracies),
            percent(statistics.fmean(spreads)) if spreads else "-",
            mean_and_error(whole),
            size(statistics.fmean([run.total("comm/up_bytes") for run in some])),
            size(statistics.fmean([run.total("comm/down_bytes") for run in some])),
        )
    return table


def _family(run: RunFiles) -> str:
    return str(run.folder.parent if run.folder.name.startswith("seed-") else run.folder)


def mean_and_error(values: Sequence[float]) -> str:
    """Mean, and the standard error of the mean where there are several values."""
    if not values:
        return "-"
    if len(values) == 1:
        return percent(values[0])
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{100 * statistics.fmean(values):.2f} ± {100 * error:.2f} %"


def by_round(run: RunFiles, most: int = 12) -> Table:
    """Some rounds of one run, evenly spread, the last among them."""
    table = Table(title=str(run.folder), title_justify="left")
    for name in ("round", "accuracy", "spread", "train loss", "sent up", "sent down", "time"):
        table.add_column(name, justify="right")
    count = len(run.rounds)
    for i in sorted(
        {round(k * (count - 1) / max(1, most - 1)) for k in range(most)}
        if count > most
        else range(count)
    ):
        line = run.rounds[i]
        loss = line.get("train/loss")
        table.add_row(
            str(line["round"]),
            percent(line.get(ACCURACY)),
            percent(line.get("eval/client/accuracy_std")),
            "-" if loss is None else f"{loss:.4f}",
            size(line["comm/up_bytes"]),
            size(line["comm/down_bytes"]),
            duration(line.get("time/round_s", 0.0)),
        )
    return table
