"""A study as a table: for the terminal, a paper, a page, or a program."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedgist.report.comparison import Paper, Row, Study, Target
from fedgist.report.formatting import bits, percent, size
from fedgist.report.stats import Estimate

Format = Literal["terminal", "markdown", "latex", "csv", "json"]

CAPTION = (
    "mean ± standard error over seeds; 95 % interval: percentile bootstrap of the mean; "
    "best: picked by the very numbers shown, no result"
)
PAIRED = "difference to {0}, paired by seed; p: Wilcoxon signed-rank, one-tailed, {0} is better"


@dataclass(frozen=True)
class Sheet:
    """One table in words: a title, column names, rows, and a caption."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


def sheets(study: Study) -> list[Sheet]:
    """Return the tables of a study.

    Results, differences to the reference, what they cost, and cost to the target.
    """
    found = [_results(study), _differences(study), _costs(study), _to_target(study)]
    return [sheet for sheet in found if sheet is not None]


def render(study: Study, form: Format) -> str | Group:
    """Return a study in one of the formats."""
    if form == "csv":
        return _csv(study)
    if form == "json":
        return json.dumps(as_data(study), indent=2) + "\n"
    return in_words(sheets(study), study.notes, form)


def in_words(found: Sequence[Sheet], notes: Sequence[str], form: Format) -> str | Group:
    """Return tables and notes for a reader: in a terminal, Markdown or LaTeX."""
    if form == "markdown":
        return (
            "\n".join([_markdown(sheet) for sheet in found] + [f"- {note}" for note in notes])
            + "\n"
        )
    if form == "latex":
        return (
            "\n".join([_latex(sheet) for sheet in found] + [f"% {note}" for note in notes]) + "\n"
        )
    spaced = [part for sheet in found for part in (_rich(sheet), Text())]
    return Group(*spaced, *(Text(f"! {note}") for note in notes))


def _results(study: Study) -> Sheet:
    show = _shower(study.metric)
    columns = ["method", "seeds", "rounds", "final", "95 % interval", "last 10", "best"]
    cells: list[Callable[[Row], str]] = [
        lambda row: row.label + (" *" if row.unfinished else ""),
        lambda row: str(len(row.runs)),
        lambda row: "-".join(str(r) for r in dict.fromkeys(row.rounds)),
        lambda row: show(row.final),
        lambda row: _interval(row.final, show),
        lambda row: show(row.last10),
        lambda row: show(row.best),
    ]
    if any(row.paper and row.paper.accuracy for row in study.rows):
        columns.append("paper")
        cells.append(lambda row: _printed(row.paper))
    sources = dict.fromkeys(
        row.paper.source for row in study.rows if row.paper and row.paper.source
    )
    caption = [CAPTION]
    caption += [f"paper: {source}" for source in sources]
    caption += ["*: not every run is finished"] if any(row.unfinished for row in study.rows) else []
    return Sheet(_title(study.metric), tuple(columns), _cells(study, cells), ". ".join(caption))


def _differences(study: Study) -> Sheet | None:
    compared = [row for row in study.rows if row.versus]
    if study.reference is None or not compared:
        return None
    show = _shower(study.metric)
    rows = []
    for row in compared:
        assert row.versus is not None  # chosen so
        p = "-" if row.versus.p is None else f"{row.versus.p:.3g}"
        difference = row.versus.difference
        numbers = (show(difference, signed=True), _interval(difference, show, signed=True), p)
        rows.append((row.label, str(difference.count), *numbers))
    columns = ("method", "pairs", "difference", "95 % interval", "p")
    return Sheet(f"Against {study.reference}", columns, tuple(rows), PAIRED.format(study.reference))


def _costs(study: Study) -> Sheet:
    columns = ("method", "sent up", "sent down", "in all")
    cells: list[Callable[[Row], str]] = [
        lambda row: row.label,
        lambda row: _mean(row.up, size),
        lambda row: _mean(row.down, size),
        lambda row: size(row.up.mean + row.down.mean) if row.up and row.down else "-",
    ]
    return Sheet(
        "Communication",
        columns,
        _cells(study, cells),
        "payload bytes of a whole run, mean over seeds",
    )


def _to_target(study: Study) -> Sheet | None:
    if study.target_accuracy is None:
        return None

    def of(value: Callable[[Target], str]) -> Callable[[Row], str]:
        return lambda row: value(row.target) if row.target else "-"

    columns = ["method", "reached", "rounds", "up", "down", "both ways", "bits"]
    cells: list[Callable[[Row], str]] = [
        lambda row: row.label,
        of(
            lambda t: (
                f"{t.reached} of {t.rounds.count}" + ("" if t.reached == t.rounds.count else " †")
            )
        ),
        of(lambda t: _with_error(t.rounds, lambda v: f"{v:.1f}")),
        of(lambda t: _mean(t.up, size)),
        of(lambda t: _mean(t.down, size)),
        of(lambda t: _with_error(t.both, size)),
        of(lambda t: bits(8 * t.both.mean)),
    ]
    caption = (
        "rounds and payload until it is first reached, mean ± standard error over seeds; B is "
        "bytes, b is bits"
    )
    if any(row.target and row.target.reached < row.target.rounds.count for row in study.rows):
        caption += ". †: for a seed that never reached it, until the round of its highest accuracy"
    if any(row.paper and row.paper.bits for row in study.rows):
        columns.append("paper")
        cells.append(lambda row: bits(row.paper.bits) if row.paper and row.paper.bits else "-")
    goal = (
        percent(study.target_accuracy, 1)
        if "accuracy" in study.metric
        else f"{study.target_accuracy:g}"
    )
    return Sheet(f"Communication to {goal}", tuple(columns), _cells(study, cells), caption)


