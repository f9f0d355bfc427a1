"""Ranks over blocks, against definitions, Demšar's example, and tables of critical values."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedgist.cli.main import app
from fedgist.errors import ReportError
from fedgist.report.pictures.rank_picture import of_ranks
from fedgist.report.tables.ranks import Ranks, ranks_of
from fedgist.report.tables.stats import friedman, mean_ranks, together
from fedgist.runs.finished.run_reader import find

from written import write_run  # isort: skip

# Demšar 2006, table 5 (a): two-tailed Nemenyi test at 5 %, by the number of methods
CRITICAL = {3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}
scores = st.integers(3, 6).flatmap(
    lambda methods: st.lists(
        st.lists(st.integers(0, 4), min_size=methods, max_size=methods), min_size=2, max_size=9
    )
)


@pytest.mark.parametrize(("methods", "value"), CRITICAL.items())
def test_critical_differences_are_those_of_the_table(methods: int, value: float) -> None:
    test = friedman(np.random.default_rng(1).normal(size=(methods, 14)))
    assert test is not None
    expected = value * math.sqrt(methods * (methods + 1) / (6 * 14))
    assert test.critical == pytest.approx(expected, rel=3e-4)


def test_demsars_example() -> None:
    """Section 3.2.2 has 3.143, 2.000, 2.893, 1.964 of 14 data sets: chi-squared 9.28, CD 1.25."""
    sums = np.array([44.0, 28.0, 40.5, 27.5])
    draw = np.random.default_rng(3)
    while True:  # a table of ranks with these sums, by chance and exchange
        table = np.stack([draw.permutation(4) + 1.0 for _ in range(14)], 1)
        if abs(table.sum(1) - sums).max() < 3:
            break
    test = friedman(table)
    assert test is not None
    mean = table.mean(1)
    by_hand = 12 * 14 / (4 * 5) * ((mean**2).sum() - 4 * 25 / 4)
    assert test.statistic == pytest.approx(by_hand)
    assert test.critical == pytest.approx(1.25, abs=0.005)
    assert 12 * 14 / 20 * (((sums / 14) ** 2).sum() - 25) == pytest.approx(9.28, abs=0.01)


@given(rows=scores, higher=st.booleans())
def test_the_best_has_rank_1_and_ties_share_theirs(rows: list[list[int]], *, higher: bool) -> None:
    table = np.array(rows, dtype=np.float64).T
    found = mean_ranks(table, "higher" if higher else "lower")
    sign = 1 if higher else -1
    by_hand = [
        np.mean(
            [
                1 + sum(sign * o > sign * own for o in block) + (list(block).count(own) - 1) / 2
                for own, block in zip(line, table.T, strict=True)
            ]
        )
        for line in table
    ]
    np.testing.assert_allclose(found, by_hand)
    assert found.sum() == pytest.approx(len(table) * (len(table) + 1) / 2)


@given(st.lists(st.floats(1, 9), min_size=1, max_size=9).map(sorted), st.floats(0, 5))
def test_groups_are_the_largest_sets_within_the_critical_difference(
    means: list[float], critical: float
) -> None:
    found = together(means, critical)
    pairs = {(i, j) for a, b in found for i in range(a, b + 1) for j in range(i + 1, b + 1)}
    near = {
        (i, j)
        for i in range(len(means))
        for j in range(i + 1, len(means))
        if means[j] - means[i] <= critical
    }
    assert pairs == near
    assert not any(a <= c and d <= b for a, b in found for c, d in found if (a, b) != (c, d))


def runs_in(folder: Path, scored: dict[tuple[str, str, int], float]) -> None:
    """Write runs by method, data set and seed."""
    for (method, data, seed), score in scored.items():
        write_run(
            folder / f"{method}-{data}-{seed}",
            [score],
            seed=seed,
            method=method,
            raw={"data": {"name": data}},
        )


def of(folder: Path) -> Ranks:
    return ranks_of(find([folder]))


DATA = ("mnist", "fashion_mnist", "cifar10", "cifar100")


def test_seeds_are_averaged_within_a_block(tmp_path: Path) -> None:
    # rejects seeds as blocks of their own, and the ranks of one seed
    scored: dict[tuple[str, str, int], float] = {}
    for data in DATA:
        for method, pair in {
            "fedlog": (0.9, 0.5),
            "fedavg": (0.1, 0.7),
            "local": (0.6, 0.6),
        }.items():
            scored |= {(method, data, seed): score for seed, score in enumerate(pair)}
    runs_in(tmp_path, scored)
    ranks = of(tmp_path)
    assert ranks.methods == ("fedlog", "local", "fedavg")
    assert ranks.mean_ranks == (1.0, 2.0, 3.0)
    assert set(ranks.blocks) == set(DATA)
    assert ranks.test is not None
    assert ranks.scores[0] == pytest.approx((0.7,) * 4)


@given(st.integers(2, 400), st.lists(st.integers(0, 9), min_size=3, max_size=6))
def test_scores_that_differ_by_rounding_share_a_rank(rows: int, right: list[int]) -> None:
    exact = np.array([right] * 3, dtype=float)
    noisy = np.stack([(exact[0] + k) / rows - k / rows for k in range(3)])
    assert mean_ranks(noisy, "higher").tolist() == [2.0, 2.0, 2.0]
    test = friedman(noisy)
    assert test is not None
    assert (test.statistic, test.p) == (0.0, 1.0)


def test_methods_are_ranked_by_the_seeds_that_all_have(tmp_path: Path) -> None:
    # seen: one seed of a method was ranked against the means of three of the others
    scores = {"fedavg": [0.5, 0.9, 0.9], "fedlog": [0.6], "local": [0.4, 0.1]}
    for method, of_seeds in scores.items():
        for seed, score in enumerate(of_seeds):
            write_run(tmp_path / f"{method}-{seed}", [score], seed=seed, method=method)
    ranks = ranks_of(find([tmp_path]))
    assert ranks.methods == ("fedlog", "fedavg", "local")
    assert ranks.scores == ((0.6,), (0.5,), (0.4,))
    notes = " ".join(ranks.notes)
    assert "1 of 3 runs count" in notes
    assert "1 of 2 runs count" in notes
    shutil.rmtree(tmp_path / "fedavg-0")
    with pytest.raises(ReportError, match="is one of all methods"):
        ranks_of(find([tmp_path]))


def test_a_block_that_lacks_a_method_is_named_and_left_out(tmp_path: Path) -> None:
    scored = {(m, d, 0): 0.1 * i for i, m in enumerate(("fedlog", "fedavg", "local")) for d in DATA}
    del scored["local", "cifar10", 0]
    runs_in(tmp_path, scored)
    ranks = of(tmp_path)
    assert "cifar10" not in ranks.blocks
    assert any("cifar10 is left out: it lacks local" in note for note in ranks.notes)


def test_one_block_has_no_critical_difference(tmp_path: Path) -> None:
    runs_in(tmp_path, {(m, "mnist", s): 0.5 for m in ("fedlog", "fedavg", "local") for s in (0, 1)})
    ranks = of(tmp_path)
    assert ranks.test is None
    assert ranks.groups == ()
    assert any("seeds of one division are no further blocks" in note for note in ranks.notes)
    assert "group" not in ranks.sheet().columns


def test_divisions_are_blocks(tmp_path: Path) -> None:
    for method in ("fedlog", "fedavg", "local"):
        for division in range(3):
            raw = {"data": {"name": "digits", "folds": 3, "division": division}}
            write_run(tmp_path / f"{method}{division}", [0.5], method=method, raw=raw)
    ranks = of(tmp_path)
    assert len(ranks.blocks) == 3
    assert ranks.test is not None
    assert ranks.test.p == 1.0


def test_two_settings_under_one_name_are_refused(tmp_path: Path) -> None:
    runs_in(tmp_path, {(m, "mnist", 0): 0.5 for m in ("fedlog", "fedavg")})
    write_run(tmp_path / "again", [0.5], raw={"data": {"name": "mnist"}, "train": {"lr": 0.3}})
    with pytest.raises(ReportError, match=r"both fedlog on mnist, and differ in train.lr"):
        of(tmp_path)


def test_variants_of_a_method_are_ranked_apart(tmp_path: Path) -> None:
    for share in (0.1, 1.0):
        raw = {"data": {"name": "mnist"}, "method": {"name": "fedprox", "mu": share}}
        write_run(tmp_path / f"{share}", [share], method="fedprox", raw=raw)
    assert of(tmp_path).methods == ("fedprox mu=1", "fedprox mu=0.1")


def test_the_command_prints_and_draws_them(tmp_path: Path) -> None:
    names = ("fedlog", "fedavg", "local", "fedproto")
    runs_in(tmp_path / "runs", {(m, d, 0): 0.2 * i for i, m in enumerate(names) for d in DATA})
    figure = tmp_path / "ranks.svg"
    command = ["compare", str(tmp_path / "runs"), "--ranks", "--figure", str(figure)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "Ranks by accuracy over 4 blocks" in shown.output
    assert shown.output.index("fedproto") < shown.output.index("fedlog")
    text = figure.read_text()
    assert text.startswith("<?xml")
    for wrong in (
        ["--by", "model"],
        ["--format", "csv"],
        ["--reference", "local"],
        ["--target-accuracy", "9"],
    ):
        refused = CliRunner().invoke(app, [*command[:3], *wrong])
        assert "--ranks" in str(refused.exception) + refused.output
    alone = CliRunner().invoke(app, [*command[:2], "--figure", str(figure)])
    assert "--figure draws ranks" in str(alone.exception) + alone.output


def test_the_picture_has_a_mark_for_each_group(tmp_path: Path) -> None:
    runs_in(
        tmp_path,
        {(m, d, 0): 0.1 * i for i, m in enumerate(("fedlog", "local", "fedavg")) for d in DATA[:2]},
    )
    ranks = of(tmp_path)
    assert ranks.groups == ((0, 2),)
    picture = of_ranks(ranks)
    (axes,) = picture.figure.axes
    thick = [line for line in axes.lines if line.get_linewidth() == 3]
    assert len(thick) == 1
    texts = " ".join(text.get_text() for text in axes.texts)
    assert all(name in texts for name in (*ranks.methods, "critical difference"))
    assert [row[0] for row in picture.table[1:]] == list(ranks.methods)


def test_what_limits_the_ranks_is_said(tmp_path: Path) -> None:
    runs_in(tmp_path, {(m, d, 0): 0.5 for m in ("fedlog", "fedavg") for d in DATA[:2]})
    raw = {"data": {"name": "mnist"}, "train": {"lr": 0.3}}
    write_run(tmp_path / "stopped", [0.4], method="local", raw=raw, result=False, planned=5)
    raw = {"data": {"name": "fashion_mnist"}, "train": {"lr": 0.3}}
    write_run(tmp_path / "empty", [], method="local", raw=raw)
    notes = " ".join(of(tmp_path).notes)
    assert "stopped is unfinished: its last value counts" in notes
    assert "empty is left out: it has no 'eval/client/accuracy_mean'" in notes
    assert "runs also differ in train.lr" in notes
    assert "fashion_mnist is left out: it lacks local" in notes
