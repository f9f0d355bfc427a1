"""Every number of the results pages' tables, worked out again from the archives by other means.

The pages are read as text and the archives as CSV. Of the code that makes the pages only the list
of rows is used: which label stands for which files. Numbers of the prose name their source, which
is compared with the archive whenever a page is made; here it is tested that a wrong number, and one
without a source, is refused.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import results_prose
from fedgist.runs.finished.finished_run import OLD
from results_cells import PAGES, Experiment, experiment, read_page
from results_prose import Sources

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DATA = RESULTS / "data"
MAIN = (
    "eval/client/dice_mean",  # before the accuracy of pixels
    *("eval/client/accuracy_mean", "eval/client/probe_mean", "eval/global/accuracy"),
    *("eval/global/accuracy_mean", "eval/global/probe"),
    *("eval/client/auroc_mean", "eval/client/r2_mean"),
)
BITS = {"b": 1, "kb": 1e3, "Mb": 1e6, "Gb": 1e9}
Curves = dict[int, dict[int, float]]
Row = dict[str, str]


def rounds_of(path: Path) -> list[dict[str, float]]:
    table = "".join(x for x in path.read_text("utf-8").splitlines(True) if not x.startswith("#"))
    return [
        {k: float(v) for k, v in row.items() if v} for row in csv.DictReader(io.StringIO(table))
    ]


class Runs:
    """The runs of one row, by seed."""

    def __init__(self, paths: list[Path]) -> None:
        self.rounds = {int(p.stem.partition("-")[2]): rounds_of(p) for p in paths}

    def curves(self, column: str = "") -> Curves:
        found = {}
        for seed, rounds in self.rounds.items():
            name = column or next(c for c in MAIN if c in rounds[-1])
            scale = 1 if "loss" in name or "r2" in name else 100
            found[seed] = {int(r["round"]): scale * r[name] for r in rounds if name in r}
        return {seed: curve for seed, curve in found.items() if curve}

    def last(self, column: str = "") -> dict[int, float]:
        return {seed: curve[max(curve)] for seed, curve in self.curves(column).items()}

    def bits(self, seed: int, until: float = math.inf) -> float:
        rounds = [r for r in self.rounds[seed] if r["round"] <= until]
        return 8 * sum(r["comm/up_bytes"] + r["comm/down_bytes"] for r in rounds)


def experiments(page: str) -> Iterator[tuple[Experiment, str]]:
    """Each experiment of a page with its section."""
    text = (RESULTS / f"{page}.md").read_text("utf-8")
    sections = re.split(r"\n## ", text)[1:]
    sections = [section for section in sections if not section.startswith("The paper's claims")]
    about = read_page(RESULTS / f"{page}.toml")
    for one, section in zip(about["experiments"], sections, strict=True):
        assert section.startswith(one["title"])
        yield experiment(one, DATA), section


def tables(section: str) -> Iterator[list[Row]]:
    for block in re.findall(r"(?:^\|.*\n)+", section + "\n", re.MULTILINE):
        lines = [[c.strip() for c in x.strip("|").split("|")] for x in block.strip().split("\n")]
        if "![" not in block:
            # a table may have two columns of one name: of ours, and of the paper's
            names = [n if n not in lines[0][:i] else f"{n} again" for i, n in enumerate(lines[0])]
            yield [dict(zip(names, line, strict=True)) for line in lines[2:]]


def label_of(row: Row) -> str:
    return next(iter(row.values())).replace("\\", "")


def runs_by_label(found: Experiment) -> dict[str, Runs]:
    return {
        cell.label: Runs([run.folder for run in cell.row.runs]) for cell in found.cells if cell.row
    }


FURTHER = {  # rows beside a method's own, with their column
    ", fine-tuned": "eval/client/finetuned_accuracy_mean",
    ", after local training": "eval/client/trained_accuracy_mean",
}


def check(text: str, values: dict[int, float], sign: str = "") -> None:
    """Compare a mean and its standard error as printed with these values, one for each seed."""
    numbers = np.array(list(values.values()))
    error = [numbers.std(ddof=1) / math.sqrt(len(numbers))] if len(numbers) > 2 else []
    printed = [float(x) for x in text.split(" ± ")]
    assert printed == pytest.approx([numbers.mean(), *error], abs=0.00501), text  # two digits
    assert text.startswith(("+", "-")) or not sign


def paired(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    return {seed: one[seed] - other[seed] for seed in one if seed in other}


def chance(differences: dict[int, float]) -> float:
    """Wilcoxon's signed-rank test, one-sided: the share of sign patterns that are as extreme."""
    d = np.array([x for x in differences.values() if x])
    ranks = np.array([(abs(d) < abs(x)).sum() + ((abs(d) == abs(x)).sum() + 1) / 2 for x in d])
    seen = ranks[d > 0].sum()
    patterns = [ranks[list(s)].sum() for s in itertools.product([False, True], repeat=len(d))]
    return float(np.mean([value >= seen - 1e-9 for value in patterns]))


