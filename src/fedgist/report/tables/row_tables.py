"""Tables made from saved predictions: metrics and differences over test rows, and thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedgist.core.objectives.metrics import CLASS_METRICS
from fedgist.errors import listed
from fedgist.report.formatting import NONE, Sheet
from fedgist.report.tables.client_scores import COUNTED, FEW_ROWS
from fedgist.report.tables.comparison import Study
from fedgist.report.tables.estimate_texts import interval, shower
from fedgist.report.tables.tested_rows import (
    RARE_ROWS,
    Resampled,
    Sites,
    counts_right,
    difference,
    left_out,
    metrics_of,
    resampled,
    sites_of,
    takes_long,
)
from fedgist.report.tables.thresholds import threshold_sheet

OTHER_ROWS = (
    "of these models, over rows: models are fixed, and other rows of the same clients are drawn"
)
BY_BOOTSTRAP = (
    "mean over clients; 95 % intervals by a bootstrap of the rows within each client, symmetric on "
    f"the logit scale; none where a client has fewer than {RARE_ROWS} rows of its rarer class"
)
ON_THE_SAME_ROWS = (
    "on the same test rows; accuracy by Bonett and Price (2012), other metrics by a bootstrap of "
    "the rows within each client; one vote a row: accuracy in which each test row counts the same"
)
FEW = f"no interval of the mean over clients where one has fewer than {FEW_ROWS} rows"

Values = Mapping[tuple[str, str], Resampled]  # by row and metric


def row_sheets(study: Study) -> list[Sheet]:
    """Return the tables that saved predictions allow: metrics, differences, and thresholds."""
    sites = sites_of(study.rows)
    values = _values(study, sites)
    absent = [row.label for row in study.rows if row.label not in sites]
    missing = f"; not shown, without saved predictions: {listed(absent)}" if absent else ""
    apart = left_out(study.rows, sites)
    missing += f"; left out, not tested by all methods: {listed(apart)}" if apart else ""
    large = [label for label, own in sites.items() if takes_long(own)]
    missing += f"; no intervals, too many rows to draw other ones: {listed(large)}" if large else ""
    made = [_metrics(study, values), _differences(study, sites, values)]
    shown = [replace(sheet, caption=sheet.caption + missing) for sheet in made if sheet is not None]
    thresholds = threshold_sheet(study.rows)
    return [*shown, thresholds] if thresholds else shown


def _values(study: Study, sites: Mapping[str, Sites]) -> Values:
    return {
        (label, metric): value
        for label, own in sites.items()
        for metric in metrics_of(study.rows)
        if (value := resampled(own, metric)) is not None
    }


def _metrics(study: Study, values: Values) -> Sheet | None:
    """Return the intervals of the metrics that are no share of right rows."""
    names = [name for name in metrics_of(study.rows) if any(name == metric for _, metric in values)]
    if not names:
        return None
    lines = []
    for row in study.rows:
        cells = []
        for name in names:
            value = values.get((row.label, name))
            show = shower(CLASS_METRICS[name])
            cells += [show(value.estimate), interval(value.estimate, show)] if value else [NONE] * 2
        if any(cell != NONE for cell in cells):
            lines.append((row.label, *cells))
    heads = [head for name in names for head in (CLASS_METRICS[name].title, "95 %")]
    title = f"{', '.join(CLASS_METRICS[name].title for name in names)}, over test rows (%)"
    caption = f"{OTHER_ROWS}; {BY_BOOTSTRAP}"
    return Sheet(title, ("method", *heads), tuple(lines), caption).filled()


def _differences(study: Study, sites: Mapping[str, Sites], values: Values) -> Sheet | None:
    """Return each row's differences from the reference on the same test rows."""
    reference = study.reference
    if reference is None or reference not in sites:
        return None
    lines: list[tuple[str, ...]] = []
    for label, own in sites.items():
        if label == reference:
            continue
        if counts_right(study.rows):
            apart = difference(own, sites[reference])
            show = shower(CLASS_METRICS[COUNTED])
            votes = f"one vote a row: {apart.gained} better, {apart.lost} worse"
            title = CLASS_METRICS[COUNTED].title
            for what, value in ((title, apart.over_clients), (votes, apart.over_rows)):
                shown = show(value, signed=True), interval(value, show, signed=True)
                lines.append((label, what, *shown))
        for metric in metrics_of(study.rows):
            pair = values.get((label, metric)), values.get((reference, metric))
            if pair[0] is None or pair[1] is None:
                continue
            value, show = pair[0].minus(pair[1]), shower(CLASS_METRICS[metric])
            shown = show(value, signed=True), interval(value, show, signed=True)
            lines.append((label, CLASS_METRICS[metric].title, *shown))
    if not lines:
        return None
    few = any(len(site.rows) < FEW_ROWS for site in sites[reference].values())
    caption = f"{OTHER_ROWS}; {ON_THE_SAME_ROWS}" + (f"; {FEW}" if few else "")
    head = ("method", "metric", "difference", "95 % interval")
    title = f"Against {reference}, over test rows (points)"
    return Sheet(title, head, tuple(lines), caption, named_by=2)
