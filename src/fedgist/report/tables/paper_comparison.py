"""Tables of results beside a paper's numbers: one paper's table, or an experiment in detail.

``fedgist reproduce`` prints the first, and the pages in ``docs/results`` have the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fedgist.methods import METHODS, base_name
from fedgist.recipe.reading import Recipe
from fedgist.recipe.schema import PaperSection
from fedgist.report.formatting import Sheet, bits_text
from fedgist.report.tables.comparison import (
    Paper,
    Row,
    Study,
    against,
    paper_numbers,
)
from fedgist.report.tables.estimate_texts import shower
from fedgist.report.tables.stats import Draw, Estimate, estimate, holm
from fedgist.report.tables.study_tables import chance, printed_accuracy

TUNED = "eval/client/finetuned_accuracy_mean"
TRAINED = "eval/client/trained_accuracy_mean"
LEAST_FOR_ERROR = 3  # seeds
NOT_RUN, NO_SCORE = "not yet run", "diverged"
PRINTED = "the paper's"


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table: what the paper printed, and ours if there are runs."""

    label: str
    method: str
    paper: Paper | None = None
    row: Row | None = None


Cell = Callable[[PaperRow], str]


def side_by_side(
    studies: Mapping[str, Study], recipes: Mapping[str, Recipe], methods: Sequence[str], source: str
) -> list[Sheet]:
    """Return tables of accuracy and communication, with one row per method of the paper.

    Without a target accuracy there is no table of communication. Methods that were not run show
    only the paper's numbers.
    """
    columns = ("method", *(f"{name} {whose}" for name in recipes for whose in ("ours", "paper")))
    accuracy, communication = [], []
    for method in methods:
        rows = [_paper_row(studies.get(name), recipe, method) for name, recipe in recipes.items()]
        accuracy.append((method, *(cell(row) for row in rows for cell in (_ours, _printed))))
        sent = (cell(row) for row in rows for cell in (_bits_to_target, _printed_bits))
        communication.append((method, *sent))
    sheets = [
        Sheet(
            "Accuracy in the last round, mean over clients (%)",
            columns,
            tuple(accuracy),
            f"mean ± standard error over seeds (ours: {_seeds(studies)}). paper: {source}. "
            "-: not run, or not in this version",
        ),
        Sheet(
            "Communication, both ways, until the target accuracy",
            columns,
            tuple(communication),
            f"bits; targets: {_targets(recipes)}. †: not reached by every seed: until the round of "
            "its highest accuracy",
        ),
    ]
    return sheets if _targets(recipes) else sheets[:1]


def _paper_row(study: Study | None, recipe: Recipe, method: str) -> PaperRow:
    rows = study.rows if study else ()
    row = next((row for row in rows if row.method == method), None)
    return PaperRow(method, method, paper_numbers(recipe.paper.model_dump(), method), row)


def _seeds(studies: Mapping[str, Study]) -> str:
    counts = {len(row.runs) for study in studies.values() for row in study.rows}
    return "-".join(str(n) for n in sorted({min(counts), max(counts)})) if counts else "0"


def _targets(recipes: Mapping[str, Recipe]) -> str:
    percents = {name: recipe.paper.target_accuracy for name, recipe in recipes.items()}
    return ", ".join(f"{name} {percent:g} %" for name, percent in percents.items() if percent)


