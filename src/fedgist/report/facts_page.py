"""Facts about the rows of all sites, as tables and as a page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from fedgist.report.formatting import Sheet, percent
from fedgist.report.model_card import Part, as_html
from fedgist.world.facts.pooled import NumberFacts, PooledFacts
from fedgist.world.facts.question import Question

BAR, WIDEST = "█", 24  # of a bin with the most rows
MOST_CORRELATED = 30  # numbers: a larger matrix cannot be read
NONE = "-"


def sheets(question: Question, facts: PooledFacts) -> tuple[Sheet, ...]:
    """Return the tables of a terminal: numbers, classes and categories."""
    return tuple(_tables(question, facts))


def page(question: Question, facts: PooledFacts, about: Sequence[str]) -> str:
    """Return the page of facts as HTML; ``about`` are sentences on where they come from."""
    sentences = (*about, *facts.notes)
    parts = [Part("Facts before training", sentences, sheets(question, facts))]
    if bins := tuple(_histogram(number) for number in facts.numbers if number.bins):
        parts.append(Part("Histograms", (), bins))
    if together := tuple(_correlations(facts)):
        parts.append(Part("Correlations", (), together))
    return as_html(parts)


def _tables(question: Question, facts: PooledFacts) -> Iterator[Sheet]:
    if facts.numbers:
        shares = question.quantiles if any(n.quantiles for n in facts.numbers) else ()
        quantiles = tuple(f"{100 * share:g} %" for share in shares)
        columns = ("number", "rows", "missing", "mean", "deviation", *quantiles)
        lines = tuple(
            (
                number.name,
                _count(number.present),
                _count(number.missing),
                _shown(number.mean),
                _shown(number.std),
                *(number.quantiles or (NONE,) * len(quantiles)),
            )
            for number in facts.numbers
        )
        yield Sheet(f"{_count(facts.rows)} rows", columns, lines)
    if facts.classes:
        lines = tuple(
            (name, _count(count), percent(count / facts.rows, 1))
            for name, count in facts.classes.items()
        )
        other = facts.rows - sum(facts.classes.values())
        known = other >= max(1.0, 2 * facts.noise)
        caption = f"{_count(other)} rows are of no listed class." if known else ""
        caption = "" if question.target == "labels" else caption
        yield Sheet("Classes", ("class", "rows", "share"), lines, caption)
    for column, counts in facts.categories.items():
        lines = tuple(
            (name, _count(count), percent(count / facts.rows, 1)) for name, count in counts.items()
        )
        other = facts.rows - sum(counts.values())
        known = other >= max(1.0, 2 * facts.noise)
        caption = f"{_count(other)} rows hold none of them." if known else ""
        yield Sheet(f"Categories of {column}", ("category", "rows", "share"), lines, caption)


def _histogram(number: NumberFacts) -> Sheet:
    """Return the bins of a number, each with a bar."""
    edges = [f"{edge:g}" for edge in number.edges]
    names = [
        f"below {edges[0]}",
        *(f"{low} to {high}" for low, high in itertools.pairwise(edges)),
        f"{edges[-1]} and above",
    ]
    most = max(*number.bins, 1.0)
    lines = tuple(
        (name, _count(count), BAR * round(WIDEST * max(0.0, count) / most))
        for name, count in zip(names, number.bins, strict=True)
    )
    return Sheet(number.name, ("bin", "rows", ""), lines)


def _correlations(facts: PooledFacts) -> Iterator[Sheet]:
    if facts.correlations is None:
        return
    names = tuple(number.name for number in facts.numbers)[:MOST_CORRELATED]
    lines = tuple(
        (f"{place} {name}", *(NONE if math.isnan(r) else f"{r:.2f}" for r in row[: len(names)]))
        for place, (name, row) in enumerate(
            zip(names, facts.correlations.tolist(), strict=False), start=1
        )
    )
    left = len(facts.numbers) - len(names)
    caption = f"{left} further numbers are not shown." if left else ""
    places = (str(place) for place in range(1, len(names) + 1))
    yield Sheet("Over rows that have all numbers", ("", *places), lines, caption)


def _count(count: float) -> str:
    return f"{count:,.0f}"


def _shown(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.5g}"
