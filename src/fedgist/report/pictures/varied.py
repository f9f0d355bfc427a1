"""A metric against a varied setting, as a table or a figure: a line for each other setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedgist.core.objectives.metrics import Metric
from fedgist.errors import ReportError, did_you_mean, shown
from fedgist.report.formatting import Sheet
from fedgist.report.pictures.drawing import (
    STYLE,
    FigureTable,
    Picture,
    matplotlib,
    new_figure,
)
from fedgist.report.pictures.plot_elements import (
    NamedLine,
    draw_band,
    draw_level,
    draw_line,
    name_lines,
)
from fedgist.report.pictures.row_styles import RowStyle, styles_of
from fedgist.report.tables.comparison import Row, Study, group_labels
from fedgist.report.tables.estimate_texts import shower
from fedgist.report.tables.mean_counts import sentence
from fedgist.report.tables.stats import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TIMES = 50  # ratio of largest to smallest value above which the axis is logarithmic


@dataclass(frozen=True)
class VariedLine:
    """Estimates at each value of the setting, in order, and the estimate without the setting."""

    label: str
    method: str
    points: tuple[tuple[float, Estimate], ...]
    without: Estimate | None = None


def varied(rows: Sequence[Row], key: str) -> list[VariedLine]:
    """Return one line for each group of rows that differ only in the setting ``key``."""
    keys = {name for row in rows for name in row.settings}
    if key not in keys:
        raise ReportError(f"no run has the setting {key!r:.80}{did_you_mean(key, sorted(keys))}")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        text = json.dumps({**row.settings, key: None}, sort_keys=True, default=str)
        groups.setdefault(text, []).append(row)
    with_it = {
        text: {**alike[0].settings, key: None}
        for text, alike in groups.items()
        if any(row.settings.get(key) is not None for row in alike)
    }
    names = dict(zip(with_it, group_labels([*with_it.values()]), strict=True))
    # a line that is one row may have the reader's name; without the setting it keeps its own
    own = {text for text, alike in groups.items() if len(alike) == 1 and alike[0].runs[0].label}
    names = {text: name for text, name in names.items() if text not in own}
    return [_line(names.get(t, alike[0].label), alike, key) for t, alike in groups.items()]


def sheet(lines: Sequence[VariedLine], measure: Metric, shown: Sequence[float] = ()) -> Sheet:
    """Return a table with a column for each value of the setting, or for those of ``shown``."""
    show = shower(measure)
    points = [dict(line.points) for line in lines]
    values = sorted({value for line in points for value in line})
    rows = tuple(
        (line.label, *(show(of_line.get(value)) for value in values), show(line.without))
        for line, of_line in zip(lines, points, strict=True)
    )
    columns = ("", *(f"{value:g}" for value in values), "without it")
    kept = [i for i, value in enumerate(values, 1) if value in (shown or values)]
    places = [0, *kept, len(columns) - 1]
    chosen = tuple(tuple(row[i] for i in places) for row in rows)
    return Sheet(measure.title, tuple(columns[i] for i in places), chosen).filled()


def _line(label: str, rows: Sequence[Row], key: str) -> VariedLine:
    points, without = [], None
    for row in rows:
        value = row.settings.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ReportError(
                f"{key} = {shown(value)} of {row.label}: only numbers have a place on an axis"
            )
        if row.final and value is None:
            without = row.final
        elif row.final:
            points.append((float(value or 0), row.final))
    return VariedLine(
        label, rows[0].method, tuple(sorted(points, key=lambda point: point[0])), without
    )


def over(study: Study, key: str) -> Picture:
    """Return the figure of the study's metric against a setting."""
    lines = varied(study.rows, key)
    with matplotlib().rc_context(STYLE):
        figure, axes = new_figure()
        table = draw_varied(axes, lines, study.measure)
        axes.set_xlabel(key)
    caption = "Line: mean over seeds in the last round."
    if any(mean.error for line in lines for _, mean in line.points):
        caption += " Band: plus and minus its standard error."
    if any(line.without for line in lines):
        caption += " A level: without the setting."
    partial = sentence({row.label: row.runs for row in study.rows}, study.metric)
    caption = f"{caption} {partial}".rstrip()
    return Picture(f"over-{key}", f"Over {key}", caption, figure, table)


def draw_varied(axes: Axes, lines: Sequence[VariedLine], measure: Metric) -> FigureTable:
    """Draw and name the lines; return the numbers."""
    scale, title = 100.0 if measure.unit == "fraction" else 1.0, measure.title.lower()
    table: FigureTable = [["row", "value", "mean", "error"]]
    ends, values = [], [value for line in lines for value, _ in line.points]
    if values and min(values) > 0 and max(values) > MOST_TIMES * min(values):
        axes.set_xscale("log")
    for style, line in zip(styles_of([line.method for line in lines]), lines, strict=True):
        table += [[line.label, value, mean.mean, mean.error] for value, mean in line.points]
        if line.points:
            _curve(axes, style, line, scale)
            ends.append(NamedLine(style, line.label))
        if line.without:
            table.append([line.label, "", line.without.mean, line.without.error])
            level = scale * line.without.mean
            draw_level(axes, style, level)
            ends.append(NamedLine(style, line.label))
    axes.set_ylabel(f"{title} (%)" if scale > 1 else title)
    name_lines(axes, ends)
    return table


def _curve(axes: Axes, style: RowStyle, line: VariedLine, scale: float) -> None:
    """Draw the means and errors of a line."""
    x = [value for value, _ in line.points]
    y = [scale * mean.mean for _, mean in line.points]
    low, high = (
        [scale * (mean.mean + sign * (mean.error or 0.0)) for _, mean in line.points]
        for sign in (-1, 1)
    )
    draw_line(axes, style, x, y, dense=True)
    draw_band(axes, style, x, low, high)
