"""A model card: what was trained, on whose rows, how well it does, and where not to trust it.

The parts follow Mitchell et al. 2019, "Model cards for model reporting".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fedgist.errors import ReportError
from fedgist.methods import METHODS, base_name
from fedgist.report.formatting import Sheet, markdown_text
from fedgist.report.page.html_templates import part, template
from fedgist.report.privacy_words import in_words
from fedgist.report.tables import client_tables
from fedgist.report.tables.client_scores import FEW_ROWS, over_rows
from fedgist.report.tables.comparison import Row, Study
from fedgist.report.tables.data_table import classes_of, data_sheets
from fedgist.report.tables.study_tables import sheets
from fedgist.report.terminal.table_formats import markdown_table
from fedgist.runs.files.columns import EPSILON
from fedgist.runs.finished.finished_run import FinishedRun

MOST_RUNS = 12  # that are named
ARCHIVED = "not kept in an archived run"
MARKDOWN, HTML = (".md", ".markdown"), (".html", ".htm")


@dataclass(frozen=True)
class Part:
    """A part of a card: its heading, sentences, and tables."""

    title: str
    sentences: tuple[str, ...] = ()
    sheets: tuple[Sheet, ...] = ()


def card(study: Study, title: str) -> list[Part]:
    """Return the parts of the card of a study; the first part is its title.

    Raises
    ------
    ReportError
        If no run is finished.
    """
    runs = [run for row in study.rows for run in row.runs]
    if not any(run.finished for run in runs):
        raise ReportError("a model card is about finished models, and no run is finished")
    results = [sheet for sheet in sheets(study) if not sheet.title.startswith("Communication")]
    return [
        Part(title, ("Made by fedgist from the runs' own files; texts in [brackets] are yours.",)),
        Part("Task", tuple(_task(runs[0]))),
        Part("Data", () if (data := data_sheets(study)) else (f"Rows: {ARCHIVED}.",), tuple(data)),
        Part("Method", tuple(line for row in study.rows for line in _method(row))),
        Part("Privacy", tuple(_privacy(runs))),
        Part("Results", (), (*results, *client_tables.of_runs(runs))),
        Part("Limits", tuple(_limits(study, runs))),
        Part("How it was made", tuple(_origin(runs))),
    ]


def write(parts: Sequence[Part], path: Path) -> str:
    """Return the card as Markdown or HTML, by the ending of ``path``."""
    if path.suffix.lower() in MARKDOWN:
        return as_markdown(parts)
    if path.suffix.lower() in HTML:
        return as_html(parts)
    raise ReportError(f"--out {path}: a card is a file *.md or *.html")


def as_markdown(parts: Sequence[Part]) -> str:
    """Return the card as Markdown."""
    lines: list[str] = []
    for number, section in enumerate(parts):
        lines += [f"{'#' if number == 0 else '##'} {markdown_text(section.title)}", ""]
        lines += [f"- {markdown_text(text)}" for text in section.sentences]
        lines += [""] * bool(section.sentences)
        for sheet in section.sheets:
            lines += [f"### {markdown_text(sheet.title)}", "", *markdown_table(sheet), ""]
            lines += [markdown_text(sheet.caption), ""] if sheet.caption else []
    return "\n".join(lines).rstrip() + "\n"


def as_html(parts: Sequence[Part]) -> str:
    """Return the card as a page of its own."""
    return template("card.html.j2").render(
        parts=parts, css=part("palette.css") + part("report.css"), title=parts[0].title
    )


def _task(run: FinishedRun) -> Iterator[str]:
    objective, count = run.recipe.get("objective", {}).get("name", "classes"), len(classes_of(run))
    yield f"Objective: {objective}{f'; {count} classes' if count else ''}."
    yield f"Clients (sites): {len(run.split['train']) if run.split else ARCHIVED}."
    yield "Intended use: [what decision it supports, for whom, and who checks it]."
    yield "Not for: [what it was not made for]."


def _method(row: Row) -> Iterator[str]:
    name = base_name(row.method)
    what = METHODS.summaries()[name] if name in METHODS else "a method of your own"
    settings = row.settings
    yield f"{row.label}: {what}"
    model = settings.get("model.name", "one per client")
    seeds, divisions = len(row.seeds), len(row.divisions)
    counts = f"{seeds} seed{'s' * (seeds > 1)}, "
    counts += f"{divisions} division{'s' * (divisions > 1)} of the rows"
    yield f"{row.label}: model {model}; {row.rounds[1]} rounds; {counts}."


def _privacy(runs: Sequence[FinishedRun]) -> Iterator[str]:
    private = [run for run in runs if run.recipe.get("privacy", {}).get("unit", "none") != "none"]
    if len(private) < len(runs):
        yield (
            "No formal privacy: messages have no noise. What a message shows of a row is not "
            "bounded."
        )
    for epsilon, unit, bodies in sorted(
        {
            (
                float(run.last(EPSILON) or run.recipe["privacy"].get("epsilon") or 0.0),
                str(run.recipe["privacy"]["unit"]),
                str(run.recipe["privacy"].get("bodies", "fixed")),
            )
            for run in private
        }
    ):
        yield in_words(epsilon, unit)
        if bodies != "dp_sgd":
            yield (
                "This covers the noisy sums alone, as if the trained body did not know the rows "
                "(privacy.bodies = 'dp_sgd' covers the body as well)."
            )
    if private:
        yield (
            "Tables of this card that count a client's rows, or score models on them, are exact: "
            "epsilon does not cover them."
        )
    if len(private) > 1:
        yield "Several private runs on the same rows add up: see fedgist run's notes."


def _limits(study: Study, runs: Sequence[FinishedRun]) -> Iterator[str]:
    yield from study.notes
    for row in study.rows:
        of_rows = over_rows(row.runs, study.measure.name)
        small = [c.name for c in of_rows.clients if c.rows < FEW_ROWS] if of_rows else []
        if of_rows and of_rows.fixed and small:
            yield f"{row.label}: fewer than {FEW_ROWS} test rows at {', '.join(small)}."
    if len({run.division for run in runs}) == 1:
        yield "Tested on one division of the rows: data.folds says how much that matters."
    yield "Test rows come from the same clients as training rows; other sites were not tried."
    yield "[Groups of patients, devices or years that were not tested.]"


def _origin(runs: Sequence[FinishedRun]) -> Iterator[str]:
    versions = runs[0].result.get("versions", {})
    yield "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"Card: fedgist {metadata.version('fedgist')}."
    for run in runs[:MOST_RUNS]:
        seal = f", seal {run.result['seal'][:16]}" if "seal" in run.result else ""
        yield f"{run.folder}: seed {run.seed}, division {run.division}{seal}"
    if len(runs) > MOST_RUNS:
        yield f"and {len(runs) - MOST_RUNS} further runs"