def check_accuracies(found: Experiment, rows: list[Row]) -> int:
    runs, column = runs_by_label(found), found.metric
    base = [cell.label for cell in found.cells if cell.method == "local" and cell.row]
    local = runs["local" if "local" in base else base[0]].last(column) if base else {}
    best = next((runs[c.label] for c in found.cells if c.method == found.reference and c.row), None)
    checked, tested = 0, dict[str, float]()
    for row in rows:
        label = label_of(row)
        if row["ours"] == "not yet run":
            assert label not in runs
            check_paper(found, row, label)
            continue
        if row["ours"] == "diverged":  # no seed has a score in the last round
            ends = [rounds[-1] for rounds in runs[label].rounds.values()]
            assert row["seeds"] == str(len(ends))
            assert not any(column in end for end in ends for column in MAIN)
            continue
        if further := next((words for words in FURTHER if label.endswith(words)), ""):
            check(row["ours"], runs[label.removesuffix(further)].last(FURTHER[further]))
            continue
        mine = runs[label]
        check_paper(found, row, label)
        last = mine.last(column)
        check(row["ours"], last)
        assert row["seeds"] == str(len(last))
        assert int(row["rounds"]) == max(r[-1]["round"] for r in mine.rounds.values())
        if row.get("against local training", "-") != "-":
            check(row["against local training"], paired(last, local), "+")
        for title, text in row.items():
            if title.startswith("p (") and text != "-":
                assert best is not None
                differences = paired(best.last(column), last)
                assert len(differences) >= 5  # with fewer none can be significant
                tested[label] = chance(differences)
                assert float(text) == pytest.approx(tested[label], abs=6e-4)
            if (at := re.fullmatch(r"after (\d+) rounds", title)) and text != "-":
                curves = mine.curves(column).items()
                check(text, {s: c[int(at[1])] for s, c in curves if int(at[1]) in c})
        choose = min if "loss" in column else max
        if row.get("best round", "-") != "-":
            check(
                row["best round"], {s: choose(c.values()) for s, c in mine.curves(column).items()}
            )
        checked += 1 + check_difference(row, np.array(list(last.values())))
    check_holm(rows, tested)
    return checked


def check_holm(rows: list[Row], tested: dict[str, float]) -> None:
    """The k-th smallest p of m is printed times m - k + 1, and none is below one before it."""
    for row in rows:
        if row.get("p by Holm", "-") != "-":
            smaller = sorted(p for p in tested.values() if p <= tested[label_of(row)])
            steps = [p * (len(tested) - k) for k, p in enumerate(smaller)]
            assert float(row["p by Holm"]) == pytest.approx(min(1.0, max(steps)), abs=6e-4)


def papers_of(found: Experiment, method: str) -> list[float]:
    """The paper's number of a method, read from the recipe's file or the table's column."""
    about, folder = found.options, Path(__file__).parents[2] / "recipes"
    if not about.get("paper", True):
        return []
    column: dict[str, Any] = {}
    name = about.get("recipe", "")
    if "table" in about:
        table = tomllib.loads((folder / f"{about['table']}.toml").read_text("utf-8"))
        column = table["columns"][about["column"]]
        name = column["recipe"]
    recipe = tomllib.loads((folder / f"{name}.toml").read_text("utf-8"))
    own = column.get("paper", recipe.get("paper", {}).get("accuracy", {}))
    printed = own.get(method, [])
    return [printed] if isinstance(printed, float) else list(printed)


def check_paper(found: Experiment, row: Row, label: str) -> None:
    if "the paper's" not in row or found.metric:
        return
    method = next(cell.method for cell in found.cells if cell.label == label)
    own = found.options.get("papers", {}).get(label)
    printed = [float(x) for x in re.findall(r"[\d.]+", row["the paper's"])]
    assert printed == pytest.approx(own or papers_of(found, method)), label


def check_difference(row: Row, ours: Any) -> int:
    theirs = [float(x) for x in re.findall(r"[\d.]+", row.get("the paper's", ""))]
    if not theirs or row.get("difference", "-") == "-":
        return 0
    away = ours.mean() - theirs[0]
    points, _, errors = row["difference"].partition(" ")
    assert float(points) == pytest.approx(away, abs=0.00501)
    assert points.startswith(("+", "-"))
    if len(ours) > 2 and len(theirs) > 1:
        far = away / math.hypot(ours.std(ddof=1) / math.sqrt(len(ours)), theirs[1])
        assert errors == f"({far:+.1f} s.e.)"
    else:
        assert not errors
    return 1


