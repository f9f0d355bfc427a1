"""Tables written out: for a terminal, in Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedgist.report.study_rows import Row, Study
from fedgist.report.tables import Sheet, sheets

Format = Literal["terminal", "markdown", "latex", "csv", "json"]


def render(study: Study, form: Format) -> str | Group:
    """Return a study in one of the formats."""
    if form == "csv":
        return _csv(study)
    if form == "json":
        return json.dumps(as_data(study), indent=2) + "\n"
    return in_words(sheets(study), study.notes, form)


def in_words(tables: Sequence[Sheet], notes: Sequence[str], form: Format) -> str | Group:
    """Return tables and notes for a reader: in a terminal, Markdown or LaTeX."""
    if form == "markdown":
        parts = [_markdown(sheet) for sheet in tables] + [f"- {note}" for note in notes]
        return "\n".join(parts) + "\n"
    if form == "latex":
        parts = [_latex(sheet) for sheet in tables] + [f"% {note}" for note in notes]
        return "\n".join(parts) + "\n"
    spaced = [part for sheet in tables for part in (_rich(sheet), Text())]
    return Group(*spaced, *(Text(f"! {note}") for note in notes))


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
    head = [f"**{sheet.title}**", "", line(sheet.columns), rule]
    return "\n".join([*head, *map(line, sheet.rows), "", sheet.caption, ""])


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
        "unfinished": row.unfinished,
        "rounds_least": row.rounds[0],
        "rounds_most": row.rounds[1],
    }
    if row.target:
        data["target_reached"] = row.target.reached
    if row.versus:
        data["p"] = row.versus.p
    data |= _estimate_data(row)
    if row.paper:
        mean, error = row.paper.accuracy or (None, None)
        data |= {
            "paper_accuracy_mean": mean,
            "paper_accuracy_se": error,
            "paper_bits": row.paper.bits,
            "paper_source": row.paper.source,
        }
    data["folders"] = [str(run.folder) for run in row.runs]
    return data


def _estimate_data(row: Row) -> dict[str, float | None]:
    """Return mean and standard error of everything that is estimated, and two intervals."""
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
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, names, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}
        )
    return buffer.getvalue()
