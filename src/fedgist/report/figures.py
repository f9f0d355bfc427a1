"""Curves and partitions as pictures: PNG by matplotlib, or in characters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgist.errors import ReportError
from fedgist.report.drawing import bubbles, new_figure
from fedgist.report.run_files import ACCURACY, RunFiles
from fedgist.report.text_chart import chart


def curves_png(runs: Sequence[RunFiles], path: Path) -> None:
    """Accuracy by round, and by bytes sent, of several runs.

    The band is the spread over clients.
    """
    figure, (by_round, by_bytes) = new_figure(10, 4, columns=2)
    for run in runs:
        rounds, values = run.column(ACCURACY)
        if not rounds:
            continue
        accuracy = [100 * v for v in values]
        line = by_round.plot(rounds, accuracy, label=run.name, linewidth=1.8)[0]
        _, spread = run.column("eval/client/accuracy_std")
        low = [a - 100 * s for a, s in zip(accuracy, spread, strict=True)]
        high = [min(100.0, a + 100 * s) for a, s in zip(accuracy, spread, strict=True)]
        by_round.fill_between(rounds, low, high, color=line.get_color(), alpha=0.1, linewidth=0)
        sent, total = {}, 0
        for row in run.rounds:
            total += row["comm/up_bytes"] + row["comm/down_bytes"]
            sent[row["round"]] = total
        if total:
            by_bytes.plot(
                [sent[r] for r in rounds],
                accuracy,
                label=run.name,
                linewidth=1.8,
                color=line.get_color(),
            )
    by_round.set(
        xlabel="round",
        ylabel="accuracy, mean of clients (%)",
        title="By round; band: spread over clients",
    )
    by_bytes.set(xlabel="bytes sent, up and down", title="By communication")
    if any(run.total("comm/up_bytes") for run in runs):
        by_bytes.set_xscale("log")
    for axes in (by_round, by_bytes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    by_round.legend(frameon=False)
    _save(figure, path)


def curves_text(runs: Sequence[RunFiles], width: int = 78) -> str:
    """Accuracy by round, in characters."""
    curves = {}
    for run in runs:
        name = run.name if run.name not in curves else str(run.folder)
        curves[name] = [(float(r), 100 * v) for r, v in zip(*run.column(ACCURACY), strict=True)]
    return chart(curves, width, x_label="round", y_label="accuracy, mean of clients, %")


def partition_png(counts: Sequence[Sequence[int]], classes: Sequence[str], path: Path) -> None:
    """Who has what: a bubble for each client and class, its area the rows."""
    figure, axes = new_figure(max(5.0, 0.22 * len(counts) + 2), 0.3 * len(classes) + 1.5)
    most = bubbles(axes, counts, classes)
    axes.set_title(f"Training rows; the largest bubble is {most}")
    axes.grid(alpha=0.2)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.part{path.suffix or '.png'}")
    try:
        figure.savefig(part, dpi=150)
        part.replace(path)
    except ValueError as error:  # a format that matplotlib does not know
        raise ReportError(str(error)) from error
    finally:
        part.unlink(missing_ok=True)
