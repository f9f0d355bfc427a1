"""Tables of a study: results, differences, communication, and cost to a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedgist.core.objectives.metrics import Metric
from fedgist.errors import ReportError, did_you_mean
from fedgist.report.formatting import NONE, Sheet, bits_text, bytes_text, percent, printed
from fedgist.report.tables.client_scores import FEW_ROWS, over_rows
from fedgist.report.tables.comparison import MARKS, Paper, Row, Study, Target, against
from fedgist.report.tables.estimate_texts import interval, shower
from fedgist.report.tables.mean_counts import marked, marked_runs, sentence
from fedgist.report.tables.row_tables import row_sheets
from fedgist.report.tables.run_tables import epsilon_text, simulated
from fedgist.report.tables.stats import Comparison, Estimate
from fedgist.runs.files.columns import over_clients, spread_of

BEST = "best: the highest test score of any round; do not report it, it was chosen on test rows"
OVER_SEEDS = (
    "mean ± standard error and 95 % interval (Student's t) of the method, trained again with other "
    "seeds on {}"
)
OVER_DIVISIONS = (
    "mean ± standard error and 95 % interval of the method, trained and tested again on other "
    "divisions of these rows ({0} divisions; variance corrected for their overlap: Nadeau and "
    "Bengio 2003, Bouckaert and Frank 2004)"
)
OVER_ROWS = (
    "95 % intervals of these models, over rows: models are fixed, and other rows of the same "
    "clients are drawn (Wilson 1927; for the mean over clients with its effective number of rows)"
)
NO_INTERVAL = f"no interval of the mean over clients where one has fewer than {FEW_ROWS} rows"
PAIRED = "difference from {0}, paired by {1}; p, two-sided: {2}"
BETTER = "better: the better of the two"
WILCOXON, CORRECTED_T = "Wilcoxon's signed-rank test", "corrected t test over divisions"
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
    tables = [
        result_sheet(study),
        _over_rows(study),
        _differences(study),
        *row_sheets(study),
        _communication(study),
        _to_target(study),
    ]
    return [sheet for sheet in tables if sheet is not None]


def subject_of(study: Study) -> str:
    """Return what the intervals of a study's results are about, in a sentence."""
    most = max((len(row.divisions) for row in study.rows), default=1)
    if most > 1:
        return OVER_DIVISIONS.format(most)
    drawn = any(
        run.recipe.get("privacy", {}).get("unit") == "record"
        for row in study.rows
        for run in row.runs
    )
    rows = "same validation rows" if "/validation/" in study.metric else "same test rows"
    return OVER_SEEDS.format(
        "rows that the seeds draw (privacy of records)" if drawn else f"the {rows}"
    )


def _columns(study: Study) -> dict[str, tuple[str, Cell]]:
    """Return the title and the cell of each column that a reader can choose, by its name."""
    show = shower(study.measure)
    unit = " (points)" if study.measure.unit == "fraction" else ""

    def versus(value: Callable[[Comparison], str]) -> Cell:
        return lambda row: value(row.versus) if row.versus else NONE

    def apart(comparison: Comparison) -> str:
        return interval(comparison.difference, show, signed=True)

    return {
        "final": ("final", lambda row: show(row.final)),
        "interval": ("95 % interval", lambda row: interval(row.final, show)),
        "last10": ("last 10", lambda row: show(row.last10)),
        "best": ("best", lambda row: show(row.best)),
        "seeds": ("seeds", lambda row: str(len(row.seeds))),
        "divisions": ("divisions", lambda row: str(len(row.divisions))),
        "rounds": ("rounds", lambda row: "-".join(map(str, dict.fromkeys(row.rounds)))),
        "epsilon": ("epsilon", lambda row: epsilon_text(row.epsilon)),
        "paper": ("paper", lambda row: printed_accuracy(row.paper)),
        "difference": (
            f"difference{unit}",
            versus(lambda other: show(other.difference, signed=True)),
        ),
        "difference-interval": (f"95 % of the difference{unit}", versus(apart)),
        "p": ("p", versus(lambda other: chance(other.p))),
        "holm": ("p (Holm)", versus(lambda other: chance(other.p_holm))),
        "up": ("sent up", lambda row: _mean(row.up, bytes_text)),
        "down": ("sent down", lambda row: _mean(row.down, bytes_text)),
        "bytes": ("bytes", _both_ways),
    }


def _both_ways(row: Row) -> str:
    return bytes_text(row.up.mean + row.down.mean) if row.up and row.down else NONE


def one_sheet(study: Study, names: Sequence[str]) -> Sheet:
    """Return one table with the columns of these names; the best results are bold.

    Raises
    ------
    ReportError
        If a name is none of a column, or a column needs a reference and there is none.
    """
    known = _columns(study)
    for name in names:
        if name not in known:
            raise ReportError(f"--columns: unknown column {name!r}{did_you_mean(name, known)}")
        if study.reference is None and name in {"difference", "difference-interval", "p", "holm"}:
            raise ReportError(f"--columns {name} needs --reference: the row to compare with")
    columns = {"method": _name, **dict(known[name] for name in names)}
    sheet = _sheet(_title(study), columns, study, _caption_of(study, names))
    return _with_best_in_bold(sheet, study, ["method", *names])