def accuracies(
    rows: Sequence[PaperRow],
    local: str,
    reference: str,
    *,
    at: int = 0,
    comparable: bool = True,
) -> Sheet:
    """Return our results beside the paper's numbers, with differences and tests.

    Parameters
    ----------
    local
        Method of local training, from which differences are shown.
    reference
        Method of the paper's test: that it is better than the others.
    at
        A round whose value is shown as well; 0 for none.
    comparable
        Whether our numbers can be compared with the paper's.
    """
    chances = _chances(rows, reference)
    columns: dict[str, Cell] = {
        "": lambda row: row.label,
        "rounds": _of(lambda row: str(row.rounds[1])),
        "seeds": _of(lambda row: str(row.final.count if row.final else len(row.runs))),
        "ours": _ours_or_why_not,
        PRINTED: _printed,
        "difference": lambda row: _difference(row) if comparable else "-",
        "against local training": lambda row: _gain(row, _reference(rows, local, row)),
        f"p ({reference} better)": lambda row: chance(chances.get(row.label, (None, None))[0]),
        "p by Holm": lambda row: chance(chances.get(row.label, (None, None))[1]),
        f"after {at} rounds": _of(lambda row: _after(row, at) if at else "-"),
        "best round": lambda row: _shown(row, row.row.best) if row.row else "-",
    }
    lines: list[tuple[str, ...]] = []
    for row in rows:
        lines.append(tuple(cell(row) for cell in columns.values()))
        for words, scores in _further(row):
            cells = (f"{row.label}, {words}", lines[-1][1], str(scores.count), _shown(row, scores))
            lines.append((*cells, *["-"] * (len(columns) - len(cells))))
    return Sheet("Accuracy", tuple(columns), tuple(lines)).filled()


def _further(row: PaperRow) -> Iterator[tuple[str, Estimate]]:
    """Yield other scores of a row's models in words: fine-tuned, or trained before the average."""
    if row.row and (tuned := _mean(row.row.finals(TUNED))):
        yield "fine-tuned", tuned
    name = base_name(row.method)
    keeps: object = METHODS[name].keeps if name in METHODS else ""
    if row.row and keeps == "none" and (trained := _mean(row.row.finals(TRAINED))):
        yield "after local training", trained


def _chances(rows: Sequence[PaperRow], method: str) -> dict[str, tuple[float, float]]:
    """Return by label the p-values against a method, and these corrected for all by Holm.

    There is none where so few pairs cannot be significant.
    """
    tested = {}
    for row in rows:
        other = _reference(rows, method, row)
        versus = against(row.row, other, two_sided=False) if row.row and other else None
        if versus and versus.p is not None:
            tested[row.label] = versus.p
    return dict(
        zip(tested, zip(tested.values(), holm([*tested.values()]), strict=True), strict=True)
    )


def _of(value: Callable[[Row], str]) -> Cell:
    return lambda row: value(row.row) if row.row else "-"


def _after(row: Row, number: int) -> str:
    return shower(row.measure)(_mean(row.at(number)))


def _mean(values: Mapping[Draw, float]) -> Estimate | None:
    return estimate([*values.values()])


def _ours_or_why_not(row: PaperRow) -> str:
    if row.row is None:
        return NOT_RUN
    return _ours(row) if row.row.final else NO_SCORE


def _ours(row: PaperRow) -> str:
    return _shown(row, row.row.final) if row.row else "-"


def _shown(row: PaperRow, value: Estimate | None, *, signed: bool = False) -> str:
    """Return a value with its error; that of two seeds is no estimate of one, and is left out."""
    assert row.row is not None
    few = value is not None and value.count < LEAST_FOR_ERROR
    value = replace(value, error=None) if value and few else value
    return shower(row.row.measure)(value, signed=signed)


def _printed(row: PaperRow) -> str:
    return printed_accuracy(row.paper)


def _difference(row: PaperRow) -> str:
    """Return the difference from the paper's number, also in standard errors of both together."""
    ours, theirs = row.row and row.row.final, row.paper and row.paper.accuracy
    if row.row is None or not ours or not theirs or _cut(row.row):
        return "-"
    mean, *error = theirs
    away = ours.mean - mean
    enough = ours.count >= LEAST_FOR_ERROR
    both = math.hypot(ours.error, *error) if enough and ours.error is not None and error else None
    return f"{100 * away:+.2f}" + (f" ({away / both:+.1f} s.e.)" if both else "")


def _cut(row: Row) -> set[str]:
    """Return what a row says of another number of rounds than its recipe's."""
    departs = row.runs[0].recipe.get("paper", {}).get("departs", [])
    return {text for text in departs if text.startswith("train.num_rounds")}


def _reference(rows: Sequence[PaperRow], method: str, beside: PaperRow) -> Row | None:
    """Return the one row of a method, if a row can be compared with it.

    It cannot if it is not clear which row is meant, or if one of both was cut to fewer rounds than
    its recipe has.
    """
    of_method = [row for row in rows if row.method == method]
    named = [row for row in of_method if row.label == method] or of_method
    other = named[0].row if len(named) == 1 else None
    if other is None or beside.row is None or beside.method == method:
        return None
    return other if _cut(other) == _cut(beside.row) else None


