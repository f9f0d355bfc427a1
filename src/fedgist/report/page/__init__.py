"""Render a study as a single HTML page that needs no network and no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import metadata

from fedgist.errors import printable
from fedgist.report.formatting import duration
from fedgist.report.page.html_templates import part, template
from fedgist.report.pictures.drawing import ON_PAGE, Picture
from fedgist.report.pictures.row_styles import RowStyle, styles_of
from fedgist.report.tables import client_tables
from fedgist.report.tables.comparison import Study
from fedgist.report.tables.data_table import data_sheets
from fedgist.report.tables.study_tables import sheets
from fedgist.runs.finished.finished_run import FinishedRun


def render(study: Study, pictures: Sequence[Picture], title: str) -> str:
    """Return the page of a study and its figures as HTML."""
    runs = [run for row in study.rows for run in row.runs]
    settings = [row.settings for row in study.rows]
    keys = sorted({key for row_settings in settings for key in row_settings})
    values = {key: [_word(row_settings.get(key)) for row_settings in settings] for key in keys}
    differing = [(printable(key), words) for key, words in values.items() if len(set(words)) > 1]
    common = [(printable(key), words[0]) for key, words in values.items() if len(set(words)) == 1]
    seeds = len({run.seed for run in runs})
    return template("report.html.j2").render(
        title=title,
        lead=f"{_count(len(study.rows), 'row')}, {_count(len(runs), 'run')}, "
        f"{_count(seeds, 'seed')}",
        css=part("palette.css") + part("report.css"),
        js=part("report.js"),
        styles=_samples(study),
        notes=study.notes,
        sheets=[*sheets(study), *client_tables.of_runs(runs), *data_sheets(study)],
        pictures=[_embedded(picture) for picture in pictures],
        privacy=any(picture.name == "privacy" for picture in pictures),
        labels=[row.label for row in study.rows],
        differing=differing,
        common=common,
        **_runs(study),
        version=metadata.version("fedgist"),
    )


def _embedded(picture: Picture) -> dict[str, str]:
    return {
        "name": picture.name,
        "title": picture.title,
        "caption": picture.caption,
        "svg": picture.svg(),
        "points": str(picture.points),
        "pdf": base64.b64encode(picture.pdf()).decode(),
        "png": base64.b64encode(picture.png()).decode(),
        "csv": base64.b64encode(picture.csv().encode()).decode(),
    }


DASHES = {"-": "none", "--": "6 3", ":": "2 2", "-.": "6 2 2 2"}  # as SVG writes lines
SIGNS = dict(zip("os^vDdP*Xp<>h", "●■▲▼◆♦✚★✖⬟◀▶⬢", strict=True))


def _samples(study: Study) -> dict[str, dict[str, str]]:
    """Return colour, dashes and sign of each row by its label, for the legend and the tables."""
    styles = styles_of([row.method for row in study.rows])
    return {row.label: _sample(style) for row, style in zip(study.rows, styles, strict=True)}


def _sample(style: RowStyle) -> dict[str, str]:
    return {
        "number": str(style.number),
        "color": ON_PAGE.get(style.color, style.color),
        "dashes": DASHES[style.line],
        "sign": SIGNS[style.marker],
    }


def _runs(study: Study) -> dict[str, object]:
    """Return the table of runs; versions are a column only if runs differ in them."""
    runs = [(row.label, run) for row in study.rows for run in row.runs]
    versions = [_versions(run) for _, run in runs]
    same = len(set(versions)) == 1
    head = ["row", "seed", "rounds", "status", "time", *([] if same else ["versions"]), "folder"]
    lines = [
        (*_run(label, run), *([] if same else [text]), str(run.folder))
        for (label, run), text in zip(runs, versions, strict=True)
    ]
    return {
        "run_head": head,
        "runs": lines,
        "versions": versions[0] if same and versions[0] != "-" else "",
    }


def _versions(run: FinishedRun) -> str:
    versions = run.result.get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "-"


def _run(label: str, run: FinishedRun) -> tuple[str, ...]:
    return (
        label,
        str(run.seed),
        f"{run.done} of {run.planned}",
        "finished" if run.finished else "unfinished",
        duration(run.result["time/total_s"]) if "time/total_s" in run.result else "-",
    )


def _word(value: object) -> str:
    return "-" if value is None else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
