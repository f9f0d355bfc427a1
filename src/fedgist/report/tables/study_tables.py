"""Tables of a study: results, differences, communication, and cost to a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedgist.core.objectives.metrics import Metric
from fedgist.report.formatting import Sheet, bits_text, bytes_text, percent, printed
from fedgist.report.tables.comparison import MARKS, Paper, Row, Study, Target, against
from fedgist.report.tables.mean_counts import marked, marked_runs, sentence
from fedgist.report.tables.run_tables import simulated
from fedgist.report.tables.stats import Estimate
from fedgist.runs.files.columns import over_clients, spread_of

CAPTION = (
    "mean ± standard error over seeds; 95 % interval: percentile bootstrap of the mean; "
    "best: the best of the values shown, chosen afterwards, so not a result"
)
PAIRED = "difference from {0}, paired by seed; p: Wilcoxon's signed-rank test, {1}"
ONE_SIDED, TWO_SIDED = "one-sided: {0} is better", "two-sided: {0} is better or worse"
CORRECTED = "p (Holm): after Holm's correction for {0} comparison{1}"
TARGET = (
    "rounds and payload until the target is first reached, mean ± standard error over seeds; B is "
    "bytes, b is bits"
)
TARGET_MISSED = "†: for a seed that never reached it, until the round of its highest accuracy"

Cell = Callable[[Row], str]


def sheets(study: Study) -> list[Sheet]:
    """Return the tables of a study.

    They show results, differences from the reference, bytes sent, and the cost to a target
    accuracy.
    """
    tables = [_results(study), _differences(study), _communication(study), _to_target(study)]
    return [sheet for sheet in tables if sheet is not None]


def _results(study: Study) -> Sheet:
    show = shower(study.measure)
    columns: dict[str, Cell] = {
        "method": lambda row: (
            marked(row.label, marked_runs(row.runs, row.metric)) + (" *" if row.unfinished else "")
        ),
        "final": lambda row: show(row.final),
        "95 % interval": lambda row: _interval(row.final, show),
        "last 10": lambda row: show(row.last10),
        "best": lambda row: show(row.best),
        "seeds": lambda row: str(len(row.runs)),
        "rounds": lambda row: "-".join(str(r) for r in dict.fromkeys(row.rounds)),
    }
    if any(row.epsilon is not None for row in study.rows):
        columns["epsilon"] = lambda row: "-" if row.epsilon is None else f"{row.epsilon:.3g}"
    if any(row.paper and row.paper.accuracy for row in study.rows):
        columns["paper"] = lambda row: printed_accuracy(row.paper)
    papers = [row.paper for row in study.rows if row.paper]
    sources = dict.fromkeys(paper.source for paper in papers if paper.source)
    caption = [CAPTION, *(f"paper: {source}" for source in sources)]
    caption += simulated(run for row in study.rows for run in row.runs)
    if any(row.unfinished for row in study.rows):
        caption.append("*: not every run is finished")
    partial = sentence({row.label: row.runs for row in study.rows}, study.metric)
    caption += [partial.removesuffix(".")] if partial else []
    return _sheet(_title(study), columns, study, ". ".join(caption))


def _differences(study: Study) -> Sheet | None:
    compared = [(row.label, row.versus) for row in study.rows if row.versus]
    if study.reference is None or not compared:
        return None
    show = shower(study.measure)
    rows = []
    for label, versus in compared:
        difference = versus.difference
        numbers = (show(difference, signed=True), _interval(difference, show, signed=True))
        chances = (chance(versus.p), chance(versus.p_holm))
        rows.append((label, *numbers, *chances, str(difference.count)))
    columns = ("method", "difference", "95 % interval", "p", "p (Holm)", "pairs")
    sides = (TWO_SIDED if study.two_sided else ONE_SIDED).format(study.reference)
    tests = sum(versus.p is not None for _, versus in compared)
    corrected = CORRECTED.format(tests, "" if tests == 1 else "s")
    caption = f"{PAIRED.format(study.reference, sides)}. {corrected}"
    return Sheet(f"Against {study.reference}", columns, tuple(rows), caption)


def gains(rows: Sequence[Row], method: str) -> Sheet:
    """Return the result of a method in each setting, and what the other methods add to it by pairs.

    A row of the table holds the rows of a study that differ in nothing but their method.
    """
    varied, groups = _by_setting(rows)
    others = [name for name in dict.fromkeys(row.method for row in rows) if name != method]
    table = []
    for values, by_method in groups.items():
        base = by_method.get(method)
        show = shower(next(iter(by_method.values())).measure)
        level = (str(len(base.finals())), show(base.final)) if base else ("0", "-")
        added = [
            _gain(by_method[name], base, show) if name in by_method else "-" for name in others
        ]
        table.append((*values, *level, *added))
    return Sheet("Gains", (*varied, "seeds", method, *others), tuple(table))


def _gain(row: Row, base: Row | None, show: Callable[..., str]) -> str:
    versus = against(row, base) if base else None
    mark = " (old)" if row.is_old else ""
    return show(versus.difference, signed=True) + mark if versus else "-"


def _by_setting(rows: Sequence[Row]) -> tuple[list[str], dict[tuple[str, ...], dict[str, Row]]]:
    """Return the settings in which rows differ apart from their method, and rows by method.

    Rows with the same values of these settings, which are their key, stand together.
    """
    keys = sorted({key for row in rows for key in row.settings})
    varied = [
        key
        for key in keys
        if not key.startswith("method.")
        and key not in {*MARKS, "version", "arithmetic"}
        and len({str(row.settings.get(key)) for row in rows}) > 1
    ]
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        values = tuple(str(row.settings[key]) for key in varied)
        groups.setdefault(values, {})[row.method] = row
    return varied, dict(sorted(groups.items(), key=lambda item: [_order(v) for v in item[0]]))


def _order(value: str) -> tuple[float, str]:
    """Return the key by which values of settings are sorted: numbers by size, then texts."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


