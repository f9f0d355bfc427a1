"""Curves of a metric by round and by bytes sent: the mean over seeds, with a band.

All bands of a figure mean the same, and its caption says what.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from fedgist.core.objectives.metrics import Metric
from fedgist.methods.common.method_looks import INK
from fedgist.report.pictures.drawing import (
    HEIGHT,
    STYLE,
    WIDTH,
    FigureTable,
    Picture,
    matplotlib,
    new_figure,
    wrapped,
    write_figure,
)
from fedgist.report.pictures.plot_elements import (
    NamedLine,
    byte_ticks,
    draw_band,
    draw_level,
    draw_line,
    name_lines,
    whole_ticks,
)
from fedgist.report.pictures.row_styles import RowStyle, styles_of
from fedgist.report.tables.comparison import Study, common_column, draw_of, group, overlap_of
from fedgist.report.tables.mean_counts import sentence
from fedgist.report.tables.stats import by_division, standard_error
from fedgist.runs.files.columns import ACCURACY, measured, spread_of
from fedgist.runs.finished.finished_run import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BANDS = 4  # more bands of clients cover each other; the figure over clients shows them
Band = Literal["seeds", "clients", "none"]
CAPTIONS: Mapping[Band, str] = MappingProxyType(
    {
        "seeds": "Line: mean over seeds. Band: plus and minus its standard error.",
        "clients": "One seed per row. Band: plus and minus the standard deviation over clients.",
        "none": "One seed per row.",
    }
)


@dataclass(frozen=True)
class RunLines:
    """The data of a figure: runs that differ only in their seed, by label, and a metric.

    ``methods`` are the methods of the rows, which give them their colours. ``low`` is the start of
    the metric's axis; None leaves the start to matplotlib.
    """

    rows: tuple[tuple[str, Sequence[FinishedRun]], ...]
    methods: tuple[str, ...]
    metric: str
    measure: Metric
    target: float | None = None
    low: float | None = None

    @property
    def band(self) -> Band:
        """What all bands of the figure show: the error over seeds, else the clients of few rows."""
        if any(len(with_metric(runs, self.metric)) > 1 for _, runs in self.rows):
            return "seeds"
        over_clients = spread_of(self.metric)
        scored = [run for _, runs in self.rows for run in with_metric(runs, self.metric)]
        few = over_clients is not None and 0 < len(scored) <= MOST_BANDS
        all_have = few and all(run.column(over_clients or "")[0] for run in scored)
        return "clients" if all_have else "none"

    @property
    def caption(self) -> str:
        """What lines and bands show, which rows have no band, and which lines are cut."""
        about = self._about_band, self._about_ends, sentence(dict(self.rows), self.metric)
        return " ".join(filter(None, about))

    @property
    def _about_ends(self) -> str:
        """Which rows have runs that end at different rounds, so that their line ends early."""
        last = {
            label: {run.column(self.metric)[0][-1] for run in with_metric(runs, self.metric)}
            for label, runs in self.rows
        }
        cut = [f"{label} ({min(at)} of {max(at)})" for label, at in last.items() if len(at) > 1]
        return f"Lines end with the first of their runs: {', '.join(cut)} rounds." if cut else ""

    @property
    def _about_band(self) -> str:
        if self.band != "seeds":
            return CAPTIONS[self.band]
        lone = [label for label, runs in self.rows if len(with_metric(runs, self.metric)) == 1]
        return CAPTIONS["seeds"] + (f" One seed, no band: {', '.join(lone)}." if lone else "")


def with_metric(runs: Sequence[FinishedRun], metric: str) -> list[FinishedRun]:
    """Return the runs that have values of a metric."""
    return [run for run in runs if run.column(metric)[0]]


def lines_of(study: Study) -> RunLines:
    """Return the lines to draw for a study: one per row."""
    rows = tuple((row.label, row.runs) for row in study.rows)
    methods = tuple(row.method for row in study.rows)
    return RunLines(rows, methods, study.metric, study.measure, study.target_accuracy)


def lines_of_runs(runs: Sequence[FinishedRun]) -> RunLines:
    """Return the lines to draw for runs: one per setting over all seeds, in their main metric."""
    whole = [run for run in runs if run.recipe]
    metric = common_column(whole) if whole else ACCURACY
    measure = measured(metric, whole[0].metrics) if whole else measured(metric)
    groups, _ = group(whole)
    rows = tuple((members.label, members.runs) for members in groups)
    return RunLines(rows, tuple(members.method for members in groups), metric, measure)


@dataclass(frozen=True)
class ChartCurve:
    """The mean over seeds by round, the limits of its band, and the cumulative bytes sent."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    sent: list[float]


