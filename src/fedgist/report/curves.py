"""Curves of a metric by round and by bytes sent: the mean over seeds, with a band."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedgist.core.metrics import Metric
from fedgist.report.comparison import Study, common_column, group
from fedgist.report.drawing import (
    HEIGHT,
    INK,
    STYLE,
    FigureTable,
    Picture,
    color,
    dashes,
    matplotlib,
    new_figure,
    write_png,
)
from fedgist.report.plot_elements import End, byte_ticks, name_ends, whole_ticks
from fedgist.runs.columns import ACCURACY, measured, spread_of
from fedgist.runs.finished.finished_run import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = "Line: mean over seeds; band: its standard error, or with one seed the spread over clients."


@dataclass(frozen=True)
class RunLines:
    """The data of a figure: runs that differ only in their seed, by label, and a metric.

    ``low`` is the start of the metric's axis; None leaves the start to matplotlib.
    """

    rows: tuple[tuple[str, Sequence[FinishedRun]], ...]
    metric: str
    measure: Metric
    target: float | None = None
    low: float | None = None


def lines_of(study: Study) -> RunLines:
    """Return the lines to draw for a study: one per row."""
    rows = tuple((row.label, row.runs) for row in study.rows)
    return RunLines(rows, study.metric, study.measure, study.target_accuracy)


def lines_of_runs(runs: Sequence[FinishedRun]) -> RunLines:
    """Return the lines to draw for runs: one per setting over all seeds, in their main metric."""
    whole = [run for run in runs if run.recipe]
    metric = common_column(whole) if whole else ACCURACY
    measure = measured(metric, whole[0].metrics) if whole else measured(metric)
    groups, _ = group(whole)
    return RunLines(tuple((rows.label, rows.runs) for rows in groups), metric, measure)


@dataclass(frozen=True)
class ChartCurve:
    """The mean over seeds by round, the limits of its band, and the cumulative bytes sent."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    sent: list[float]


def curve(row: Sequence[FinishedRun], metric: str) -> ChartCurve | None:
    """Return the curve of a row at the rounds that all its runs have, or None without runs."""
    runs = [run for run in row if run.column(metric)[0]]
    if not runs:
        return None
    columns = [dict(zip(*run.column(metric), strict=True)) for run in runs]
    rounds = sorted(set.intersection(*(set(column) for column in columns)))
    means = [statistics.fmean([column[r] for column in columns]) for r in rounds]
    if len(columns) > 1:
        root = len(columns) ** 0.5
        band = [statistics.stdev([column[r] for column in columns]) / root for r in rounds]
    else:
        over_clients = spread_of(metric)
        column = runs[0].column(over_clients) if over_clients else ([], [])
        spread = dict(zip(*column, strict=True))
        band = [spread.get(r, 0.0) for r in rounds]
    low = [mean - half for mean, half in zip(means, band, strict=True)]
    high = [mean + half for mean, half in zip(means, band, strict=True)]
    totals = [run.sent() for run in runs]
    sent = [statistics.fmean([sum(total[r]) for total in totals]) for r in rounds]
    return ChartCurve(rounds, means, low, high, sent)


def by_round(lines: RunLines) -> Picture:
    """Return the figure of the metric by round."""
    figure, axes = new_figure(height=_height(lines))
    table = _draw(lines, axes, by_bytes=False)
    return Picture("by-round", "By round", BAND, figure, table)


def by_bytes(lines: RunLines) -> Picture | None:
    """Return the figure of the metric by bytes sent; None if no row sends anything."""
    figure, axes = new_figure(height=_height(lines))
    table = _draw(lines, axes, by_bytes=True)
    if not any(line[2] for line in table[1:]):
        return None
    caption = f"{BAND} A method that sends nothing is a level: its last round's."
    return Picture("by-bytes", "By communication", caption, figure, table)


def curves_png(lines: RunLines, path: Path) -> None:
    """Write a metric by round and by bytes sent, side by side, to a PNG."""
    with matplotlib().rc_context(STYLE):
        figure, (left, right) = new_figure(10, max(3.8, _height(lines)), columns=2)
        _draw(lines, left, by_bytes=False)
        _draw(lines, right, by_bytes=True)
        right.set_ylabel("")
        figure.supxlabel(BAND, fontsize="small")
        write_png(figure, path)


def _height(lines: RunLines) -> float:
    return max(HEIGHT, 0.2 * len(lines.rows) + 1.2)


def _draw(lines: RunLines, axes: Axes, *, by_bytes: bool) -> FigureTable:
    """Draw the curves and names of the rows; return their numbers as a table."""
    in_percent = lines.measure.unit == "fraction"
    scale = 100.0 if in_percent else 1.0
    table: FigureTable = [["row", "round", "bytes", "mean", "low", "high"]]
    ends, silent, sent = [], [], [0.0]
    for i, (label, runs) in enumerate(lines.rows):
        points = curve(runs, lines.metric)
        if points is None or not points.rounds:
            continue
        columns = (points.rounds, points.sent, points.mean, points.low, points.high)
        table += [[label, *line] for line in zip(*columns, strict=True)]
        last = scale * points.mean[-1]
        if by_bytes and not any(points.sent):
            silent.append((i, last, label))
            continue
        x: Sequence[float] = points.sent if by_bytes else points.rounds
        _line(axes, i, x, [[scale * v for v in column] for column in columns[2:]])
        ends.append(End(i, x[-1], last, label))
        sent += [value for value in x if by_bytes and value]
    if lines.target is not None:
        axes.axhline(scale * lines.target, color=INK, linewidth=0.8, linestyle=":")
    if lines.low is not None:
        high = max((line[5] for line in table[1:]), default=lines.low)
        axes.set_ylim(scale * lines.low, scale * (high + (high - lines.low) / 20))
    title = lines.measure.title.lower()
    axes.set_ylabel(f"{title} (%)" if in_percent else title)
    _finish(axes, ends, silent, sent[1:], by_bytes=by_bytes)
    return table


def _line(axes: Axes, number: int, x: Sequence[float], columns: Sequence[Sequence[float]]) -> None:
    """Draw the mean and its band; a curve with one round is a point."""
    mean, low, high = columns
    hue, name = color(number), f"row-{number}"
    mark = "o" if len(x) == 1 else ""
    axes.plot(x, mean, color=hue, linestyle=dashes(number), marker=mark, gid=name)
    axes.fill_between(x, low, high, color=hue, alpha=0.15, linewidth=0, gid=name)


def _finish(
    axes: Axes,
    ends: Sequence[End],
    silent: Sequence[tuple[int, float, str]],
    sent: Sequence[float],
    *,
    by_bytes: bool,
) -> None:
    """Set up the x axis, draw horizontal lines for rows that send nothing, and name all lines."""
    if by_bytes:
        axes.set_xlabel("payload sent, up and down (log scale)")
        if sent:
            byte_ticks(axes, "x", sent)
    else:
        axes.set_xlabel("round")
        whole_ticks(axes.xaxis)
    for number, level, _ in silent:
        axes.axhline(level, color=color(number), linewidth=1.2, linestyle="--", gid=f"row-{number}")
    right = axes.get_xlim()[1]
    levels = [End(number, right, y, label, "(sends nothing)") for number, y, label in silent]
    name_ends(axes, [*ends, *levels], HEIGHT)
