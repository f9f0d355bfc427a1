"""Numbers in the prose of results pages: each names its source, and is compared with the archive.

In a text, ``{98.30|fedproto: last}`` is printed as 98.30. Behind the bar stands where it is from: a
row of the experiment, a seed of it if ``#0`` follows the row, and what of it: ``last`` (its result,
the mean over seeds), ``best`` (the mean of each seed's best round), ``round 20``, ``paper`` (what
the paper printed) or ``count`` (seeds). A column follows after a comma, and differences are written
with a minus between blanks. Another experiment of the page is named first, as it must be in the
page's own text::

    {+0.46|fedlog: last - local: last}      {41.3|local#0: last, eval/client/probe_max}
    {98.30|mnist: fedproto: last}

A number of a setting needs no source if a recipe of the runs has it, or if a command or the title
says it. Any other is listed in the table ``plain`` of its experiment, a snippet of the text and the
reason why no run can tell it. Results in words, "five points", are refused: they would escape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fedgist.report.tables.comparison import Row
from fedgist.report.tables.paper_comparison import PaperRow
from fedgist.report.tables.stats import Draw
from fedgist.runs.files.columns import measured
from results_cells import Experiment

MARKED = re.compile(r"\{([^|{}]+)\|([^{}]+)\}")
TERM = re.compile(
    r"((?P<experiment>[^#:]+): )?(?P<row>[^#:]+)(#(?P<seed>\d+))?: (?P<what>[^:,]+)"
    r"(, (?P<column>\S+))?"
)
NUMBER = re.compile(r"(?<![\w.,/=-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w/]*\d)")
PART_OF_A_PAPER = re.compile(r"\b(fig\.|table|section|eq\.|algorithm|appendix|version)\s*$")
IN_WORDS = re.compile(
    r"\b(one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|half)"
    r"( and a half| a)? (points?|percent|standard errors?|times as)\b"
)


@dataclass(frozen=True)
class Sources:
    """What the numbers of a text may come from: a page's experiments, of which it may be one's."""

    experiments: Mapping[str, Experiment]
    own: str = ""
    plain: Mapping[str, str] = field(default_factory=dict)

    def settings(self) -> set[float]:
        """Return the numbers of the runs' recipes, of commands and titles."""
        chosen = [self.experiments[self.own]] if self.own else self.experiments.values()
        return {abs(number) for found in chosen for number in _settings(found)}


def rendered(text: str, sources: Sources) -> str:
    """Return a text with its marked numbers as they are printed.

    Raises
    ------
    ValueError
        If a number is not what its source says, or has none.
    """
    wrong = [*_differing(text, sources), *_without_source(text, sources)]
    if wrong:
        raise ValueError(f"{sources.own or 'the page'}: " + "; ".join(wrong))
    return MARKED.sub(r"\1", text)


def updated(text: str, sources: Sources) -> tuple[str, list[str]]:
    """Return a text with its marked numbers as their sources have them, and what was changed.

    Whether a sentence is still true with a new number is for its reader to say.
    """
    changes = []

    def new(match: re.Match[str]) -> str:
        shown, source = match.groups()
        value, digits = _value(source, sources), len(shown.partition(".")[2])
        if _is_rounded(shown, value, digits):
            return match.group()
        number = f"{value:{'+' if shown[0] in '+-' else ''},.{digits}f}"
        turned = " (ITS SIGN TURNED)" if value * float(shown.replace(",", "")) < 0 else ""
        changes.append(f"{shown} -> {number}{turned} by {source!r}")
        return f"{{{number}|{source}}}"

    return MARKED.sub(new, text), changes


def _is_rounded(shown: str, value: float, digits: int) -> bool:
    return abs(round(value, digits) - float(shown.replace(",", ""))) <= 10.0**-digits / 1000


def _differing(text: str, sources: Sources) -> Iterator[str]:
    for shown, source in MARKED.findall(text):
        value, digits = _value(source, sources), len(shown.partition(".")[2])
        if not _is_rounded(shown, value, digits):
            yield f"{shown} is {value:.{digits + 2}f} by {source!r}"