def _with_best_in_bold(sheet: Sheet, study: Study, names: Sequence[str]) -> Sheet:
    """Return a table in which results within a standard error of the best one are bold."""
    finals = [(number, row.final) for number, row in enumerate(study.rows) if row.final]
    if "final" not in names or len(finals) <= 1:
        return sheet
    sign = 1 if study.measure.better == "higher" else -1
    best = max((final for _, final in finals), key=lambda final: sign * final.mean)
    least = sign * best.mean - (best.error or 0.0)
    place = names.index("final")
    bold = frozenset((n, place) for n, final in finals if sign * final.mean >= least)
    return replace(sheet, bold=bold)


def _name(row: Row) -> str:
    text = marked(row.label, marked_runs(row.runs, row.metric))
    return f"{text} *" if row.unfinished else text


def result_sheet(study: Study) -> Sheet:
    """Return the table of results: a row for each row of the study."""
    has = {
        "last10": any(row.last10 for row in study.rows),
        "divisions": any(len(row.divisions) > 1 for row in study.rows),
        "epsilon": any(row.epsilon is not None for row in study.rows),
        "paper": any(row.paper and row.paper.accuracy for row in study.rows),
    }
    names = ["final", "interval", "last10", "seeds", "rounds", "divisions", "epsilon", "paper"]
    names = [name for name in names if has.get(name, True)]
    known = _columns(study)
    columns = {"method": _name, **dict(known[name] for name in names)}
    sheet = _sheet(_title(study), columns, study, _caption_of(study))
    return _with_best_in_bold(sheet, study, ["method", *names])


def _caption_of(study: Study, names: Sequence[str] = ()) -> str:
    papers = [row.paper for row in study.rows if row.paper]
    sources = dict.fromkeys(paper.source for paper in papers if paper.source)
    caption = [subject_of(study), *([BEST] if "best" in names else [])]
    if {"difference", "difference-interval", "p", "holm"} & {*names}:
        caption.append(f"differences and p: {_how_compared(study)}")
    caption += [f"paper: {source}" for source in sources]
    caption += simulated(run for row in study.rows for run in row.runs)
    if any(row.unfinished for row in study.rows):
        caption.append("*: not every run is finished")
    partial = sentence({row.label: row.runs for row in study.rows}, study.metric)
    caption += [partial.removesuffix(".")] if partial else []
    return ". ".join(caption)


def _over_rows(study: Study) -> Sheet | None:
    """Return the intervals over test rows, or None if no row says what its test rows are."""
    shown = [(row.label, over_rows(row.runs, study.measure.name)) for row in study.rows]
    said = [(label, of_rows) for label, of_rows in shown if of_rows]
    if not said or study.metric != over_clients("client", study.measure.name):
        return None
    show = shower(study.measure)
    lines = tuple(
        (
            label,
            *(show(of_rows.mean), interval(of_rows.mean, show)),
            *(show(of_rows.each_row), interval(of_rows.each_row, show)),
            f"{of_rows.rows:.0f}",
        )
        for label, of_rows in said
    )
    columns = ("method", "mean over clients", "95 % (clients)", "one vote a row", "95 % (rows)")
    few = any(c.rows < FEW_ROWS for _, of_rows in said if of_rows.fixed for c in of_rows.clients)
    caption = f"{OVER_ROWS}. {NO_INTERVAL}" if few else OVER_ROWS
    title = f"{study.measure.title}, over test rows (%)"
    return Sheet(title, (*columns, "test rows"), lines, caption).filled()


def _differences(study: Study) -> Sheet | None:
    compared = [(row.label, row.versus) for row in study.rows if row.versus]
    if study.reference is None or not compared:
        return None
    show = shower(study.measure)
    rows = []
    for label, versus in compared:
        difference = versus.difference
        numbers = (show(difference, signed=True), interval(difference, show, signed=True))
        better = _better(label, study.reference, difference.mean, study.measure)
        chances = (chance(versus.p), chance(versus.p_holm))
        rows.append((label, *numbers, better, *chances, str(difference.count)))
    columns = ("method", "difference", "95 % interval", "better", "p", "p (Holm)", "pairs")
    tests = sum(versus.p is not None for _, versus in compared)
    corrected = CORRECTED.format(tests, "" if tests == 1 else "s")
    caption = f"{_how_compared(study)}; {BETTER}" + (f". {corrected}" if tests else "")
    unit = " (points)" if study.measure.unit == "fraction" else ""
    return Sheet(f"Against {study.reference}{unit}", columns, tuple(rows), caption)


def _how_compared(study: Study) -> str:
    divided = any(len(row.divisions) > 1 for row in study.rows)
    how = ("division", CORRECTED_T) if divided else ("seed", WILCOXON)
    return PAIRED.format(study.reference, *how)


def _better(label: str, reference: str, difference: float, measure: Metric) -> str:
    """Return which of two rows is better by the mean difference."""
    if difference == 0:
        return "-"
    return label if (difference > 0) == (measure.better == "higher") else reference


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
        "in all": _both_ways,
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
    rows_of = {"client": "", "test": ", on all test rows", "validation": ", on validation rows"}
    for split, rows in rows_of.items():
        if study.metric == over_clients(split, study.measure.name):
            return f"{study.measure.title}, mean over clients{rows}{unit}"
    return study.metric


def _mean(value: Estimate | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value.mean)


def _with_error(value: Estimate, show: Callable[[float], str]) -> str:
    return show(value.mean) if value.error is None else f"{show(value.mean)} ± {show(value.error)}"


def printed_accuracy(paper: Paper | None) -> str:
    """Return a paper's accuracy as percent, with its standard error if it was printed."""
    if paper is None or paper.accuracy is None:
        return "-"
    return printed(100 * value for value in paper.accuracy)