def check_bits(found: Experiment, rows: list[Row]) -> int:
    runs, goal = runs_by_label(found), found.paper.target_accuracy or 0.0
    for row in rows:
        mine = runs[label_of(row)]
        of_round = of_a_round(mine)
        assert near(row["a round"], of_round), (label_of(row), row["a round"], of_round)
        text = row.get(f"to {goal:g} %", "-")
        method = next(cell.method for cell in found.cells if cell.label == label_of(row))
        if theirs := row.get(f"the paper's to {goal:g} %", "-").strip("-"):
            assert near(theirs, found.paper.communication[method])
        if list(row)[2:3] == ["share of FedAvg's"] and row["share of FedAvg's"] != "-":
            averaging = (c for c in found.cells if c.row and c.method.startswith("fedavg"))
            whole = of_a_round(runs[next(averaging).label])
            ratio = row["share of FedAvg's"].removeprefix("1/")
            digits = len(ratio.partition(".")[2])
            assert abs(float(ratio) - whole / of_round) <= 0.501 * 10.0**-digits
        if text == "-":
            continue
        ends = {}
        for seed, curve in mine.curves().items():
            hits = [n for n, value in curve.items() if value >= goal]
            ends[seed] = min(hits) if hits else max(curve, key=lambda n: (curve[n], -n))
        reached = sum(max(curve.values()) >= goal for curve in mine.curves().values())
        assert near(text.removesuffix(" †"), np.mean([mine.bits(s, n) for s, n in ends.items()]))
        assert row["reached"] == f"{reached} of {len(ends)}"
        assert text.endswith("†") == (reached < len(ends))
        assert float(row["rounds"]) == pytest.approx(np.mean(list(ends.values())), abs=0.051)
    return len(rows)


def of_a_round(runs: Runs) -> float:
    return float(np.mean([runs.bits(s) / r[-1]["round"] for s, r in runs.rounds.items()]))


def near(text: str, value: Any) -> bool:
    number, unit = text.split()
    digits = len(number.partition(".")[2])
    return bool(abs(float(number) - value / BITS[unit]) <= 0.501 * 10.0**-digits)


def check_readings(found: Experiment, rows: list[Row]) -> int:
    runs = runs_by_label(found)
    for row in rows:
        mine = runs[label_of(row)]
        for title, what in (("last round", "last"), *found.options["readings"]):
            values = read(mine, what, label_of(row))
            mean, _, difference = row[title].partition(", ")
            if mean == "-":  # no runs, or some of an earlier version
                assert what.startswith("folder")
                continue
            check(mean, values)
            of = {"the paper's": row["the paper's"], "difference": difference}
            assert check_difference(of, np.array(list(values.values()))) == 1
    return len(rows)


def read(runs: Runs, what: str, label: str) -> dict[int, float]:
    word, _, number = what.partition(" ")
    curves = runs.curves().items()
    if word == "folder":
        folder = DATA / number.format(label.replace("@", "_"))
        return Runs(sorted(folder.glob("seed-*.csv"))).last() if folder.is_dir() else {}
    if word == "round":
        return {seed: curve[int(number)] for seed, curve in curves}
    if word == "best":
        return {s: max(v for n, v in curve.items() if n <= int(number)) for s, curve in curves}
    return runs.last()


@pytest.mark.slow
@pytest.mark.parametrize("page", [path.stem for path in PAGES])
def test_every_number_of_every_table_is_that_of_the_archive(page: str) -> None:
    checked = 0
    for found, section in experiments(page):
        if count := re.search(r"(?:^|\s)(\d+) runs?,", section.rpartition("|")[2]):
            assert int(count[1]) == len({run.folder for run in found.runs})
        for rows in tables(section) if found.runs else ():
            if "ours" in rows[0]:
                checked += check_accuracies(found, rows)
            elif "a round" in rows[0]:
                checked += check_bits(found, rows)
            elif "last round" in rows[0]:
                checked += check_readings(found, rows)
            elif found.options.get("gains"):
                checked += check_gains(found, rows)
            else:
                checked += check_by_setting(found, rows)
    assert checked > 10


def check_gains(found: Experiment, rows: list[Row]) -> int:
    cells = [cell for cell in found.cells if cell.row]
    runs = runs_by_label(found)
    if found.options.get("transposed"):
        (key, *values), lines = rows[0], {label_of(row): list(row.values())[1:] for row in rows}
        rows = [
            {"clients.availability": v, **{name: line[i] for name, line in lines.items()}}
            for i, v in enumerate(values)
        ]
        assert not key
    for row in rows:
        settings = {k: v for k, v in row.items() if "." in k}
        here = {
            cell.method: runs[cell.label].last()
            for cell in cells
            if cell.row and all(str(cell.row.settings[k]) == v for k, v in settings.items())
        }
        check(row["local"], here["local"])
        assert row.get("seeds", str(len(here["local"]))) == str(len(here["local"]))
        for method, of_method in here.items():
            if method != "local" and row.get(method, "-") != "-":
                check(row[method].removesuffix(" (old)"), paired(of_method, here["local"]), "+")
    return len(rows)


