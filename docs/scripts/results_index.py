"""The page that counts the papers' cells by state, from the archive: docs/results/index.md."""

from __future__ import annotations

import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedgist.cli.queue_runs import jobs_of_command
from fedgist.cli.study_commands import JOBS_OF
from fedgist.report.formatting import Sheet, duration
from fedgist.report.terminal.table_formats import markdown_table
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.finished.run_reader import read_run
from fedgist.runs.versions import is_current
from fedgist.studies.queue import ROUND_S, read_queue

CELLS = "cells.toml"  # in the archive's folder
SIZE, SMALLER, OLD, NONE = "at the paper's size", "smaller", "by an earlier version", "not run"
#: Beginnings of departures from a paper that make an experiment smaller.
OF_SIZE = ("train.num_rounds", "data.train_rows", "data.image_size", "model.width")
LEAD = """
This page counts the cells of the four papers' tables, and of the figures that print numbers, by
what is in our archive. It is for readers who want to know how much of a paper was done again. What
came out stands on the papers' pages.

**{size} of {all} cells are at the paper's size**; {others}. The page is made by
`python docs/scripts/results_page.py` from the archived runs. `fedgist reproduce all --plan` shows
what comes next, in hours of two cores and of a GPU, for what is left and for all. The first plan,
of 26 November 2026, was 30 hours of two cores for 64 more cells, 129 in all. The price is the time
on two quiet cores of one seed of what is not run, or only by an earlier version: these runs wait in
the queue for nothing but time.
""".strip()
STATES = (SIZE, SMALLER, OLD, NONE)
NO_PRICES: Mapping[Path, float] = MappingProxyType({})
ARCHIVE = Path("docs/results/data")  # as the queue's commands name it
CORES = 2


@dataclass(frozen=True)
class Part:
    """A part of a paper's table: how many of its cells are in each state, and by how many seeds.

    ``price`` is the cost of one seed of the rest, in rounds of workload W2.
    """

    paper: str
    title: str
    counts: Counter[str]
    seeds: tuple[int, ...] = ()
    why: str = ""
    price: float = 0.0


def parts(data: Path, prices: Mapping[Path, float] = NO_PRICES) -> list[Part]:
    """Return the parts of all papers' tables with the state of their cells, and what is left."""
    about = tomllib.loads((data / CELLS).read_text(encoding="utf-8"))["parts"]
    return [_part(one, data, prices) for one in about]


def queue_prices(data: Path) -> dict[Path, float]:
    """Return what a seed costs of each row that the queue beside the data has, by its folder."""
    prices: dict[Path, float] = {}
    for of in read_queue(data.with_name("queue.toml")):
        if of.cells:
            jobs, archive = jobs_of_command(of.command, JOBS_OF, data)
            place = data / archive.relative_to(ARCHIVE)
            prices |= {place / job.folder.parent.relative_to(data): of.cost for job in jobs}
    return prices


def _part(about: Mapping[str, Any], data: Path, prices: Mapping[Path, float]) -> Part:
    if "rows" not in about:
        counts = Counter({NONE: about["cells"]})
        return Part(about["paper"], about["title"], counts, why=about["why"])
    counts, seeds, price = Counter[str](), [], 0.0
    for row in about["rows"]:
        places = [data / of.format(row) if of else data for of in _places(about)]
        found = [_runs(place) for place in places]
        runs = next(filter(None, found), [])
        state = _state(runs, smaller=not found[0])
        counts[state] += about["cells"]
        seeds += [len(runs)] if runs else []
        lacking = places[:1] if state in {NONE, SMALLER} else places if state == OLD else []
        price += next((prices[place] for place in lacking if place in prices), 0.0)
    return Part(about["paper"], about["title"], counts, tuple(seeds), price=price)


def _places(about: Mapping[str, Any]) -> tuple[str, str]:
    """Return where runs of a part are, and where those of a smaller size are."""
    return about.get("of", ""), about.get("smaller", "")


def _runs(place: Path) -> list[FinishedRun]:
    return [read_run(path) for path in sorted(place.glob("seed-*.csv"))]


def _state(runs: Sequence[FinishedRun], *, smaller: bool) -> str:
    if not runs:
        return NONE
    if not all(is_current(run.name, run.result) for run in runs):
        return OLD
    departs = [text for run in runs for text in run.recipe.get("paper", {}).get("departs", ())]
    smaller = smaller or any(text.startswith(OF_SIZE) for text in departs)
    return SMALLER if smaller else SIZE


def page(data: Path) -> str:
    """Return the page."""
    found = parts(data, queue_prices(data))
    total = sum((part.counts for part in found), Counter[str]())
    lines = ["# Results beside the papers", "", *_lead(total)]
    for paper in dict.fromkeys(part.paper for part in found):
        lines += [f"## {paper}", "", *_table([p for p in found if p.paper == paper]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _lead(total: Counter[str]) -> Iterator[str]:
    others = "; ".join(f"{total[state]} {state}" for state in STATES[1:])
    for paragraph in LEAD.format(size=total[SIZE], all=total.total(), others=others).split("\n\n"):
        yield from (*textwrap.wrap(paragraph, 100, break_on_hyphens=False), "")


def _table(found: Sequence[Part]) -> list[str]:
    rows = [
        (part.title, str(part.counts.total()), *_counts(part.counts), _seeds(part), _price(part))
        for part in found
    ]
    total = sum((part.counts for part in found), Counter[str]())
    rows.append(("all", str(total.total()), *_counts(total), "", _price(*found)))
    columns = ("", "cells", *STATES, "seeds", "price")
    return _linked(markdown_table(Sheet("", columns, tuple(rows))))


def _linked(lines: Sequence[str]) -> list[str]:
    """Return the lines of a table in which titles may be links."""
    return [line.replace("\\[", "[").replace("\\]", "]").replace("\\(", "(") for line in lines]


def _counts(counts: Counter[str]) -> list[str]:
    return [str(counts[state]) if counts[state] else "-" for state in STATES]


def _seeds(part: Part) -> str:
    if part.why:
        return part.why
    low, high = (min(part.seeds), max(part.seeds)) if part.seeds else (0, 0)
    return "-" if not high else str(low) if low == high else f"{low} to {high}"


def _price(*found: Part) -> str:
    rounds = sum(part.price for part in found)
    return duration(rounds * ROUND_S["cpu"] / CORES) if rounds else "-"
