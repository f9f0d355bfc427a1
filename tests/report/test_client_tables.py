"""Scores by model and by client: the numbers are worked out here from the runs' own lines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedgist
from fedgist.cli.main import app
from fedgist.errors import ReportError
from fedgist.report import page
from fedgist.report.pictures import study_pictures as pictures
from fedgist.report.tables import comparison
from fedgist.report.tables.client_tables import by_client, by_model
from fedgist.report.tables.client_tables import gains as client_gains
from fedgist.runs.finished.run_reader import find
from fedgist.testing.small_worlds import blobs, rows
from written import write_run

NAMES = ("Bonn", "Kiel", "Rom", "Ulm", "Wien")
MODELS = ("wide", "plain", "wide", "wide", "plain")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two methods and two seeds; clients have names, two models, and unequal test rows."""
    place, data = tmp_path_factory.mktemp("runs"), blobs()
    held = np.array_split(np.arange(len(data.y_test)), [1, 4, 6, 11])
    tables = {
        name: {"model": "mlp", "hidden": [width, 4], "clients": _clients_of(name)}
        for name, width in (("wide", 9), ("plain", 5))
    }
    for method, seed in (("fedlog", 0), ("fedlog", 1), ("local", 0), ("local", 1)):
        recipe: dict[str, Any] = {
            "seed": seed,
            "method": {"name": method},
            "clients": {"architectures": tables},
            "train": {"num_rounds": 2, "lr": 0.05, "batch_size": 4},
            "engine": {"workers": 1, "cohort_size": 3},
        }
        fedgist.run(
            recipe,
            data=data,
            clients=dict(zip(NAMES, rows(), strict=True)),
            clients_test=dict(zip(NAMES, held, strict=True)),
            out=place / method / f"seed-{seed}",
        )
    return place


def _clients_of(model: str) -> list[int]:
    return [client for client, name in enumerate(MODELS) if name == model]


def last_lines(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    return [line for line in lines if line["round"] == 2]


def test_lines_and_the_partition_say_who_a_client_is_and_which_model_it_has(folder: Path) -> None:
    lines = last_lines(folder / "fedlog" / "seed-0")
    assert [line["name"] for line in lines] == [*NAMES]
    assert [line["model"] for line in lines] == [*MODELS]
    split = json.loads((folder / "local" / "seed-1" / "partition.json").read_text())
    assert (split["clients"], split["models"]) == ([*NAMES], [*MODELS])


def test_by_client(folder: Path) -> None:
    table, metrics = by_client(find([folder]))
    assert table.columns == ("client", "model", "test rows", "fedlog", "local", "fedlog - local")
    assert table.title == "Accuracy by client, mean over 2 seeds"
    seeds = {
        method: list(zip(*(last_lines(folder / method / f"seed-{s}") for s in (0, 1)), strict=True))
        for method in ("fedlog", "local")
    }
    losers = []
    for client, row in enumerate(table.rows):
        scores = {m: [100 * line["accuracy"] for line in seeds[m][client]] for m in seeds}
        first = seeds["fedlog"][client][0]
        assert row[:3] == (first["name"], first["model"], str(first["rows"]))
        means = {m: statistics.fmean(values) for m, values in scores.items()}
        spreads = {m: statistics.stdev(values) for m, values in scores.items()}
        gain = means["fedlog"] - means["local"]
        assert row[3:] == (
            *(f"{means[m]:.2f} ± {spreads[m]:.2f} %" for m in ("fedlog", "local")),
            f"{gain:+.2f} points",
        )
        losers += [f"{row[0]} by fedlog"] * (gain < 0)
    assert len({row[2] for row in table.rows}) > 1, "clients have unequal test rows"
    assert ("worse than local training: " + ", ".join(losers) in table.caption) == bool(losers)
    assert metrics.columns[:5] == ("client", "method", "test rows", "95 % of accuracy", "accuracy")
    assert [row[:2] for row in metrics.rows] == [(n, m) for n in NAMES for m in ("fedlog", "local")]
    for row in metrics.rows:
        lines = seeds[row[1]][NAMES.index(row[0])]
        share, count = statistics.fmean(line["accuracy"] for line in lines), lines[0]["rows"]
        low, high = wilson_by_definition(share, count)
        assert row[3] == f"[{100 * low:.1f}, {100 * high:.1f}]"
        aurocs = [line["auroc"] for line in lines if line["auroc"] is not None]
        place = metrics.columns.index("auroc")
        assert row[place] == (f"{100 * statistics.fmean(aurocs):.2f} %" if aurocs else "-")


@pytest.mark.parametrize("table", [by_model, lambda runs: by_client(runs)[0]])
@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ({"fedlog": [0, 1, 4], "local": [0]}, "fedlog 1, 4"),
        ({"fedlog": [0, 1], "local": [3, 1, 2]}, "fedlog 0; local 2, 3"),
        ({"fedlog": [0, 1], "local": [1, 0]}, ""),
    ],
)
def test_seeds_that_not_all_methods_have_are_named(
    table: Callable[..., Any], seeds: dict[str, list[int]], said: str, tmp_path: Path
) -> None:
    for method, some in seeds.items():
        for seed in some:
            place = tmp_path / f"{method}-{seed}"
            write_run(place, [0.5], method=method, seed=seed, clients=[0.4, 0.6])
    caption = table(find([tmp_path])).caption
    assert ("not all methods" in caption) == bool(said)
    assert (f"seeds that not all methods have: {said}" if said else "") in caption


