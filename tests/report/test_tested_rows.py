"""Tables over rows: saved predictions against the record, statistics against scikit-learn's."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
from typer.testing import CliRunner

import fedgist
from fedgist.cli.main import app
from fedgist.errors import RecipeError
from fedgist.report.pictures import study_pictures as pictures
from fedgist.report.tables import comparison, tested_rows
from fedgist.report.tables.client_scores import rows_once
from fedgist.report.tables.client_tables import by_client
from fedgist.report.tables.row_tables import row_sheets
from fedgist.report.tables.stats import logit_interval, mean_of_differences
from fedgist.report.tables.tested_rows import (
    RARE_ROWS,
    RESAMPLED,
    difference,
    resampled,
    sites_of,
)
from fedgist.report.tables.thresholds import at_thresholds, threshold_of
from fedgist.runs.files.prediction_file import TEST, VALIDATION, Predictions, read_predictions
from fedgist.runs.files.record import PREDICTIONS
from fedgist.runs.finished.finished_run import FinishedRun
from fedgist.runs.finished.run_reader import find

NAMES = ("Bonn", "Kiel", "Ulm")
ROWS = 240
Numbers = np.ndarray[Any, Any]


def table(classes: int = 2) -> tuple[Numbers, Numbers, list[Numbers]]:
    """Rows of overlapping classes, and whose they are: a large, a middle and a small client."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, classes, ROWS)
    x = rng.normal(size=(ROWS, 4)) + y[:, None] * np.array([1.1, 0.5, 0.0, 0.3])
    return x.astype(np.float32), y, np.split(np.arange(ROWS), [110, 184])


def make_run(out: Path, method: str = "fedavg", **sections: Any) -> Path:
    x, y, owned = table(sections.pop("classes", 2))
    train = dict(zip(NAMES, (own[::2] for own in owned), strict=True))
    held = dict(zip(NAMES, (np.arange(len(own[1::2])) for own in owned), strict=True))
    ends = np.cumsum([0, *(len(rows) for rows in held.values())])
    held = {name: rows + ends[i] for i, (name, rows) in enumerate(held.items())}
    test = np.concatenate([own[1::2] for own in owned])
    recipe: dict[str, Any] = {
        "method": {"name": method},
        "model": {"name": "mlp", "hidden": [6]},
        "train": {"num_rounds": 2, "lr": 0.05, "batch_size": 8},
        "data": {"validation": 0.4},
        "engine": {"workers": 1, "cohort_size": 3},
    }
    for key, value in sections.items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    data = (x, y, x[test], y[test])
    fedgist.run(recipe, data=data, clients=train, clients_test=held, out=out)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    for method, seed in itertools.product(("fedavg", "local"), (0, 1)):
        make_run(place / method / f"seed-{seed}", method, seed=seed)
    return place


def said_in(run: Path) -> Predictions:
    said = read_predictions(run)
    assert said is not None
    return said


def test_saved_predictions_have_the_scores_of_the_record(folder: Path) -> None:
    """Per client, scikit-learn's metrics of the file are those of clients.jsonl."""
    for run in sorted(folder.glob("*/seed-*")):
        lines = [json.loads(line) for line in (run / "clients.jsonl").read_text().splitlines()]
        for split, number in (("client", TEST), ("validation", VALIDATION)):
            of_split = said_in(run).of(number)
            last = [line for line in lines if line["round"] == 2 and line["split"] == split]
            assert len(last) == len(NAMES)
            for line in last:
                own = of_split.take(of_split.client == line["client"])
                right = own.predicted == own.label
                assert len(right) == line["rows"]
                assert right.mean() == pytest.approx(line["accuracy"])
                area = sklearn.metrics.roc_auc_score(own.label, own.probability[:, 1])
                assert area == pytest.approx(line["auroc"])


