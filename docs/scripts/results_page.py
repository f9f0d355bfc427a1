"""Makes the pages of results from the archive: python docs/scripts/results_page.py, from the root.

``docs/results/PAPER.toml`` says which experiments a page has and what is said of them. Numbers and
pictures are made from the runs in ``docs/results/data`` and the numbers in the paper's recipes; a
picture carries the digest of the numbers that it shows. With ``--update`` the numbers in the prose
of ``PAPER.toml`` are first written anew, and each change is printed: read its sentence again.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import results_index
from fedgist.report.formatting import Sheet, duration
from fedgist.report.pictures import varied
from fedgist.report.pictures.drawing import Picture
from fedgist.report.tables import study_tables as tables
from fedgist.report.tables.paper_comparison import (
    PaperRow,
    accuracies,
    communication,
    readings,
)
from fedgist.report.tables.stats import Draw
from fedgist.report.terminal.table_formats import markdown_table
from fedgist.runs.files.columns import EPSILON
from fedgist.runs.files.run_directory import as_folder
from results_cells import PAGES, RESULTS, Experiment, experiment, read_page
from results_pictures import pictures, write
from results_prose import Sources, rendered, updated

DATA = RESULTS / "data"
VERDICTS = {"holds", "in part", "does not", "not tested"}
LOSS_COLUMN = "eval/client/loss_mean"
REFERENCE = "local"  # what sharing gains is the difference from it
DOCS = Path(__file__).parents[1]
#: Other pages with the tables of an experiment, and the page of results and experiment it is of.
COPIES: Mapping[str, tuple[str, str]] = {
    "which-method.md": ("fedlog", "absence-methods"),
    "tasks/regression.md": ("tasks", "regression"),
    "tasks/multilabel.md": ("tasks", "multilabel"),
    "tasks/text-classes.md": ("tasks", "text-classes"),
    "tasks/segmentation.md": ("tasks", "segmentation"),
}
BEGIN, END = "<!-- made by docs/scripts/results_page.py -->\n", "<!-- end -->"  # of its table


def section(found: Experiment, drawn: Sequence[Picture], text: str = "") -> Iterator[str]:
    """Yield the lines of an experiment's section."""
    yield from ("", f"## {found.title}{_stale(found)}", "")
    if text:
        yield from (*_paragraphs(text), "")
    yield from ("```sh", *found.commands, "```", "") if found.commands else ()
    figure = found.options.get("figure")  # one that a script of its own makes
    if not found.runs and not (figure and (RESULTS / figure).is_file()):
        yield "Not yet run."
        return
    for table in tables_of(found):
        yield from (*markdown_table(table), "")
    for start in range(0, len(drawn), 2):
        both = drawn[start : start + 2]
        images = (f"![{found.title}: {p.title}](img/{p.name}.png)" for p in both)
        yield f"| {' | '.join(picture.title for picture in both)} |"
        yield "|" + "---|" * len(both)
        yield from (f"| {' | '.join(images)} |", "")
    if figure and (RESULTS / figure).is_file():
        yield f"![{found.title}]({figure})"
        yield from ("",) if found.runs else ()
    if found.runs:
        yield from _wrapped(" ".join(_remarks(found)))


def _stale(found: Experiment) -> str:
    """Return what a heading says of rows of an earlier version that have not been run again."""
    run = [cell for cell in found.cells if cell.row]
    old = [cell for cell in run if ", before " in cell.label]
    if not old:
        return ""
    some = "" if len(old) == len(run) else f"{len(old)} of {len(run)} rows "
    return f" ({some}of an earlier version)"


def tables_of(found: Experiment) -> list[Sheet]:
    """Return the tables of an experiment."""
    if "over" in found.options:
        return [varied.sheet(found.lines, found.rows[0].measure, found.options.get("shown", ()))]
    if found.options.get("gains"):
        table = tables.gains(found.rows, REFERENCE)
        # many methods stand below each other, with a column for each setting
        return [by_rows(table) if found.options.get("transposed") else table]
    if not found.runs:
        return []
    shown: list[Sheet | None] = [_accuracies(found)]
    if "readings" in found.options:
        shown.append(readings(found.cells, _readings(found)))
    if not found.metric:
        shown.append(communication(found.cells, found.paper, "fedavg"))
    return [sheet for sheet in shown if sheet]