@pytest.mark.parametrize("order", [("0.1", "5.0"), ("5.0", "0.1")])
def test_a_gain_is_over_local_training_of_the_same_rows(
    order: tuple[str, str], tmp_path: Path
) -> None:
    # seen: all gains were over the first local row, whose clients had rows of their own
    scores = {("fedlog", "0.1"): 0.9, ("local", "0.1"): 0.5}
    scores |= {("fedlog", "5.0"): 0.6, ("local", "5.0"): 0.3}
    for alpha in order:
        for method in ("fedlog", "local"):
            raw = {"partition": {"name": "dirichlet", "alpha": float(alpha)}}
            score, place = scores[method, alpha], tmp_path / f"{method}-{alpha}"
            write_run(place, [score], method=method, clients=[score, 0.5], raw=raw)
    sheet = by_client(find([tmp_path]))[0]
    gains = dict(zip(sheet.columns, sheet.rows[0], strict=True))
    found = {name: cell for name, cell in gains.items() if " - " in name}
    assert sorted(found.values()) == ["+30.00 points", "+40.00 points"]
    assert all(name.split(" - ")[0][-3:] == name[-3:] for name in found), [*found]
    table = {label: gain for label, score, gain in client_gains(find([tmp_path])) if gain}
    assert sorted(table.values()) == pytest.approx([0.3, 0.4])


def test_without_local_training_of_the_same_rows_there_is_no_gain(tmp_path: Path) -> None:
    raw = {"partition": {"name": "dirichlet", "alpha": 0.1}}
    write_run(tmp_path / "a", [0.9], clients=[0.9], raw=raw)
    write_run(tmp_path / "b", [0.5], method="local", clients=[0.5])
    assert not any(" - " in name for name in by_client(find([tmp_path]))[0].columns)
    assert client_gains(find([tmp_path])) == []


def wilson_by_definition(share: float, count: int) -> tuple[float, float]:
    """All p that are 1.96 of their own standard errors or less from the share."""
    p = np.linspace(0, 1, 200_001)
    inside = p[(share - p) ** 2 <= 1.959964**2 * p * (1 - p) / count + 1e-12]
    return float(inside.min()), float(inside.max())