def chance(p: float | None) -> str:
    """Return a p-value as text."""
    return "-" if p is None else f"{p:.3g}"


def _communication(study: Study) -> Sheet:
    columns: dict[str, Cell] = {
        "method": lambda row: row.label,
        "in all": lambda row: (
            bytes_text(row.up.mean + row.down.mean) if row.up and row.down else "-"
        ),
        "sent up": lambda row: _mean(row.up, bytes_text),
        "sent down": lambda row: _mean(row.down, bytes_text),
    }
    caption = "payload bytes of a whole run, mean over seeds"
    return _sheet("Communication", columns, study, caption)


def _to_target(study: Study) -> Sheet | None:
    if study.target_accuracy is None:
        return None
    columns = _target_columns()
    if any(row.paper and row.paper.bits for row in study.rows):
        columns["paper"] = lambda row: (
            bits_text(row.paper.bits) if row.paper and row.paper.bits else "-"
        )
    missed = any(row.target and not row.target.by_all for row in study.rows)
    caption = f"{TARGET}. {TARGET_MISSED}" if missed else TARGET
    title = f"Communication to {percent(study.target_accuracy, 1)}"
    return _sheet(title, columns, study, caption)


def _target_columns() -> dict[str, Cell]:
    def of(value: Callable[[Target], str]) -> Cell:
        return lambda row: value(row.target) if row.target else "-"

    def reached(target: Target) -> str:
        return f"{target.reached} of {target.rounds.count}{'' if target.by_all else ' †'}"

    return {
        "method": lambda row: row.label,
        "reached": of(reached),
        "rounds": of(lambda target: _with_error(target.rounds, lambda v: f"{v:.1f}")),
        "up": of(lambda target: _mean(target.up, bytes_text)),
        "down": of(lambda target: _mean(target.down, bytes_text)),
        "both ways": of(lambda target: _with_error(target.both, bytes_text)),
        "bits": of(lambda target: bits_text(8 * target.both.mean)),
    }


def _sheet(title: str, columns: dict[str, Cell], study: Study, caption: str) -> Sheet:
    rows = tuple(tuple(cell(row) for cell in columns.values()) for row in study.rows)
    return Sheet(title, tuple(columns), rows, caption)


def _title(study: Study) -> str:
    if spread_of(study.metric) is None:
        return study.metric
    unit = " (%)" if study.measure.unit == "fraction" else ""
    main = study.metric == over_clients("client", study.measure.name)
    return f"{study.measure.title}, mean over clients{unit}" if main else study.metric


def shower(measure: Metric) -> Callable[..., str]:
    """Return the function that shows estimates of a metric: a mean and its standard error."""
    scale, digits = (100, 2) if measure.unit == "fraction" else (1, 4)

    def show(value: Estimate | None, *, signed: bool = False) -> str:
        if value is None:
            return "-"
        mean = f"{scale * value.mean:{'+' if signed else ''}.{digits}f}"
        return mean if value.error is None else f"{mean} ± {scale * value.error:.{digits}f}"

    return show


def _interval(value: Estimate | None, show: Callable[..., str], *, signed: bool = False) -> str:
    if value is None or value.low is None or value.high is None:
        return "-"
    low, high = (show(Estimate(1, end), signed=signed) for end in (value.low, value.high))
    return f"[{low}, {high}]"


def _mean(value: Estimate | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value.mean)


def _with_error(value: Estimate, show: Callable[[float], str]) -> str:
    return show(value.mean) if value.error is None else f"{show(value.mean)} ± {show(value.error)}"


def printed_accuracy(paper: Paper | None) -> str:
    """Return a paper's accuracy as percent, with its standard error if it was printed."""
    if paper is None or paper.accuracy is None:
        return "-"
    return printed(100 * value for value in paper.accuracy)