def test_a_row_is_known_by_its_content(folder: Path) -> None:
    """The same rows have the same digests in runs of all methods and seeds; others differ."""
    each = [said_in(run).of(TEST) for run in sorted(folder.glob("*/seed-*"))]
    assert all((one.row == each[0].row).all() for one in each)
    assert len(set(each[0].row.tolist())) == len(each[0].row)
    validation = said_in(folder / "local" / "seed-0").of(VALIDATION)
    assert not set(validation.row.tolist()) & set(each[0].row.tolist())


@pytest.mark.parametrize("classes", [2, 4, 600])
def test_weighted_metrics_are_scikit_learns(classes: int) -> None:
    """A draw of rows is a weight for each; equal probabilities share their rank."""
    rng = np.random.default_rng(classes)
    for _ in range(20 if classes < 9 else 1):
        rows = classes + int(rng.integers(12, 40))
        p = rng.integers(1, 6, (rows, classes)).astype(np.float64)
        p /= p.sum(1, keepdims=True)
        y = np.concatenate([np.arange(classes), rng.integers(0, classes, rows - classes)])
        none = np.zeros(rows, dtype=np.int64)
        said = Predictions(none, none, y, none, p.argmax(1), np.log(p / (1 - p)).round(12))
        weights = rng.integers(1, 4, (3, rows)).astype(np.float64)
        found = {name: measure(weights, said) for name, measure in RESAMPLED.items()}
        for draw, weight in enumerate(weights):
            about: Any = {"sample_weight": weight}
            areas = [
                sklearn.metrics.roc_auc_score(y == c, p[:, c], **about) for c in range(classes)
            ]
            expected = {
                "auroc": np.mean(areas),
                "macro_f1": sklearn.metrics.f1_score(y, p.argmax(1), average="macro", **about),
                "balanced_accuracy": sklearn.metrics.balanced_accuracy_score(
                    y, p.argmax(1), **about
                ),
            }
            assert {n: v[draw] for n, v in found.items()} == pytest.approx(expected)


def test_metrics_over_rows_are_means_over_clients_and_seeds(folder: Path) -> None:
    rows = comparison.study(find([folder])).rows
    for row in rows:
        runs = [run.folder for run in row.runs]
        for name in RESAMPLED:
            found = resampled(sites_of(rows)[row.label], name)
            assert found is not None
            lines = [
                json.loads(line)
                for run in runs
                for line in (run / "clients.jsonl").read_text().splitlines()
            ]
            last = [line[name] for line in lines if (line["round"], line["split"]) == (2, "client")]
            assert found.value == pytest.approx(np.mean(last))
            low, high = found.estimate.low, found.estimate.high
            assert found.has_interval
            assert low is not None
            assert high is not None
            assert 0 < low < found.value < high < 1


def test_no_interval_with_few_rows_of_a_class(tmp_path: Path) -> None:
    """Ulm has 28 test rows of four classes: no class has ten."""
    runs = find([make_run(tmp_path / "run", classes=4)])
    rows = comparison.study(runs).rows
    sites = sites_of(rows)[rows[0].label]
    assert min(site.rarest for site in sites.values()) < RARE_ROWS
    found = resampled(sites, "macro_f1")
    assert found is not None
    assert (found.estimate.low, found.estimate.high) == (None, None)


def test_differences_are_counted_row_by_row(folder: Path) -> None:
    study = comparison.study(find([folder]), reference="local")
    sites = sites_of(study.rows)
    shares = {}
    for method in ("fedavg", "local"):
        runs = [said_in(folder / method / f"seed-{s}").of(TEST) for s in (0, 1)]
        shares[method] = np.mean([run.predicted == run.label for run in runs], 0)
    apart, client = shares["fedavg"] - shares["local"], said_in(folder / "local" / "seed-0")
    owner = client.of(TEST).client
    found = difference(sites["fedavg"], sites["local"])
    assert (found.gained, found.lost) == ((apart > 0).sum(), (apart < 0).sum())
    assert found.over_rows.mean == pytest.approx(apart.mean())
    means = [apart[owner == number].mean() for number in range(len(NAMES))]
    assert found.over_clients.mean == pytest.approx(np.mean(means))
    assert found.over_clients.low is None, "Ulm has fewer than 30 test rows"
    mirrored = difference(sites["local"], sites["fedavg"]).over_rows
    assert (mirrored.low, mirrored.high) == pytest.approx(
        tuple(-bound for bound in (found.over_rows.high or 0, found.over_rows.low or 0))
    )