def test_by_model(folder: Path) -> None:
    table = by_model(find([folder]))
    assert [row[:2] for row in table.rows] == [
        (model, method) for model in ("all", "plain", "wide") for method in ("fedlog", "local")
    ]
    for model, method, clients, tested, mean, spread, worst, even, weighted in table.rows:
        seeds = [last_lines(folder / method / f"seed-{seed}") for seed in (0, 1)]
        some = [[line for line in seed if model in {"all", line["model"]}] for seed in seeds]
        scores = [np.array([line["accuracy"] for line in seed]) for seed in some]
        weights = [np.array([line["rows"] for line in seed]) for seed in some]
        assert (clients, tested) == (str(len(scores[0])), str(weights[0].sum()))
        assert mean == f"{100 * np.mean([s.mean() for s in scores]):.2f} %"
        assert spread == f"{100 * np.mean([s.std() for s in scores]):.2f} %"
        lowest = [np.sort(s)[: -(-len(s) // 10)].mean() for s in scores]
        assert worst == f"{100 * np.mean(lowest):.2f} %"
        jains = [s.sum() ** 2 / (len(s) * (s**2).sum()) for s in scores]
        assert even == f"{np.mean(jains):.3f}"
        by_rows = [np.average(s, weights=w) for s, w in zip(scores, weights, strict=True)]
        assert weighted == f"{100 * np.mean(by_rows):.2f} %"
    assert any(row[4] != row[-1] for row in table.rows), "the two means differ somewhere"


def test_the_gains_of_clients_are_drawn_and_a_page_has_the_tables(folder: Path) -> None:
    table = comparison.study(find([folder]))
    (picture,) = [p for p in pictures.pictures(table) if p.name == "gains"]
    head, *rows = picture.table
    assert head == ["row", "client", "model", "gain"]
    assert len(rows) == len(NAMES), "clients with names are means over both seeds"
    gains = dict.fromkeys(NAMES, 0.0)
    for seed in (0, 1):
        lines = (last_lines(folder / m / f"seed-{seed}") for m in ("fedlog", "local"))
        for line, alone in zip(*lines, strict=True):
            gains[line["name"]] += (line["accuracy"] - alone["accuracy"]) / 2
    for name, model in zip(NAMES, MODELS, strict=True):
        assert ["fedlog", name, model, pytest.approx(gains[name])] in rows
    html = page.render(table, [], "Runs")
    words = ("by model", "by client, mean over 2 seeds", "Bonn")
    assert [text for text in words if text not in html] == []
    alone = comparison.study(find([folder / "fedlog"]))
    assert not [p for p in pictures.pictures(alone) if p.name == "gains"]
    assert "by client" in page.render(alone, [], "Runs")


@pytest.mark.slow
def test_the_command_and_runs_that_it_cannot_show(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["show", str(folder / "fedlog"), "--by", "model"])
    assert (done.exit_code, done.stdout.count("fedlog")) == (0, 3)
    for form, head in (
        ("markdown", "| client | model | test rows |"),
        ("latex", "client & model & test rows"),
    ):
        done = CliRunner().invoke(app, ["compare", str(folder), "--by", "client", "--format", form])
        assert (done.exit_code, done.stdout.count(head)) == (0, 1)
    done = CliRunner().invoke(app, ["compare", str(folder), "--by", "model", "--format", "csv"])
    assert "--by model has no --format csv: each client's numbers are in" in str(done.exception)
    old = write_run(tmp_path / "old", [0.5, 0.75], clients=[0.5, 1.0])  # no names, no models
    (row, other) = by_client(find([old]))[0].rows
    assert (row[:3], other[3]) == (("0", "-", "10"), "100.00 %")
    waiting = write_run(tmp_path / "waiting", [0.5, 0.75], seed=1)  # same settings, not yet scored
    assert len(by_client(find([old, waiting]))[0].rows) == 2
    table = comparison.study(find([old, waiting]))
    assert "by client, seed 0" in page.render(table, pictures.pictures(table), "Runs")
    by_loss = comparison.study(find([folder]), metric="train/loss")
    (gains,) = [p for p in pictures.pictures(by_loss) if p.name == "gains"]
    assert "accuracy of a client" in gains.figure.axes[0].get_xlabel()
    empty = write_run(tmp_path / "empty", [0.5])
    with pytest.raises(ReportError, match="--by: no run has scores of single clients"):
        by_model(find([empty]))


def test_rows_by_another_metric_are_named_and_not_dropped(folder: Path, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "method": {"name": "fedavg"},
        "objective": {"metrics": ["calibration_error"]},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1},
    }
    fedgist.run(recipe, data=blobs(), clients=rows(), out=tmp_path / "other")
    runs = find([folder, tmp_path / "other"])
    note = "not shown, without Accuracy of single clients: fedavg"
    assert note in by_client(runs)[0].caption
    assert note in by_model(runs).caption
    drawn = {p.name: p for p in pictures.pictures(comparison.study(runs))}
    assert note[1:] in drawn["over-clients"].caption
    assert "Not shown, without local training to compare: fedavg." in drawn["gains"].caption


def test_clients_are_drawn_by_the_metric_of_the_runs(tmp_path: Path) -> None:
    # seen: runs without accuracy were left out of the figure, which was of accuracy in any case
    recipe: dict[str, Any] = {
        "method": {"name": "fedavg"},
        "objective": {"metrics": ["brier"]},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1},
    }
    result = fedgist.run(recipe, data=blobs(), clients=rows(), out=tmp_path / "run")
    (picture,) = (
        p for p in pictures.pictures(comparison.study(find([tmp_path]))) if p.name == "over-clients"
    )
    head, *lines = picture.table
    assert head[-1] == "brier"
    mean = sum(line[-1] for line in lines) / len(lines)
    assert mean == pytest.approx(result.rounds[-1]["eval/client/brier_mean"])