def curve(row: Sequence[FinishedRun], metric: str, band: Band = "seeds") -> ChartCurve | None:
    """Return the curve of a row at the rounds that all its runs have, or None without runs.

    ``band`` says what the limits show; without it, as with one seed for an error, they are the
    mean.
    """
    runs = with_metric(row, metric)
    if not runs:
        return None
    columns = {draw_of(run): dict(zip(*run.column(metric), strict=True)) for run in runs}
    rounds = sorted(set.intersection(*(set(column) for column in columns.values())))
    samples = [by_division({draw: of[r] for draw, of in columns.items()}) for r in rounds]
    means = [statistics.fmean(values) for values in samples]
    halves = [0.0] * len(rounds)
    if band == "seeds" and len(columns) > 1:
        halves = [standard_error(values, overlap_of(runs)) for values in samples]
    elif band == "clients":
        spread = dict(zip(*runs[0].column(spread_of(metric) or ""), strict=True))
        halves = [spread.get(r, 0.0) for r in rounds]
    low = [mean - half for mean, half in zip(means, halves, strict=True)]
    high = [mean + half for mean, half in zip(means, halves, strict=True)]
    totals = [run.sent() for run in runs]
    sent = [statistics.fmean([sum(total[r]) for total in totals]) for r in rounds]
    return ChartCurve(rounds, means, low, high, sent)


def by_round(lines: RunLines) -> Picture:
    """Return the figure of the metric by round."""
    figure, axes = new_figure()
    table, ends = _draw(lines, axes, by_bytes=False)
    name_lines(axes, ends)
    return Picture("by-round", "By round", lines.caption, figure, table)


def by_bytes(lines: RunLines) -> Picture | None:
    """Return the figure of the metric by bytes sent; None if no row sends anything."""
    figure, axes = new_figure()
    table, ends = _draw(lines, axes, by_bytes=True)
    if not any(line[2] for line in table[1:]):
        return None
    name_lines(axes, ends)
    caption = f"{lines.caption} A method that sends nothing is a level: its last round's."
    return Picture("by-bytes", "By communication", caption, figure, table)


def curves_figure(lines: RunLines, path: Path) -> None:
    """Write a metric by round and by bytes sent, side by side, to a file."""
    with matplotlib().rc_context(STYLE):
        figure, both = new_figure(2 * WIDTH, HEIGHT + 0.2, columns=2)
        ends = [_draw(lines, axes, by_bytes=i > 0)[1] for i, axes in enumerate(both)]
        both[1].set_ylabel("")
        figure.suptitle(wrapped(lines.caption, 110), fontsize="medium")
        name_lines(both[0], [end for some in ends for end in some])
        write_figure(figure, path)


def _draw(lines: RunLines, axes: Axes, *, by_bytes: bool) -> tuple[FigureTable, list[NamedLine]]:
    """Draw the curves of the rows; return their numbers as a table, and their names."""
    scale = 100.0 if lines.measure.unit == "fraction" else 1.0
    table: FigureTable = [["row", "round", "bytes", "mean", "low", "high"]]
    ends, silent, sent = [], [], []
    for style, (label, runs) in zip(styles_of(lines.methods), lines.rows, strict=True):
        points = curve(runs, lines.metric, lines.band)
        if points is None or not points.rounds:
            continue
        columns = (points.rounds, points.sent, points.mean, points.low, points.high)
        table += [[label, *line] for line in zip(*columns, strict=True)]
        last = scale * points.mean[-1]
        if by_bytes and not any(points.sent):
            silent.append((style, last, label))
            continue
        x: Sequence[float] = points.sent if by_bytes else points.rounds
        mean, low, high = ([scale * v for v in column] for column in columns[2:])
        draw_line(axes, style, x, mean)
        draw_band(axes, style, x, low, high)
        ends.append(NamedLine(style, label))
        sent += [value for value in x if by_bytes and value]
    _scale_y(lines, axes, [line[5] for line in table[1:]])
    _scale_x(axes, sent, by_bytes=by_bytes)
    return table, [*ends, *_levels(axes, silent)]


def _scale_y(lines: RunLines, axes: Axes, highs: Sequence[float]) -> None:
    """Name the y axis, draw the target, and start at the lowest value that is asked for."""
    scale = 100.0 if lines.measure.unit == "fraction" else 1.0
    if lines.target is not None:
        axes.axhline(scale * lines.target, color=INK, linewidth=0.8, linestyle=":")
    if lines.low is not None:
        high = max(highs, default=lines.low)
        axes.set_ylim(scale * lines.low, scale * (high + (high - lines.low) / 20))
    title = lines.measure.title.lower()
    axes.set_ylabel(f"{title} (%)" if scale > 1 else title)


def _scale_x(axes: Axes, sent: Sequence[float], *, by_bytes: bool) -> None:
    """Name the x axis, and set its ticks."""
    if by_bytes:
        axes.set_xlabel("payload sent, up and down (log scale)")
        if sent:
            byte_ticks(axes, "x", sent)
    else:
        axes.set_xlabel("round")
        whole_ticks(axes.xaxis)


def _levels(axes: Axes, silent: Sequence[tuple[RowStyle, float, str]]) -> list[NamedLine]:
    """Draw horizontal lines for rows that send nothing; return them with their names."""
    for style, level, _ in silent:
        draw_level(axes, style, level)
    return [NamedLine(style, label, "(sends nothing)") for style, _, label in silent]
