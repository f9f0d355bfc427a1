"""Makes the pages of results from the archive: python docs/results_page.py, from the root.

``docs/results/PAPER.toml`` says which experiments a page has and what is said of them. Numbers and
pictures are made from the runs in ``docs/results/data`` and the numbers in the paper's recipes; a
picture carries the digest of the numbers that it shows.
"""

from __future__ import annotations

import math
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedgist.report.drawing import Picture
from fedgist.report.escapes import markdown_text
from fedgist.report.formatting import bits_text, duration, printed
from fedgist.report.stats import Estimate, estimate, paired_difference
from fedgist.report.study_rows import Row
from fedgist.runs.columns import EPSILON
from results_cells import Cell, Experiment, by_method, experiment, over
from results_pictures import pictures, write
from results_prose import Sources, rendered

RESULTS = Path(__file__).parent / "results"
DATA = RESULTS / "data"
REFERENCE = "local"  # what sharing gains is the difference from it
FINETUNED = "eval/client/finetuned_accuracy_mean"
Table = list[list[str]]
CHOICE = Path(__file__).parent / "which-method.md"
BEGIN, END = "<!-- made by docs/results_page.py -->\n", "<!-- end -->"  # of its table


def accuracies(found: Experiment) -> Table:
    """Return ours beside the paper's, with their difference, the test, and what sharing gains."""
    head = ["", "rounds", "seeds", "ours", "the paper's", "difference", "against local training"]
    other = found.options.get("at", 0)
    head += [f"p against {found.reference}", f"after {other} rounds", "best round"]
    lines = [head]
    for cell in found.cells:
        theirs = None if found.metric else found.papers(cell)
        paper = printed(theirs) if theirs else ""
        seen = cell.values(found.metric)
        ours = estimate([*seen.values()])
        if cell.row is None or ours is None:
            lines.append([cell.label, "", "", "not yet run", paper, *[""] * 5])
            continue
        base, best = (_values_of(name, found, cell) for name in (REFERENCE, found.reference))
        gain = paired_difference(seen, base) if base and cell.method != REFERENCE else None
        mean, rounds = plus_minus(ours), str(cell.row.rounds[1])
        whole = found.options.get("comparable", True) and not _cut(cell)
        away = _away(ours, theirs) if theirs and whole else ""
        against = plus_minus(gain.difference, sign="+") if gain else ""
        test = paired_difference(seen, best) if cell.method != found.reference else None
        chance = f"{test.p:.3f}" if test and test.p is not None else ""
        beside = [
            estimate([*values.values()])
            for values in (cell.at(other, found.metric), cell.best(found.metric))
        ]
        shown = [mean, paper, away, against, chance, *(plus_minus(e) if e else "" for e in beside)]
        lines.append([cell.label, rounds, str(ours.count), *shown])
        if tuned := estimate([*cell.values(FINETUNED).values()]):
            label, count = f"{cell.label}, fine-tuned", str(tuned.count)
            lines.append([label, rounds, count, plus_minus(tuned), *[""] * 6])
    return _without_empty_columns(lines)


def _values_of(method: str, found: Experiment, beside: Cell) -> dict[int, float]:
    """Return the values of the one cell of a method, if they can be compared with a row's.

    They cannot where it is not clear which cell is meant, or where one of both was cut to fewer
    rounds than its recipe has.
    """
    cells = [cell for cell in found.cells if cell.method == method]
    named = [cell for cell in cells if cell.label == method] or cells
    if len(named) != 1 or _cut(named[0]) != _cut(beside):
        return {}
    return named[0].values(found.metric)


def _cut(cell: Cell) -> set[str]:
    """Return what a row says of another number of rounds than its recipe's."""
    departs = cell.row.runs[0].recipe.get("paper", {}).get("departs", []) if cell.row else []
    return {text for text in departs if text.startswith("train.num_rounds")}