def test_the_interval_of_a_difference_is_bonett_and_prices() -> None:
    """Their formula, from the counts of rows that only one of the two models is right about."""
    for gained, lost, equal in ((5, 2, 33), (0, 0, 30), (3, 0, 40)):
        rows = [1.0] * gained + [-1.0] * lost + [0.0] * equal
        n = len(rows) + 2
        p12, p21 = (gained + 1) / n, (lost + 1) / n
        away = 1.959964 * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / n)
        found = mean_of_differences([rows])
        assert found.mean == pytest.approx((gained - lost) / len(rows))
        assert (found.low, found.high) == pytest.approx(
            (p12 - p21 - away, p12 - p21 + away), abs=1e-6
        )


def test_an_interval_on_the_logit_scale() -> None:
    low, high = logit_interval(0.9, 0.02)
    assert low is not None
    assert high is not None
    odds = [math.log(p / (1 - p)) for p in (low, 0.9, high)]
    assert odds[1] - odds[0] == pytest.approx(odds[2] - odds[1])
    assert odds[2] - odds[1] == pytest.approx(1.959964 * 0.02 / 0.09, rel=1e-6)
    assert logit_interval(1.0, 0.02) == (None, None)
    assert logit_interval(0.5, 0.0) == (None, None)


def test_a_threshold_is_the_least_with_enough_specificity() -> None:
    """Every number between scores is tried, too: none below the threshold is specific enough."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows = int(rng.integers(4, 30))
        score, mark = rng.integers(0, 8, rows) / 8, rng.random(rows) < 0.4
        mark[:2] = True, False
        least = float(rng.choice([0.5, 0.8, 0.95, 1.0]))
        found = threshold_of(score.tolist(), mark.tolist(), least)
        spared = (score[~mark] < found).mean()
        assert spared >= least - 1e-9
        for other in np.linspace(-0.01, 1.1, 112):
            if (score[~mark] < other).mean() >= least - 1e-9:
                # no rows are between the two: what they call positive is the same, or less
                assert ((score >= other) <= (score >= found)).all()
    assert math.isnan(threshold_of([0.1, 0.2], [False, False], 0.9))
    assert math.isnan(threshold_of([0.1, 0.2], [True, True], 0.9))


def test_a_threshold_between_scores_of_32_bits_is_none_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen: above rows of one score it was that score, and all were called positive
    (run,) = find([folder / "fedavg" / "seed-0"])
    said, rng = said_in(run.folder), np.random.default_rng(0)
    for count in (1, 2, 3) * 5:  # few different scores, each the neighbour of another
        near = [np.float32(rng.normal())]
        near += [near[0] + step * np.spacing(near[0]) for step in range(1, count)]
        odds = rng.choice(np.array(near, np.float32), len(said.label))
        same = replace(said, log_odds=np.stack([-odds, odds], 1))
        monkeypatch.setattr(FinishedRun, "predictions", same)
        for client, at in at_thresholds(run).items():
            for split in (TEST, VALIDATION):
                of = same.of(split).take(same.of(split).client == client)
                called = np.array([score >= at.odds for score in of.log_odds[:, 1].tolist()])
                found, spared = called[of.label == 1], ~called[of.label == 0]
                if split == TEST:
                    assert (at.found, at.spared) == (found.sum(), spared.sum())
                else:
                    assert spared.mean() >= 0.95
                    assert at.separates == found.any()


def test_thresholds_are_applied_to_test_rows(folder: Path) -> None:
    (run,) = find([folder / "fedavg" / "seed-0"])
    said = said_in(run.folder)
    for client, at in at_thresholds(run).items():
        own = {part: said.of(part) for part in (TEST, VALIDATION)}
        rows = {part: p.take(p.client == client) for part, p in own.items()}
        p = {part: said.probability.astype(np.float64) for part, said in rows.items()}
        scores = {part: np.log(both[:, 1]) - np.log(both[:, 0]) for part, both in p.items()}
        benign = scores[VALIDATION][rows[VALIDATION].label == 0]
        assert (benign < at.odds).mean() >= 0.95
        assert at.chosen_on == len(benign)
        score, mark = scores[TEST], rows[TEST].label == 1
        assert at.found == (score[mark] >= at.odds).sum()
        assert at.spared == (score[~mark] < at.odds).sum()
        assert at.threshold == pytest.approx(1 / (1 + math.exp(-at.odds)))
        assert (at.positives, at.negatives) == (mark.sum(), (~mark).sum())


def test_probabilities_that_round_to_one_are_told_apart() -> None:
    """Seen: of an overconfident model all sure rows were one tie, and its sensitivity was 0."""
    odds = np.array([46.0, 27.6, 20.7, 0.0, 120.0], np.float32)
    mark = np.array([True, False, False, False, True])
    none = np.zeros(5, dtype=np.int64)
    said = Predictions(none, none, mark, none, none, np.stack([-odds, odds], 1))
    assert said.probability[:, 1] == pytest.approx([1.0, 1.0, 1.0, 0.5, 1.0], abs=1e-8)
    assert said.probability.sum(1) == pytest.approx(np.ones(5))
    found = threshold_of(odds.tolist(), mark.tolist(), 1.0)
    assert odds[1] < found < odds[0]
    assert RESAMPLED["auroc"](np.ones((1, 5)), said).tolist() == [1.0]


def test_few_validation_rows_are_remarked(folder: Path) -> None:
    study = comparison.study(find([folder]))
    caption = row_sheets(study)[-1].caption
    assert "with fewer than 20 negative validation rows (" in caption
    assert "negative test rows, negative validation rows: Bonn " in caption


def test_the_tables_of_a_comparison(folder: Path) -> None:
    study = comparison.study(find([folder]), reference="local")
    metrics, against, thresholds = row_sheets(study)
    assert metrics.title == "Balanced accuracy, Macro F1, AUROC, over test rows (%)"
    assert [row[0] for row in metrics.rows] == ["fedavg", "local"]
    assert all(cell.startswith("[") for row in metrics.rows for cell in row[2::2])
    assert against.title == "Against local, over test rows (points)"
    assert against.rows[0][1] == "Accuracy"
    assert against.rows[1][1].startswith("one vote a row: ")
    assert thresholds.title == "Sensitivity and specificity for '1' by client (%)"
    assert [row[:2] for row in thresholds.rows] == [
        (name, method) for name in NAMES for method in ("fedavg", "local")
    ]
    done = CliRunner().invoke(app, ["compare", str(folder), "--reference", "local"])
    assert done.exit_code == 0, done.output
    for words in ("over test rows (points)", "one vote a row", "Sensitivity and specificity"):
        assert words in done.output


@pytest.mark.parametrize("lost", range(len(NAMES)))
def test_a_client_without_predictions_is_in_no_comparison_over_rows(
    folder: Path, lost: int
) -> None:
    """A model that diverged has none: whether its client loses is then said without its chance."""
    runs, said_of = find([folder]), by_client(find([folder]))[0].caption
    for run in runs:
        said = said_in(run.folder)
        if run.name == "local":
            run.__dict__["predictions"] = said.take(said.client != lost)
    parts = by_client(runs)[0].caption.split("; ")
    named = [part for part in parts if f"{NAMES[lost]} by fedavg" in part]
    assert bool(named) == (f"{NAMES[lost]} by fedavg" in said_of)
    assert all(part.startswith("worse than local training: ") for part in named)


def test_who_loses_is_said_for_some_client(folder: Path) -> None:
    assert any(f"{name} by fedavg" in by_client(find([folder]))[0].caption for name in NAMES)


def test_very_many_rows_are_not_drawn_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_rows, "MOST_WORK", 400)
    study = comparison.study(find([folder]), reference="local")
    metrics, against, *_ = row_sheets(study)
    assert metrics.columns == ("method", "Balanced accuracy", "Macro F1", "AUROC")
    intervals = {row[1].partition(":")[0]: row[3] != "-" for row in against.rows}
    assert [name for name, has in intervals.items() if has] == ["one vote a row"]
    for sheet in (metrics, against):
        assert "too many rows to draw other ones: fedavg, local" in sheet.caption


def test_the_recipe_says_the_positive_class_and_the_specificity(tmp_path: Path) -> None:
    own: dict[str, Any] = {"evaluate": {"specificity": 0.5}, "objective": {"positive": 0}}
    study = comparison.study(find([make_run(tmp_path / "run", **own)]))
    (sheet,) = [sheet for sheet in row_sheets(study) if "Sensitivity" in sheet.title]
    assert sheet.title == "Sensitivity and specificity for '0' by client (%)"
    assert "with 50 % specificity" in sheet.caption


@pytest.mark.parametrize(
    "other", [{"evaluate": {"specificity": 0.5}}, {"objective": {"positive": 0}}]
)
def test_thresholds_of_another_class_or_specificity_are_left_out_by_name(
    other: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    # seen: one table, named after the first run, had means of 95 % and 50 %, and of both classes
    run = make_run(tmp_path / "run", "fedprox", **other)
    study = comparison.study(find([folder, run]))
    (sheet,) = [sheet for sheet in row_sheets(study) if "Sensitivity" in sheet.title]
    alone = comparison.study(find([folder]))
    (plain,) = [sheet for sheet in row_sheets(alone) if "Sensitivity" in sheet.title]
    assert sorted(row[1:] for row in sheet.rows) == sorted(row[1:] for row in plain.rows)
    left_out = "; left out, of another class or specificity: runs of fedprox"
    assert left_out in sheet.caption.replace("method.mu=", "")
    assert left_out not in plain.caption


def test_calibration_and_decision_curve(folder: Path) -> None:
    study = comparison.study(find([folder]))
    drawn = {picture.name: picture for picture in pictures.pictures(study)}
    runs = [said_in(folder / "fedavg" / f"seed-{seed}").of(TEST) for seed in (0, 1)]
    score = np.concatenate([run.probability[:, 1] for run in runs]).astype(np.float64)
    mark = np.concatenate([run.label == 1 for run in runs])
    points = [row[1:] for row in drawn["calibration"].table[1:] if row[0] == "fedavg"]
    assert sum(count for _, _, count in points) == len(score)
    assert sum(p * n for p, _, n in points) == pytest.approx(score.sum())
    assert sum(share * n for _, share, n in points) == pytest.approx(mark.sum())
    curve = {(row[0], round(row[1], 2)): row[2] for row in drawn["decisions"].table[1:]}
    for chance in (0.1, 0.5, 0.9):
        called = score >= chance
        benefit = (called & mark).mean() - (called & ~mark).mean() * chance / (1 - chance)
        assert curve["fedavg", chance] == pytest.approx(benefit)
        everyone = mark.mean() - (1 - mark.mean()) * chance / (1 - chance)
        assert curve["all", chance] == pytest.approx(everyone)


def test_which_runs_save_predictions(tmp_path: Path) -> None:
    """By default those with natural or given clients, and without privacy."""
    kept = make_run(tmp_path / "auto")
    assert (kept / PREDICTIONS).exists()
    off = make_run(tmp_path / "off", evaluate={"save_predictions": False})
    assert not (off / PREDICTIONS).exists()
    private = {"unit": "record", "epsilon": 50.0, "delta": 1e-3, "clip": 1.0}
    moments = {"mean": [0.5], "std": [1.0], "validation": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the promise covers
        hidden = make_run(tmp_path / "private", "fedlog", privacy=private, data=moments)
    assert not (hidden / PREDICTIONS).exists()
    drawn = {"train": {"num_rounds": 1}, "clients": {"num_clients": 3}, "engine": {"workers": 1}}
    fedgist.run(drawn, out=tmp_path / "drawn")
    assert not (tmp_path / "drawn" / PREDICTIONS).exists()
    wanted = {**drawn, "evaluate": {"save_predictions": True}}
    fedgist.run(wanted, out=tmp_path / "wanted")
    assert (tmp_path / "wanted" / PREDICTIONS).exists()


def test_runs_that_cannot_have_predictions(tmp_path: Path) -> None:
    wanted = {"save_predictions": True}
    with pytest.raises(RecipeError, match=r"save_predictions = true: engine.name = 'loopback'"):
        make_run(tmp_path / "a", evaluate=wanted, engine={"name": "loopback"})
    x, y, _ = table()
    recipe = {
        "objective": {"name": "regression"},
        "partition": {"name": "iid"},
        "method": {"name": "fedavg"},
        "clients": {"num_clients": 2},
        "evaluate": wanted,
        "engine": {"workers": 1},
    }
    with pytest.raises(RecipeError, match="'regression' predicts no classes"):
        fedgist.run(recipe, data=(x, x[:, :1], x, x[:, :1]))
    assert len(y) == ROWS


def test_a_resumed_run_has_the_predictions_of_its_new_end(tmp_path: Path) -> None:
    short = make_run(tmp_path / "run")
    before = (short / PREDICTIONS).read_bytes()
    whole = make_run(tmp_path / "whole", train={"num_rounds": 4})
    x, y, owned = table()
    test = np.concatenate([own[1::2] for own in owned])
    ends = np.cumsum([0, *(len(own[1::2]) for own in owned)])
    fedgist.run(
        short / "recipe.toml",
        data=(x, y, x[test], y[test]),
        clients=dict(zip(NAMES, (own[::2] for own in owned), strict=True)),
        clients_test={n: np.arange(ends[i], ends[i + 1]) for i, n in enumerate(NAMES)},
        out=short,
        resume=True,
        rounds=4,
    )
    assert (short / PREDICTIONS).read_bytes() == (whole / PREDICTIONS).read_bytes() != before


def test_a_damaged_file_is_named_and_its_tables_are_left_out(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "local" / "seed-1" / PREDICTIONS
    path.write_bytes(path.read_bytes()[:-40])
    runs = find([tmp_path / "copy"], trust=True)
    study = comparison.study(runs, reference="local")
    assert f"{path} cannot be used" in pictures.unreadable(study)
    metrics, *_ = row_sheets(study)
    assert "not shown, without saved predictions: local (seal broken)" in metrics.caption
    assert [row[0] for row in metrics.rows] == ["fedavg", "local"]
    seal = CliRunner().invoke(app, ["show", str(tmp_path / "copy")])
    assert PREDICTIONS in seal.output


def test_a_client_that_one_method_lacks_is_named(folder: Path) -> None:
    """Models that diverged have no predictions: their clients leave all tables over rows."""
    study = comparison.study(find([folder]), reference="local")
    for row in study.rows:
        for run in row.runs:
            if run.name == "local":
                said = said_in(run.folder)
                run.__dict__["predictions"] = said.take(said.client != 1)
    captions = [sheet.caption for sheet in row_sheets(study)[:2]]
    assert all("left out, not tested by all methods: Kiel" in caption for caption in captions)
    whole = row_sheets(comparison.study(find([folder]), reference="local"))
    assert not any("left out" in sheet.caption for sheet in whole)


def test_rows_are_counted_once_of_any_part_of_a_sweep() -> None:
    """Three folds of 10, 11 and 12 rows, and two repeats: whatever has ended, rows count once."""
    rows = {0: 10, 1: 11, 2: 12}
    for ended in itertools.product((0, 1, 2), repeat=3):  # seeds and repeats of each fold
        by_fold = [(fold, rows[fold]) for fold in rows for _ in range(ended[fold])]
        assert rows_once(by_fold) == sum(rows[fold] for fold in rows if ended[fold])
    assert rows_once([(0, 30), (0, 32)]) == 31