def _without_source(text: str, sources: Sources) -> Iterator[str]:
    """Yield the numbers of a text that have no source and no reason to have none."""
    bare = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", MARKED.sub(" ", text))
    bare = " ".join(bare.split())
    for snippet in sources.plain:
        if snippet not in bare:
            yield f"the text has no {snippet!r}, which is listed as plain"
        bare = bare.replace(snippet, " ")
    known = sources.settings()
    for match in NUMBER.finditer(bare):
        before, behind = bare[: match.start()], bare[match.end() :]
        is_known = abs(float(match.group().replace(",", ""))) in known
        if not (is_known or PART_OF_A_PAPER.search(before)):
            yield f"{match.group()} in {before[-30:] + match.group() + behind[:20]!r} has no source"
    for match in IN_WORDS.finditer(bare):
        yield f"{match.group()!r} is a result in words: write it as a number, with its source"


def _settings(found: Experiment) -> Iterator[float]:
    """Yield the numbers of the settings of an experiment's runs, and how many runs there are."""
    yield from (float(len(row.runs)) for row in found.rows)
    for run in found.runs:
        yield from _numbers(run.recipe)
    for text in (*found.commands, found.title):
        yield from (
            float(n.replace(",", "")) for n in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)
        )
    yield from (float(value) for value in (found.options.get("at"),) if value)


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, Mapping):
        # what the paper found is a result
        inner: Iterable[object] = (v for name, v in value.items() if name != "paper")
    else:
        inner = value if isinstance(value, (list, tuple)) else ()
    for part in inner:
        yield from _numbers(part)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def _value(source: str, sources: Sources) -> float:
    first, *others = source.split(" - ")
    return _term(first.strip(), sources) - sum(_term(o.strip(), sources) for o in others)


def _term(text: str, sources: Sources) -> float:
    match = TERM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no source of a number")
    name = match["experiment"] or sources.own
    if name not in sources.experiments:
        names = ", ".join(sources.experiments)
        raise ValueError(f"{text!r}: the page has no experiment {name!r}; it has {names}")
    found = sources.experiments[name]
    cell = _cell_of(match["row"].strip(), found)
    what, column = match["what"].strip(), match["column"] or found.metric
    if what == "paper":
        if not cell.paper or not cell.paper.accuracy:
            raise ValueError(f"{name}: the paper has no number of {cell.label!r}")
        return 100 * cell.paper.accuracy[0]
    assert cell.row is not None
    by_seed = _by_seed(cell.row, what, column)
    if match["seed"] is not None:
        return by_seed[Draw(int(match["seed"]))]
    if what == "count":
        return len(by_seed)
    return sum(by_seed.values()) / len(by_seed)


def _by_seed(row: Row, what: str, column: str) -> dict[Draw, float]:
    """Return each run's value; fractions in percent."""
    measure = measured(column, row.runs[0].metrics) if column else row.measure
    scale = 100 if measure.unit == "fraction" else 1
    return {draw: scale * value for draw, value in _values(row, what, column).items()}


def _values(row: Row, what: str, column: str) -> dict[Draw, float]:
    read: dict[str, Callable[[str], dict[Draw, float]]] = {
        "last": row.finals,
        "count": row.finals,
        "best": row.bests,
    }
    if what in read:
        return read[what](column)
    word, _, number = what.partition(" ")
    if word != "round" or not number.isdigit():
        raise ValueError(f"{what!r} of {row.label}: last, best, round N, paper or count")
    return row.at(int(number), column)


def _cell_of(label: str, found: Experiment) -> PaperRow:
    for cell in found.cells:
        if label in {cell.label, cell.label.partition(", before ")[0]} and cell.row is not None:
            return cell
    labels = ", ".join(cell.label for cell in found.cells if cell.row is not None)
    raise ValueError(f"{found.name} has no runs of a row {label!r}; it has {labels}")