def check_by_setting(found: Experiment, rows: list[Row]) -> int:
    """A cell stands in the line of its settings, in the column of the one that is varied."""
    key, runs = found.options["over"], runs_by_label(found)
    (_, *titles), cells = rows[0], [cell for cell in found.cells if cell.row]
    expected: dict[str, dict[str, dict[int, float]]] = {}
    methods: dict[str, set[str]] = {}
    for cell in cells:
        assert cell.row is not None
        value = cell.row.settings.get(key)  # 0 stands as "without it"
        title = f"{float(value):g}" if value and float(value) else "without it"
        line = label_without(cell.label, key)
        expected.setdefault(line, {})[title] = runs[cell.label].last(found.metric)
        methods.setdefault(line, set()).add(cell.method)
    checked = 0
    for row in rows:
        label = label_of(row)
        if label not in expected:  # named by its method, and by keys and values of settings
            words = {word.rpartition("=")[2] for word in label.removesuffix(OLD).split()}
            varied = [x for x, values in expected.items() if set(values) != {"without it"}]
            (label,) = [x for x in varied if {*re.split("[ =]", x), *methods[x]} >= words]
        for title in titles:
            values = expected[label].pop(title, None)
            assert (row[title] == "-") == (values is None), (label, title)
            if values is not None:
                check(row[title], values)
                checked += 1
        left = {float(title) for title in expected.pop(label)}
        assert not left & {float(x) for x in titles if x != "without it"}
    assert not expected
    return checked


def label_without(label: str, key: str) -> str:
    short = key.rpartition(".")[2]
    return " ".join(word for word in label.split() if not word.startswith(f"{short}="))


# the prose


@pytest.fixture
def sources() -> Sources:
    """The experiments of a page, without the snippets of their own texts."""
    about = read_page(RESULTS / "fedlog.toml")
    return Sources(
        {one["name"]: experiment(one, DATA) for one in about["experiments"][:2]}, "mnist"
    )


def test_a_number_of_the_prose_is_that_of_its_source(sources: Sources) -> None:
    paths = sorted((DATA / "fedlog" / "table1" / "mnist" / "local").glob("seed-*.csv"))
    local = Runs(paths).last()
    mean, second = np.mean(list(local.values())), local[1]
    text = f"Local: {{{mean:.2f}|local: last}} %, {{{second:.1f}|local#1: last}} by one seed."
    shown = f"Local: {mean:.2f} %, {second:.1f} by one seed."
    assert results_prose.rendered(text, sources) == shown
    # a page's own text names the experiment
    lead = text.replace("|", "|mnist: ")
    assert results_prose.rendered(lead, replace(sources, own="")) == shown
    for wrong, says in (
        ("Local: {12.34|local: last} %.", r"12\.34 is 97\.\d+ by 'local: last'"),
        ("{1.0|nobody: last}", "has no runs of a row 'nobody'"),
        ("{1.0|local: lowest}", "'lowest' of local"),
        ("{1.0|local: paper}", "the paper has no number of 'local'"),
        (
            "{1.0|celeba: local: last}",
            "the page has no experiment 'celeba'; it has mnist, fedproto",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            results_prose.rendered(wrong, sources)
    with pytest.raises(ValueError, match="the page has no experiment ''"):
        results_prose.rendered(text, replace(sources, own=""))


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("It gains 3.2 points.", "3.2"),
        ("It gains 1,234.", "1,234"),
        ("From alpha 3 to 0.02.", "0.02"),
        ("After 73 rounds of 100 clients.", "73"),  # the runs have 100 of both
        ("In 77 images.", "77"),
        ("It gains five points.", "five points"),
        ("It is twice as good.", ""),
        ("In 100 rounds of 100 clients, 5 seeds, fig. 2, CIFAR-10, `x = 3.5`.", ""),
        ("ResNet18 and [a page](x-12.md) of FedLog-C.", ""),
    ],
)
def test_a_number_without_a_source_is_refused(sources: Sources, text: str, refused: str) -> None:
    if not refused:
        assert results_prose.rendered(text, sources) == text
        return
    with pytest.raises(ValueError, match=re.escape(refused)):
        results_prose.rendered(text, sources)
    listed = replace(sources, plain={refused: "a reason"})
    assert results_prose.rendered(text, listed) == text
    with pytest.raises(ValueError, match="the text has no '99', which is listed as plain"):
        results_prose.rendered(text, replace(sources, plain={refused: "a reason", "99": "no"}))
