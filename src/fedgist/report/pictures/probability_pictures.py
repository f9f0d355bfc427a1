"""Figures of two classes: calibration, and decision curves, from saved predictions of test rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedgist.methods.common.method_looks import INK
from fedgist.report.pictures.drawing import FigureTable, Picture, new_figure
from fedgist.report.pictures.plot_elements import NamedLine, draw_line, name_lines
from fedgist.report.pictures.row_styles import RowStyle, styles_of
from fedgist.report.tables.comparison import Row, Study
from fedgist.report.tables.thresholds import positive_class, positive_name
from fedgist.runs.files.prediction_file import TEST, Numbers

MOST_BINS, FEWEST_ROWS = 10, 10  # of a calibration curve, and in each of its bins
CHANCES = np.arange(1, 100) / 100  # at which a row is called positive, in decision curves

Line = tuple[RowStyle, str, Numbers, Numbers]  # style, label, probabilities and truth of the rows


def of_probabilities(study: Study) -> list[Picture]:
    """Return the two figures, or none if no row of the study has predictions of two classes."""
    names = [name for row in study.rows for run in row.runs if (name := positive_name(run))]
    styles = styles_of([row.method for row in study.rows])
    lines = [
        (style, row.label, *rows)
        for style, row in zip(styles, study.rows, strict=True)
        if {positive_name(run) for run in row.runs} == {*names[:1]}
        and (rows := _rows(row)) is not None
    ]
    if not lines:
        return []
    return [_calibration(lines, names[0]), _decisions(lines, names[0])]


def _rows(row: Row) -> tuple[Numbers, Numbers] | None:
    """Return the probabilities of the positive class, and which rows are positive: (rows,) each."""
    scores, marks = [], []
    for run in row.runs:
        said, positive = run.predictions, positive_class(run)
        if said is None or positive is None:
            return None
        test = said.of(TEST)
        scores.append(test.probability[:, positive].astype(np.float64))
        marks.append(test.label == positive)
    score, mark = np.concatenate(scores), np.concatenate(marks)
    return (score, mark) if len(score) else None


def _calibration(lines: Sequence[Line], name: str) -> Picture:
    figure, axes = new_figure()
    axes.plot([0, 100], [0, 100], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    table: FigureTable = [["row", "mean_probability", "share_positive", "rows"]]
    for style, label, score, mark in lines:
        bins = max(1, min(MOST_BINS, len(score) // FEWEST_ROWS))
        groups = np.array_split(np.argsort(score, kind="stable"), bins)
        points = [(float(score[g].mean()), float(mark[g].mean()), len(g)) for g in groups]
        table += [[label, *point] for point in points]
        x, y = ([100 * point[place] for point in points] for place in (0, 1))
        draw_line(axes, style, x, y, dense=True)
    axes.set(xlabel=f"mean probability of {name} (%)", ylabel=f"rows that are {name} (%)")
    axes.set(xlim=(-3, 103), ylim=(-3, 103))
    name_lines(axes, [NamedLine(style, label) for style, label, _, _ in lines])
    caption = (
        f"Test rows of all clients and runs, in up to {MOST_BINS} groups of equal size by their "
        "probability. On the dashed line probabilities are what they say."
    )
    return Picture("calibration", f"Calibration for {name}", caption, figure, table)


def _decisions(lines: Sequence[Line], name: str) -> Picture:
    """Draw the net benefit (Vickers and Elkin 2006) of calling rows positive from a chance on."""
    figure, axes = new_figure()
    table: FigureTable = [["row", "chance", "net_benefit"]]
    odds, highest = CHANCES / (1 - CHANCES), 0.0
    everyone = np.concatenate([mark for _, _, _, mark in lines])
    for style, label, score, mark in lines:
        called = score >= CHANCES[:, None]
        found, spared = (called & mark).mean(1), (called & ~mark).mean(1)
        benefit = found - spared * odds
        table += [[label, c, b] for c, b in zip(CHANCES.tolist(), benefit.tolist(), strict=True)]
        draw_line(axes, style, (100 * CHANCES).tolist(), benefit.tolist())
        highest = max(highest, float(benefit.max()))
    share = float(everyone.mean())
    all_called = share - (1 - share) * odds
    table += [["all", c, b] for c, b in zip(CHANCES.tolist(), all_called.tolist(), strict=True)]
    axes.plot(100 * CHANCES, all_called, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.axhline(0, color=INK, linewidth=0.8)
    highest = max(highest, share)
    axes.set(xlabel=f"chance of {name} from which one acts (%)", ylabel="net benefit per row")
    axes.set(xlim=(0, 100), ylim=(-0.15 * highest, 1.08 * highest))
    name_lines(axes, [NamedLine(style, label) for style, label, _, _ in lines])
    caption = (
        "Net benefit: share of rows rightly called positive, minus the share wrongly called so "
        "times the odds of the chance from which one acts (Vickers and Elkin 2006). Dashed: all "
        "rows are called positive. At 0: none. A model below either is of no use there."
    )
    return Picture("decisions", f"Decision curve for {name}", caption, figure, table)