def communication(found: Experiment) -> Table:
    """Return the bits of a round, and until the target, each as a share of FedAvg's."""
    printed = found.paper.communication
    rounds = {c.label: _bits_of_round(c.row) for c in found.cells if c.row}
    whole = [rounds[c.label] for c in found.cells if c.row and c.method.startswith("fedavg")]
    most = whole[0] if whole and len(whole) < len(rounds) else 0.0  # beside other methods
    paper_most = printed.get("fedavg", 0.0)
    goal = found.paper.target_accuracy
    share, until_goal = "share of FedAvg's", f"to {goal or 0:g} %"
    head = ["", "a round", share, until_goal, "rounds", "reached"]
    lines = [[*head, f"the paper's {until_goal}", share]]
    for cell in found.cells:
        one, target = rounds.get(cell.label, 0.0), cell.row.target if cell.row else None
        paper = printed.get(cell.method, 0.0)
        if cell.row is None or cell.row.up is None or (not one and not paper):
            continue
        until = ["", "", ""]
        if target:
            mark = "" if target.by_all else " †"
            reached = f"{target.reached} of {target.rounds.count}"
            until = [bits_text(8 * target.both.mean) + mark, f"{target.rounds.mean:.1f}", reached]
        theirs = [bits_text(paper) if paper else "", _share(paper, paper_most)]
        lines.append([cell.label, bits_text(one), _share(one, most), *until, *theirs])
    return _without_empty_columns(lines) if len(lines) > 1 else []


def _bits_of_round(row: Row) -> float:
    sent = sum(part.mean for part in (row.up, row.down) if part)
    return 8 * sent / max(1, row.rounds[1])


def _share(part: float, whole: float) -> str:
    return f"1/{whole / part:.{0 if whole > 10 * part else 1}f}" if part and whole > part else ""


def by_setting(found: Experiment) -> Table:
    """Return the accuracy by the values of the setting that is varied."""
    values, lines = over(found)
    shown = [v for v in values if v in found.options.get("shown", values)]
    column = found.metric
    table = [["", *(f"{value:g}" for value in shown), "without it"]]
    for label, cells in lines.items():
        row = [estimate([*cells[v].values(column).values()]) if v in cells else None for v in shown]
        level = estimate([*cells[math.inf].values(column).values()]) if math.inf in cells else None
        table.append([label, *(plus_minus(mean) if mean else "" for mean in (*row, level))])
    return _without_empty_columns(table)


def gains(found: Experiment) -> Table:
    """Return local training's accuracy in each setting, and what each method adds, by pairs."""
    varied, groups = by_method(found)
    methods = [m for m in dict.fromkeys(cell.method for cell in found.cells) if m != REFERENCE]
    lines = [[*varied, "seeds", REFERENCE, *methods]]
    for values, cells in groups.items():
        base = cells[REFERENCE].values() if REFERENCE in cells else {}
        level = estimate([*base.values()])
        pairs = [
            paired_difference(cells[m].values(), base) if m in cells else None for m in methods
        ]
        old = [" (old)" if m in cells and _is_old(cells[m]) else "" for m in methods]
        more = [
            plus_minus(p.difference, sign="+") + o if p else ""
            for p, o in zip(pairs, old, strict=True)
        ]
        lines.append([*values, str(len(base)), plus_minus(level) if level else "", *more])
    return lines


def _is_old(cell: Cell) -> bool:
    return cell.row is not None and any(run.before for run in cell.row.runs)


def by_rows(table: Table) -> Table:
    """Return a table of gains with a line for each method, a column for each setting."""
    settings, _, *methods = zip(*table, strict=True)
    return [["", *settings[1:]], *(list(line) for line in methods)]


def plus_minus(mean: Estimate, sign: str = "") -> str:
    """Return a mean and its standard error in words, with two digits."""
    error = "" if mean.error is None else f" ± {mean.error:.2f}"
    return f"{mean.mean:{sign}.2f}{error}"


def _away(ours: Estimate, theirs: Sequence[float]) -> str:
    """Return the difference from the paper's number, also in standard errors of both together."""
    mean, *error = theirs
    away = ours.mean - mean
    both = math.hypot(ours.error, *error) if ours.error is not None and error else None
    return f"{away:+.2f}" + (f" ({away / both:+.1f} s.e.)" if both else "")


def _without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table[0])) if not i or any(line[i] for line in table[1:])]
    return [[line[i] or "-" if n and i else line[i] for i in kept] for n, line in enumerate(table)]


def in_markdown(table: Table) -> Iterator[str]:
    """Yield the lines of a table."""
    head, *rows = table
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join("---" if i == 0 else "---:" for i in range(len(head))) + "|"
    yield from ("| " + " | ".join(markdown_text(cell) for cell in row) + " |" for row in rows)


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
    for table in filter(None, _tables(found)):
        yield from (*in_markdown(table), "")
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
    """Return what a heading says of rows that lack a correction and have not been run again."""
    rows = [cell.row for cell in found.cells if cell.row]
    old = [cell for cell in found.cells if _is_old(cell)]
    if not old:
        return ""
    some = "" if len(old) == len(rows) else f"{len(old)} of {len(rows)} rows "
    return f" ({some}before a correction)"


