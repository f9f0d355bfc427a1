"""Render tables for a terminal, or as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from fedgist.errors import printable
from fedgist.report.formatting import Sheet, csv_text, latex_text, markdown_text
from fedgist.report.tables.comparison import Row, Study
from fedgist.report.tables.mean_counts import marked_runs
from fedgist.report.tables.study_tables import one_sheet, sheets
from fedgist.report.terminal.console import SheetView, blocks_of, words

Format = Literal["terminal", "markdown", "latex", "csv", "json"]


def render(study: Study, form: Format, columns: Sequence[str] = ()) -> str | Group:
    """Return a study in one of the formats; with ``columns``, as one table for readers."""
    if form == "csv":
        return _csv(study)
    if form == "json":
        return json.dumps(as_data(study), indent=2) + "\n"
    tables = [one_sheet(study, columns)] if columns else sheets(study)
    return in_words(tables, study.notes, form)


def in_words(tables: Sequence[Sheet], notes: Sequence[str], form: Format) -> str | Group:
    """Return tables and notes for readers: for a terminal, in Markdown or in LaTeX."""
    if form == "markdown":
        parts = [*map(_markdown, tables), *(f"- {markdown_text(note)}" for note in notes)]
        return "\n".join(parts) + "\n"
    if form == "latex":
        parts = [*map(_latex, tables, _labels(tables)), *(f"% {printable(note)}" for note in notes)]
        return "\n".join(parts) + "\n"
    spaced = [part for sheet in tables for part in (SheetView(sheet), Text())]
    return Group(*spaced, *(words(f"! {note}") for note in notes))


def markdown_table(sheet: Sheet) -> list[str]:
    """Return the lines of a table in Markdown, without its title and caption."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def cell(number: int, place: int, text: str) -> str:
        escaped = markdown_text(text)
        return f"**{escaped}**" if (number, place) in sheet.bold else escaped

    rule = "".join("|---" if left else "|---:" for left in sheet.texts) + "|"
    rows = [
        line([cell(number, place, text) for place, text in enumerate(row)])
        for number, row in enumerate(sheet.rows)
    ]
    return [line([*map(markdown_text, sheet.columns)]), rule, *rows]


def _markdown(sheet: Sheet) -> str:
    head = [f"**{markdown_text(sheet.title)}**", ""]
    return "\n".join([*head, *markdown_table(sheet), "", markdown_text(sheet.caption), ""])


LATEX_ROOM = 82  # characters of footnotesize in a page's width


def _latex(sheet: Sheet, label: str) -> str:
    """Return a floating table with one caption; one that does not fit is made smaller."""
    blocks, widths = blocks_of(sheet, LATEX_ROOM)
    caption = ". ".join(filter(None, (sheet.title, sheet.caption[:1].upper() + sheet.caption[1:])))
    head = [
        r"\begin{table}",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
        r"\caption{" + latex_text(caption.removesuffix(".")) + ".}",
        r"\label{" + label + "}",
    ]
    parts = [*_tabular(sheet, widths[0])]
    if len(blocks) > 1:
        parts = [r"\resizebox{\linewidth}{!}{", *parts[:-1], "}", ""]
    return "\n".join([*head, *parts, r"\end{table}", ""])


def _tabular(sheet: Sheet, width: int) -> Iterator[str]:
    """Yield the lines of a table; names longer than ``width`` are wrapped."""
    block = range(len(sheet.columns))
    is_long = any(len(row[0]) > width for row in sheet.rows)
    names = f"p{{{0.5 * width:.1f}em}}" if is_long else "l"

    def line(cells: Sequence[str], number: int = -1) -> str:
        name, *rest = (
            _bold(latex_text(cells[i]), is_bold=(number, i) in sheet.bold) for i in block
        )
        if is_long:
            name = r"\raggedright " + re.sub(r"(=|\.|\\_)", r"\1\\allowbreak{}", name)
        return " & ".join((name, *rest)) + r" \\"

    others = "".join("l" if sheet.texts[i] else "r" for i in block[1:])
    yield r"\begin{tabular}{@{}" + names + others + "@{}}"
    yield from (r"\toprule", line(sheet.columns), r"\midrule")
    yield from (line(row, number) for number, row in enumerate(sheet.rows))
    yield from (r"\bottomrule", r"\end{tabular}", "")


def _bold(text: str, *, is_bold: bool) -> str:
    return rf"{{\bfseries\boldmath {text}}}" if is_bold else text


def _labels(tables: Sequence[Sheet]) -> list[str]:
    """Return a label for each table by its title; no two are equal."""
    labels: list[str] = []
    for sheet in tables:
        words_of_title = re.sub("[^a-z0-9]+", "-", sheet.title.lower()).strip("-")
        label = f"tab:{words_of_title or 'table'}"
        same = sum(re.fullmatch(rf"{label}(-no\d+)?", other) is not None for other in labels)
        labels.append(f"{label}-no{same + 1}" if same else label)
    return labels


def as_data(study: Study) -> dict[str, Any]:
    """Return a study as plain values: fractions and bytes, unrounded."""
    return {
        "metric": study.metric,
        "better": study.measure.better,
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
        "divisions": row.divisions,
        "unfinished": row.unfinished,
        "rounds_least": row.rounds[0],
        "rounds_most": row.rounds[1],
        "seal": ", ".join(sorted({run.seal.state for run in row.runs})),
    }
    if row.target:
        data["target_reached"] = row.target.reached
    if row.versus:
        data |= {"p": row.versus.p, "p_holm": row.versus.p_holm}
    data |= {"clients": marked_runs(row.runs, row.metric) or None}
    data |= _estimate_data(row)
    if row.paper:
        mean, error = (*(row.paper.accuracy or ()), None, None)[:2]
        data |= {
            "paper_accuracy_mean": mean,
            "paper_accuracy_se": error,
            "paper_bits": row.paper.bits,
            "paper_source": row.paper.source,
        }
    data["folders"] = [str(run.folder) for run in row.runs]
    return data


def _estimate_data(row: Row) -> dict[str, float | None]:
    """Return the mean and standard error of each estimate, and two confidence intervals."""
    estimates = {
        "final": row.final,
        "last10": row.last10,
        "best": row.best,
        "up_bytes": row.up,
        "down_bytes": row.down,
    }
    if row.target:
        estimates |= {
            "target_rounds": row.target.rounds,
            "target_up_bytes": row.target.up,
            "target_down_bytes": row.target.down,
            "target_total_bytes": row.target.both,
        }
    if row.versus:
        estimates["difference"] = row.versus.difference
    data: dict[str, float | None] = {}
    for name, value in estimates.items():
        data[f"{name}_mean"] = value.mean if value else None
        data[f"{name}_se"] = value.error if value else None
        if name in {"final", "difference"}:
            data[f"{name}_low"] = value.low if value else None
            data[f"{name}_high"] = value.high if value else None
    return data


def _csv(study: Study) -> str:
    rows = [_row_data(row) for row in study.rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_joined(row.get(name)) for name in names] for row in rows]
    return csv_text([names, *cells])


def _joined(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list) else value