def _accuracies(found: Experiment) -> Sheet:
    """Return the table of results that an experiment asks for."""
    at, comparable = found.options.get("at", 0), found.options.get("comparable", True)
    # the paper's numbers are of the first metric
    cells = [replace(cell, paper=None) if found.metric else cell for cell in found.cells]
    table = accuracies(cells, REFERENCE, found.reference, at=at, comparable=comparable)
    table = _with_losses(table, found) if found.options.get("losses") else table
    return _ranked(table, found) if found.options.get("ranks") else table


def _ranked(table: Sheet, found: Experiment) -> Sheet:
    """Return the table by rank of the mean; a row's further lines stay below it."""
    labels = {cell.label: cell.row for cell in found.cells}
    groups: list[list[tuple[str, ...]]] = []
    for line in table.rows:
        groups += [[]] if line[0] in labels else []
        groups[-1].append(line)
    finals = {label: row.final if row else None for label, row in labels.items()}
    means = {label: final.mean if final else -1.0 for label, final in finals.items()}
    groups.sort(key=lambda lines: -means[lines[0][0]])
    rows = []
    for lines in groups:
        mean = means[lines[0][0]]
        rank = str(1 + sum(other > mean for other in means.values())) if mean >= 0 else "-"
        rows += [(*line, place) for line, place in zip_longest(lines, [rank], fillvalue="")]
    return replace(table, columns=(*table.columns, "rank"), rows=tuple(rows))


def _with_losses(table: Sheet, found: Experiment) -> Sheet:
    """Return the table with a column of the log loss after the last round."""
    losses = experiment({**found.options, "losses": False, "metric": LOSS_COLUMN}, found.data)
    shown = _accuracies(losses)
    place = shown.columns.index("ours")
    rows = [(*row, loss[place]) for row, loss in zip(table.rows, shown.rows, strict=True)]
    return replace(table, columns=(*table.columns, "log loss"), rows=tuple(rows))


def by_rows(table: Sheet) -> Sheet:
    """Return a table of gains with a line for each method, a column for each setting."""
    without_seeds = [i for i, name in enumerate(table.columns) if name != "seeds"]
    rows = tuple(tuple(row[i] for i in without_seeds) for row in table.rows)
    columns = ("", *(table.columns[i] for i in without_seeds[1:]))
    return replace(table, columns=columns, rows=rows).transposed()


def _readings(found: Experiment) -> dict[str, Callable[[PaperRow], Mapping[Draw, float]]]:
    """Return the functions that read a row in other ways, by their titles.

    ``readings`` are titles with what is read: ``round 50``, ``best 50``, the best of so many, or
    ``folder F``, the last round of other runs, in F with the row's method in place of its braces.
    """

    def reading(what: str) -> Callable[[PaperRow], Mapping[Draw, float]]:
        return lambda cell: _read(cell, what, found)

    return {title: reading(what) for title, what in found.options["readings"]}


def _read(cell: PaperRow, what: str, found: Experiment) -> Mapping[Draw, float]:
    word, _, number = what.partition(" ")
    row = cell.row
    if word == "folder":
        row = found.beside(number.format(as_folder(cell.method)))
        return row.finals() if row and not row.is_old else {}
    if row is None:
        return {}
    if word == "round":
        return row.at(int(number))
    curves = row.curves().items()
    until = {draw: [v for n, v in c.items() if n <= int(number)] for draw, c in curves}
    return {draw: max(values) for draw, values in until.items() if values}


