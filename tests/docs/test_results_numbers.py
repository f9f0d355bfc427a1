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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import results_prose
from results_cells import Experiment, experiment

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DATA = RESULTS / "data"
PAGES = sorted(path.stem for path in RESULTS.glob("*.toml"))
MAIN = (
    *("eval/client/accuracy_mean", "eval/client/probe_mean", "eval/global/accuracy"),
    *("eval/global/accuracy_mean", "eval/global/probe"),
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
            scale = 1 if "loss" in name else 100
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
    about = tomllib.loads((RESULTS / f"{page}.toml").read_text("utf-8"))
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


def check(text: str, values: dict[int, float], sign: str = "") -> None:
    """Compare a mean and its standard error as printed with these values, one for each seed."""
    numbers = np.array(list(values.values()))
    error = [numbers.std(ddof=1) / math.sqrt(len(numbers))] if len(numbers) > 1 else []
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
    checked = 0
    for row in rows:
        label = label_of(row)
        if row["ours"] == "not yet run":
            assert label not in runs
            continue
        if label.endswith(", fine-tuned"):
            of = runs[label.removesuffix(", fine-tuned")]
            check(row["ours"], of.last("eval/client/finetuned_accuracy_mean"))
            continue
        mine = runs[label]
        last = mine.last(column)
        check(row["ours"], last)
        assert row["seeds"] == str(len(last))
        assert int(row["rounds"]) == max(r[-1]["round"] for r in mine.rounds.values())
        if row.get("against local training", "-") != "-":
            check(row["against local training"], paired(last, local), "+")
        for title, text in row.items():
            if title.startswith("p against") and text != "-":
                assert best is not None
                assert float(text) == pytest.approx(
                    chance(paired(best.last(column), last)), abs=6e-4
                )
            if (at := re.fullmatch(r"after (\d+) rounds", title)) and text != "-":
                curves = mine.curves(column).items()
                check(text, {s: c[int(at[1])] for s, c in curves if int(at[1]) in c})
        choose = min if "loss" in column else max
        if row.get("best round", "-") != "-":
            check(
                row["best round"], {s: choose(c.values()) for s, c in mine.curves(column).items()}
            )
        checked += 1 + check_difference(row, np.array(list(last.values())))
    return checked


def check_difference(row: Row, ours: Any) -> int:
    theirs = [float(x) for x in re.findall(r"[\d.]+", row.get("the paper's", ""))]
    if not theirs or row.get("difference", "-") == "-":
        return 0
    away = ours.mean() - theirs[0]
    text = f"{away:+.2f}"
    if len(ours) > 1 and len(theirs) > 1:
        text += (
            f" ({away / math.hypot(ours.std(ddof=1) / math.sqrt(len(ours)), theirs[1]):+.1f} s.e.)"
        )
    assert row["difference"] == text
    return 1


def check_bits(found: Experiment, rows: list[Row]) -> int:
    runs, goal = runs_by_label(found), found.paper.target_accuracy or 0.0
    for row in rows:
        mine = runs[label_of(row)]
        of_round = np.mean([mine.bits(s) / r[-1]["round"] for s, r in mine.rounds.items()])
        assert near(row["a round"], of_round), (label_of(row), row["a round"], of_round)
        text = row.get(f"to {goal:g} %", "-")
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


def near(text: str, value: Any) -> bool:
    number, unit = text.split()
    digits = len(number.partition(".")[2])
    return bool(abs(float(number) - value / BITS[unit]) <= 0.501 * 10.0**-digits)


def check_readings(found: Experiment, rows: list[Row]) -> int:
    runs = runs_by_label(found)
    for row in rows:
        mine = runs[label_of(row)]
        for title, what in (("last round", "last"), *found.options["readings"]):
            values = read(mine, *what.split())
            mean, _, difference = row[title].partition(", ")
            check(mean, values)
            of = {"the paper's": row["the paper's"], "difference": difference}
            assert check_difference(of, np.array(list(values.values()))) == 1
    return len(rows)


def read(runs: Runs, word: str, number: str = "") -> dict[int, float]:
    curves = runs.curves().items()
    if word == "round":
        return {seed: curve[int(number)] for seed, curve in curves}
    if word == "best":
        return {s: max(v for n, v in curve.items() if n <= int(number)) for s, curve in curves}
    return runs.last()


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_every_table_is_that_of_the_archive(page: str) -> None:
    checked = 0
    for found, section in experiments(page):
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
    key, runs = found.options["over"], runs_by_label(found)
    printed = [text for row in rows for text in list(row.values())[1:] if text != "-"]
    shown = {float(x) for x in list(rows[0])[1:] if x != "without it"}
    expected = []
    for cell in found.cells:
        value = cell.row.settings.get(key) if cell.row else None
        if cell.row and (not value or float(value) in shown):  # 0 stands as "without it"
            values = np.array(list(runs[cell.label].last(found.metric).values()))
            error = (
                f" ± {values.std(ddof=1) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
            )
            expected.append(f"{values.mean():.2f}{error}")
    assert sorted(printed) == sorted(expected)
    return len(printed)


# the prose


@pytest.fixture
def found() -> Experiment:
    about = tomllib.loads((RESULTS / "fedlog.toml").read_text("utf-8"))
    return experiment(about["experiments"][0], DATA)


def test_a_number_of_the_prose_is_that_of_its_source(found: Experiment) -> None:
    paths = sorted((DATA / "fedlog" / "table1" / "mnist" / "local").glob("seed-*.csv"))
    local = Runs(paths).last()
    mean, second = np.mean(list(local.values())), local[1]
    found = replaced(found)
    text = f"Local: {{{mean:.2f}|local: last}} %, {{{second:.1f}|local#1: last}} by one seed."
    assert results_prose.rendered(text, found) == f"Local: {mean:.2f} %, {second:.1f} by one seed."
    with pytest.raises(ValueError, match=r"12\.34 is 97\.\d+ by 'local: last'"):
        results_prose.rendered("Local: {12.34|local: last} %.", found)
    with pytest.raises(ValueError, match="has no runs of a row 'nobody'"):
        results_prose.rendered("{1.0|nobody: last}", found)
    with pytest.raises(ValueError, match="'lowest' of local"):
        results_prose.rendered("{1.0|local: lowest}", found)


def replaced(found: Experiment) -> Experiment:
    """The experiment without snippets of its own text."""
    options = {key: value for key, value in found.options.items() if key != "plain"}
    return Experiment(**{**vars(found), "options": options})


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("It gains 3.2 points.", "3.2"),
        ("It gains 1,234.", "1,234"),
        ("From alpha 100 to 0.01.", "0.01"),
        ("In 20 rounds of 5 clients, seed 0, alpha 0.1, fig. 2, CIFAR-10 and `x = 3.5`.", ""),
        ("ResNet18 and [a page](x-12.md) of FedLog-C.", ""),
    ],
)
def test_a_number_without_a_source_is_refused(text: str, refused: str) -> None:
    if not refused:
        results_prose.check_sources(text, {}, "some")
        return
    with pytest.raises(ValueError, match=re.escape(refused)):
        results_prose.check_sources(text, {}, "some")
    results_prose.check_sources(text, {refused: "a reason"}, "some")
    with pytest.raises(ValueError, match="the text has no '99', which is listed as plain"):
        results_prose.check_sources(text, {refused: "a reason", "99": "not there"}, "some")