def _tables(found: Experiment) -> list[Table]:
    if "over" in found.options:
        return [by_setting(found)]
    if found.options.get("gains"):
        table = gains(found)
        # many methods stand below each other, with a column for each setting
        return [by_rows(table) if found.options.get("transposed") else table]
    if not found.runs:
        return []
    more = [] if found.metric else [communication(found)]
    return [accuracies(found), *([readings(found)] if "readings" in found.options else []), *more]


def readings(found: Experiment) -> Table:
    """Return what a row comes to if the paper's number is read in other ways, beside the paper's.

    ``readings`` are titles with what is read: ``round 50``, ``best 50``, the best of so many, or
    ``folder F``, the last round of other runs, in F with the row's method in place of its braces.
    """
    chosen: list[list[str]] = found.options["readings"]
    head = ["", "the paper's", "last round"]
    lines = [[*head, *(title for title, _ in chosen)]]
    for cell in found.cells:
        theirs = found.papers(cell)
        if theirs is None or cell.row is None:
            continue
        every = [cell.values(), *(_read(cell, what, found) for _, what in chosen)]
        found_ones = [estimate([*values.values()]) for values in every]
        away = [f"{plus_minus(e)}, {_away(e, theirs)}" if e else "" for e in found_ones]
        lines.append([cell.label, printed(theirs), *away])
    return _without_empty_columns(lines)


def _read(cell: Cell, what: str, found: Experiment) -> dict[int, float]:
    word, _, number = what.partition(" ")
    if word == "folder":
        other = found.beside(cell.label, number.format(cell.method))
        return {} if _is_old(other) else other.values()
    if word == "round":
        return cell.at(int(number))
    until = {
        seed: [v for n, v in curve.items() if n <= int(number)]
        for seed, curve in cell.curves().items()
    }
    return {seed: max(values) for seed, values in until.items() if values}


def _remarks(found: Experiment) -> Iterator[str]:
    rows = [cell.row for cell in found.cells if cell.row]
    varied = found.options.get("over")
    if not varied and any(row.target and not row.target.by_all for row in rows):
        yield "†: not every seed reaches the target; of such a seed its best round counts."
    changed = dict.fromkeys(d for row in rows if row.paper for d in row.paper.departs)
    if departs := [text for text in changed if text.partition(" = ")[0] != varied]:
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
    about = tomllib.loads(path.read_text(encoding="utf-8"))
    experiments = {
        one["name"]: experiment({**one, "name": f"{path.stem}-{one['name']}"}, data)
        for one in about["experiments"]
    }
    lead = rendered(about["text"], Sources(experiments, plain=about.get("plain", {})))
    lines, drawn = [f"# {about['title']}", "", *_paragraphs(lead)], []
    for name, found in experiments.items():
        drawn.append(pictures(found))
        sources = Sources(experiments, name, found.options.get("plain", {}))
        lines += section(found, drawn[-1], rendered(found.text, sources))
    return "\n".join(lines) + "\n", [picture for some in drawn for picture in some]


def with_table(page: str, path: Path = RESULTS / "fedlog.toml", data: Path = DATA) -> str:
    """Return the page on which method to choose, with the table of clients that come and go."""
    about = tomllib.loads(path.read_text(encoding="utf-8"))
    one = next(one for one in about["experiments"] if one["name"] == "absence-methods")
    (table,) = _tables(experiment(one, data))
    before, _, rest = page.partition(BEGIN)
    return "\n".join([before + BEGIN, *in_markdown(table), END]) + rest.partition(END)[2]


def main() -> None:
    """Write every page and its pictures."""
    CHOICE.write_text(with_table(CHOICE.read_text(encoding="utf-8")), encoding="utf-8")
    images = RESULTS / "img"
    images.mkdir(exist_ok=True)
    for path in sorted(RESULTS.glob("*.toml")):
        text, drawn = make(path)
        for old in images.glob(f"{path.stem}-*.png"):
            old.unlink()
        for picture in drawn:
            write(picture, images)
        path.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