def _remarks(found: Experiment) -> Iterator[str]:
    rows, setting = found.rows, found.options.get("over")
    if not setting and any(row.target and not row.target.by_all for row in rows):
        yield "†: not every seed reaches the target; of such a seed its best round counts."
    if rows and all(len(row.runs) == 1 for row in rows) and "seeds" not in found.options:
        printed = any(row.paper for row in rows)
        share = "a part of their distance from the paper with it"
        share = share if printed else "another may rank them otherwise"
        yield f"One seed: all rows share one division of the data, and {share}."
    changed = dict.fromkeys(d for row in rows if row.paper for d in row.paper.departs)
    if departs := [text for text in changed if text.partition(" = ")[0] != setting]:
        yield f"Other settings than the paper's: {', '.join(f'`{d}`' for d in departs)}."
    spent = [v for run in found.runs if (v := run.last(EPSILON)) is not None]
    if spent:
        yield f"Epsilon spent: {min(spent):.4g} to {max(spent):.4g}."
    seconds = sum(float(run.result.get("time/total_s", 0)) for run in found.runs)
    runs = f"{len(found.runs)} run{'s' if len(found.runs) > 1 else ''}"
    beside = "what else the machine did meanwhile was not recorded"
    yield f"{runs}, {duration(seconds)} in all; {beside}."


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.strip().split("\n\n")):
        yield from ("",) if number else ()
        yield from _wrapped(paragraph)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def make(path: Path, data: Path = DATA) -> tuple[str, list[Picture]]:
    """Return the page that a file describes, and its pictures."""
    about = read_page(path)
    experiments = {
        one["name"]: experiment({**one, "name": f"{path.stem}-{one['name']}"}, data)
        for one in about["experiments"]
    }
    lead = rendered(about["text"], Sources(experiments, plain=about.get("plain", {})))
    lines, drawn = [f"# {about['title']}", "", *_paragraphs(lead)], []
    lines += claims(about, experiments)
    for name, found in experiments.items():
        drawn.append(pictures(found))
        sources = Sources(experiments, name, found.options.get("plain", {}))
        lines += section(found, drawn[-1], rendered(found.text, sources))
    return "\n".join(lines) + "\n", [picture for some in drawn for picture in some]


def claims(about: Mapping[str, Any], experiments: Mapping[str, Experiment]) -> list[str]:
    """Return the lines of the section of a paper's claims: each with what came of it here."""
    stated = about.get("claims", [])
    if not stated:
        return []
    plain = about.get("claims_plain", {})
    here = rendered("\n".join(one["text"] for one in stated), Sources(experiments, plain=plain))
    pairs = zip(stated, here.split("\n"), strict=True)
    rows = tuple((one["claim"], one["here"], text) for one, text in pairs)
    unknown = {one["here"] for one in stated} - VERDICTS
    if unknown:
        raise ValueError(f"{about['title']}: a claim {', '.join(unknown)}; known: {VERDICTS}")
    table = ["| The paper's claim | here | by |", "|---|---|---|"]
    table += [f"| {' | '.join(cells)} |" for cells in rows]
    return ["", "## The paper's claims", "", *table]


def with_tables(page: str, results: str, name: str, data: Path = DATA) -> str:
    """Return a page with the tables of an experiment of a page of results."""
    about = read_page(RESULTS / f"{results}.toml")
    one = next(one for one in about["experiments"] if one["name"] == name)
    lines = [x for table in tables_of(experiment(one, data)) for x in ("", *markdown_table(table))]
    before, _, rest = page.partition(BEGIN)
    return "\n".join([before + BEGIN, *lines[1:], END]) + rest.partition(END)[2]


def update(path: Path) -> list[str]:
    """Write the numbers of a page's prose anew into its file; return what was changed."""
    about, file = read_page(path), path.read_text(encoding="utf-8")
    experiments = {one["name"]: experiment(one, DATA) for one in about["experiments"]}
    texts = [(about["text"], Sources(experiments))]
    texts += [(found.text, Sources(experiments, name)) for name, found in experiments.items()]
    texts += [(one["text"], Sources(experiments)) for one in about.get("claims", [])]
    changes = []
    for text, sources in texts:
        new, some = updated(text, sources)
        file = file.replace(text, new) if some else file
        changes += [f"{path.stem} {sources.own}: {change}" for change in some]
    if changes:
        path.write_text(file, encoding="utf-8")
    return changes


def main() -> None:
    """Write every page and its pictures, and the tables of other pages."""
    if "--update" in sys.argv[1:]:
        print(*(change for path in PAGES for change in update(path)), sep="\n")
    for place, source in COPIES.items():
        text = (DOCS / place).read_text(encoding="utf-8")
        (DOCS / place).write_text(with_tables(text, *source), encoding="utf-8")
    images = RESULTS / "img"
    images.mkdir(exist_ok=True)
    for path in PAGES:
        text, drawn = make(path)
        for old in images.glob(f"{path.stem}-*.png"):
            old.unlink()
        for picture in drawn:
            write(picture, images)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
    (RESULTS / "index.md").write_text(results_index.page(DATA), encoding="utf-8")


if __name__ == "__main__":
    main()