def _gain(row: PaperRow, other: Row | None) -> str:
    versus = against(row.row, other) if row.row and other else None
    return _shown(row, versus.difference, signed=True) if versus else "-"


def communication(rows: Sequence[PaperRow], paper: PaperSection, fedavg: str) -> Sheet | None:
    """Return the bits of a round and until the target, each also as a share of FedAvg's.

    ``fedavg`` is the method's name. The result is None if no row sends anything.
    """
    most, printed = _bits_of_whole(rows, fedavg), paper.communication
    share, until = "share of FedAvg's", f"to {paper.target_accuracy or 0:g} %"
    columns: dict[str, Cell] = {
        "": lambda row: row.label,
        "a round": _of(lambda row: bits_text(_bits_of_round(row))),
        share: _of(lambda row: _share(_bits_of_round(row), most)),
    }
    columns |= _until_target(until) if paper.target_accuracy else {}
    columns |= {
        f"{PRINTED} {until}": _printed_bits,
        f"{PRINTED} {share}": lambda row: _share(
            printed.get(row.method, 0.0), printed.get(fedavg, 0.0)
        ),
    }
    sends = [row for row in rows if row.row and (_bits_of_round(row.row) or row.method in printed)]
    lines = tuple(tuple(cell(row) for cell in columns.values()) for row in sends)
    return Sheet("Communication", tuple(columns), lines).filled() if lines else None


def _until_target(title: str) -> dict[str, Cell]:
    """Return the columns of bits and rounds to the paper's target accuracy."""
    return {
        title: _bits_to_target,
        "rounds": _of(lambda row: f"{row.target.rounds.mean:.1f}" if row.target else "-"),
        "reached": _of(_reached),
    }


def _bits_of_round(row: Row) -> float:
    sent = sum(part.mean for part in (row.up, row.down) if part)
    return 8 * sent / max(1, row.rounds[1])


def _bits_of_whole(rows: Sequence[PaperRow], fedavg: str) -> float:
    """Return the bits of a round of FedAvg; 0 if it was not run, or no other method was."""
    run = {row.label: row.row for row in rows if row.row}
    whole = [row for label, row in run.items() if row.method.startswith(fedavg)]
    return _bits_of_round(whole[0]) if whole and len(whole) < len(run) else 0.0


def _share(part: float, whole: float) -> str:
    return f"1/{whole / part:.{0 if whole > 10 * part else 1}f}" if part and whole > part else "-"


def _bits_to_target(row: PaperRow) -> str:
    target = row.row.target if row.row else None
    mark = "" if target is None or target.by_all else " †"
    return bits_text(8 * target.both.mean) + mark if target else "-"


def _printed_bits(row: PaperRow) -> str:
    return bits_text(row.paper.bits) if row.paper and row.paper.bits else "-"


def _reached(row: Row) -> str:
    return f"{row.target.reached} of {row.target.rounds.count}" if row.target else "-"


def readings(
    rows: Sequence[PaperRow], read: Mapping[str, Callable[[PaperRow], Mapping[Draw, float]]]
) -> Sheet:
    """Return what rows come to if the paper's numbers are read in other ways than ours.

    ``read`` has functions that return a value for each seed, by the titles of their columns.
    """
    columns = ("", PRINTED, "last round", *read)
    lines = []
    for row in rows:
        if row.row is None or row.paper is None or row.paper.accuracy is None:
            continue
        values: list[Mapping[Draw, float]] = [row.row.finals()]
        values += [value(row) for value in read.values()]
        finals = [replace(row.row, final=_mean(by_seed)) for by_seed in values]
        lines.append((row.label, _printed(row), *(_beside(row, ours) for ours in finals)))
    return Sheet("Readings", columns, tuple(lines)).filled()


def _beside(row: PaperRow, ours: Row) -> str:
    read = replace(row, row=ours)
    return f"{_ours(read)}, {_difference(read)}" if ours.final else "-"
