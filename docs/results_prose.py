"""Numbers in the prose of results pages: each names its source, and is compared with the archive.

In a text, ``{98.30|fedproto: last}`` is printed as 98.30. Behind the bar stands where it is from: a
row of the experiment, a seed of it if ``#0`` follows the row, and what of it: ``last`` (its result,
the mean over seeds), ``best`` (the mean of each seed's best round), ``round 20``, ``paper`` (what
the paper printed) or ``count`` (seeds). A column follows after a comma, and differences are written
with a minus between blanks::

    {+0.46|fedlog: last - local: last}      {41.3|local#0: last, eval/client/probe_max}

Numbers of settings need no source: a recipe states them. Any other is listed in the table ``plain``
of its experiment, a snippet of the text and the reason why no run can tell it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from results_cells import Cell, Experiment

MARKED = re.compile(r"\{([^|{}]+)\|([^{}]+)\}")
TERM = re.compile(r"(?P<row>[^#:]+)(#(?P<seed>\d+))?: (?P<what>[^,]+)(, (?P<column>\S+))?")
NUMBER = re.compile(r"(?<![\w.,/=-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w/]*\d)")
# numbers that a recipe states, or that name a part of a paper
BEFORE = re.compile(
    r"(\b(alpha|beta|epsilon|delta|gamma|mu|seed|fig\.|table|section|eq\.|correction|round|rounds"
    r"|lambda\w*)|=)\s*$"
)
BEHIND = re.compile(
    r"^[\s-]*(rounds?|seeds?|clients?|classes|class|images?|rows?|epochs?|steps?|iterations?|layers?"
    r"|pools?|users?|sentences|trials|people|activities|cores?|observations?|neighbou?rs)\b"
)


def rendered(text: str, found: Experiment) -> str:
    """Return a text with its marked numbers as they are printed.

    Raises
    ------
    ValueError
        If a number is not what its source says, or has none.
    """
    if wrong := list(_differing(text, found)):
        msg = f"{found.name}: " + "; ".join(wrong)
        raise ValueError(msg)
    check_sources(text, found.options.get("plain", {}), found.name)
    return MARKED.sub(r"\1", text)


def check_sources(text: str, plain: Mapping[str, str], name: str) -> None:
    """Raise ValueError if a number of a text has neither a source nor a reason to have none."""
    if wrong := list(_without_source(text, plain)):
        msg = f"{name}: " + "; ".join(wrong)
        raise ValueError(msg)


def _differing(text: str, found: Experiment) -> Iterator[str]:
    for shown, source in MARKED.findall(text):
        value = _value(source, found)
        digits = len(shown.partition(".")[2])
        printed = float(shown.replace(",", ""))
        if abs(round(value, digits) - printed) > 10.0**-digits / 1000:
            yield f"{shown} is {value:.{digits + 2}f} by {source!r}"


def _without_source(text: str, plain: Mapping[str, str]) -> Iterator[str]:
    """Yield the numbers of a text that have no source and no reason to have none."""
    bare = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", MARKED.sub(" ", text))
    bare = " ".join(bare.split())
    for snippet in plain:
        if snippet not in bare:
            yield f"the text has no {snippet!r}, which is listed as plain"
        bare = bare.replace(snippet, " ")
    for match in NUMBER.finditer(bare):
        before, behind = bare[: match.start()], bare[match.end() :]
        if not (BEFORE.search(before) or BEHIND.match(behind)):
            yield f"{match.group()} in {before[-30:] + match.group() + behind[:20]!r} has no source"


def _value(source: str, found: Experiment) -> float:
    first, *others = source.split(" - ")
    return _term(first.strip(), found) - sum(_term(other.strip(), found) for other in others)


def _term(text: str, found: Experiment) -> float:
    match = TERM.fullmatch(text)
    if match is None:
        msg = f"{found.name}: {text!r} is no source of a number"
        raise ValueError(msg)
    cell = _cell_of(match["row"].strip(), found)
    what, column = match["what"].strip(), match["column"] or found.metric
    if what == "paper":
        return found.paper.accuracy[cell.method][0]
    by_seed = _by_seed(cell, what, column)
    if match["seed"] is not None:
        return by_seed[int(match["seed"])]
    if what == "count":
        return len(by_seed)
    return sum(by_seed.values()) / len(by_seed)


def _by_seed(cell: Cell, what: str, column: str) -> dict[int, float]:
    read: dict[str, Callable[[str], dict[int, float]]] = {
        "last": cell.values,
        "count": cell.values,
        "best": cell.best,
    }
    if what in read:
        return read[what](column)
    word, _, number = what.partition(" ")
    if word != "round" or not number.isdigit():
        msg = f"{what!r} of {cell.label}: last, best, round N, paper or count"
        raise ValueError(msg)
    return cell.at(int(number), column)


def _cell_of(row: str, found: Experiment) -> Cell:
    for cell in found.cells:
        if row in {cell.label, cell.label.partition(", before ")[0]} and cell.row is not None:
            return cell
    msg = f"{found.name} has no runs of a row {row!r}"
    raise ValueError(msg)