def _cells(study: Study, cells: Sequence[Callable[[Row], str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(cell(row) for cell in cells) for row in study.rows)


def _title(metric: str) -> str:
    return {"eval/client/accuracy_mean": "Accuracy, mean over clients (%)"}.get(metric, metric)


def _shower(metric: str) -> Callable[..., str]:
    scale, digits = (100, 2) if "accuracy" in metric else (1, 4)

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
    return f"{low}..{high}"


def _mean(value: Estimate | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value.mean)


def _with_error(value: Estimate, show: Callable[[float], str]) -> str:
    return show(value.mean) if value.error is None else f"{show(value.mean)} ± {show(value.error)}"


def _printed(paper: Paper | None) -> str:
    if paper is None or paper.accuracy is None:
        return "-"
    mean, error = paper.accuracy
    return f"{100 * mean:.2f} ± {100 * error:.2f}"


def _rich(sheet: Sheet) -> Table:
    table = Table(
        title=sheet.title,
        title_justify="left",
        title_style="bold",
        caption=sheet.caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for i, name in enumerate(sheet.columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    return table


def _markdown(sheet: Sheet) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|---" + "|---:" * (len(sheet.columns) - 1) + "|"
    return "\n".join(
        [
            f"**{sheet.title}**",
            "",
            line(sheet.columns),
            rule,
            *map(line, sheet.rows),
            "",
            sheet.caption,
            "",
        ]
    )


def _latex(sheet: Sheet) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(_tex(cell) for cell in cells) + r" \\"

    return "\n".join(
        [
            r"\begin{table}",
            r"\caption{" + _tex(f"{sheet.title}. {sheet.caption}") + ".}",
            r"\begin{tabular}{l" + "r" * (len(sheet.columns) - 1) + "}",
            r"\toprule",
            line(sheet.columns),
            r"\midrule",
            *map(line, sheet.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _tex(text: str) -> str:
    escaped = "".join(
        "\\" + c if c in "%&_#${}" else c for c in text.replace("\\", r"\textbackslash ")
    )
    signs = {"±": r"$\pm$", "†": r"$\dagger$", "..": "--", "<": "$<$", ">": "$>$"}
    for sign, tex in signs.items():
        escaped = escaped.replace(sign, tex)
    return escaped


def as_data(study: Study) -> dict[str, Any]:
    """Return a study as plain values: fractions and bytes, unrounded."""
    return {
        "metric": study.metric,
        "better": study.better,
        "reference": study.reference,
        "target_accuracy": study.target_accuracy,
        "rows": [_row_data(row) for row in study.rows],
        "notes": list(study.notes),
    }


def _row_data(row: Row) -> dict[str, Any]:
    data: dict[str, Any] = {
        "label": row.label,
        "method": row.method,
        "seeds": row.seeds,
        "unfinished": row.unfinished,
        "rounds_least": row.rounds[0],
        "rounds_most": row.rounds[1],
    }
    named = {
        "final": row.final,
        "last10": row.last10,
        "best": row.best,
        "up_bytes": row.up,
        "down_bytes": row.down,
    }
    if row.target:
        t = row.target
        data["target_reached"] = t.reached
        named |= {"target_rounds": t.rounds, "target_up_bytes": t.up, "target_down_bytes": t.down}
        named["target_total_bytes"] = t.both
    if row.versus:
        data["p"] = row.versus.p
        named["difference"] = row.versus.difference
    for name, value in named.items():
        data[f"{name}_mean"] = value.mean if value else None
        data[f"{name}_se"] = value.error if value else None
        if name in {"final", "difference"}:
            data |= {
                f"{name}_low": value.low if value else None,
                f"{name}_high": value.high if value else None,
            }
    if row.paper:
        mean, error = row.paper.accuracy or (None, None)
        data |= {
            "paper_accuracy_mean": mean,
            "paper_accuracy_se": error,
            "paper_bits": row.paper.bits,
        }
        data["paper_source"] = row.paper.source
    data["folders"] = [str(run.folder) for run in row.runs]
    return data


def _csv(study: Study) -> str:
    rows = [_row_data(row) for row in study.rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, names, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}
        )
    return buffer.getvalue()
