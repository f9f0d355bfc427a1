"""Predict, evaluate and export of each task, by the command line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from sklearn.metrics import r2_score
from typer.testing import CliRunner, Result

import fedgist
from fedgist.cli.main import app
from fedgist.data.sources.loading import load_data
from fedgist.errors import DataError
from fedgist.report.tables.prediction_table import prediction_lines
from small_tasks import recipe_of

RUNNER = CliRunner()


def cli(*words: object) -> Result:
    done = RUNNER.invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done


def arrays(place: Path, objective: str) -> Path:
    """Write a small .npz file of a task, with its own test rows."""
    draw = np.random.default_rng(0)
    if objective == "segmentation":
        x = draw.integers(0, 256, (24, 8, 8), dtype=np.uint8)
        y: Any = (x > 128).astype(np.int64)
    else:
        x = draw.normal(size=(24, 4)).astype(np.float32)
        y = x[:, :2] * 10 + 50 if objective == "regression" else (x[:, :2] > 0).astype(np.int64)
    np.savez(place, x=x, y=y, test=np.arange(24) % 3 == 0)
    return place


def trained(tmp_path: Path, objective: str, **data: Any) -> tuple[Path, Any]:
    folder = tmp_path / "run"
    found = recipe_of(objective, method={"name": "fedavg"}, partition={"name": "iid"})
    found["clients"] = {"num_clients": 2}
    found["data"] = data or {"name": "npz", "path": str(arrays(tmp_path / "d.npz", objective))}
    return folder, fedgist.run(found, out=folder)


def lines_of(done: Result) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(done.stdout)))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_predicted_numbers_have_all_their_digits(kind: torch.dtype) -> None:
    # seen: times in seconds were all 1.7e+09
    draws = np.random.default_rng(0).normal(size=(9, 2))
    numbers = 1.7e9 + 6000 * torch.from_numpy(draws)
    numbers = torch.cat([numbers, numbers / 1e15, -numbers * 1e30]).to(kind)
    _, *lines = prediction_lines("numbers", numbers, ["a", "b"], None)
    read = torch.tensor([[float(text) for text in line[1:]] for line in lines], dtype=torch.float64)
    assert torch.equal(read.to(kind), numbers)


def test_numbers_are_predicted_in_their_own_unit(tmp_path: Path) -> None:
    folder, run = trained(tmp_path, "regression")
    done = cli("predict", folder, tmp_path / "d.npz", "--client", 0)
    lines = lines_of(done)
    assert list(lines[0]) == ["row", "0", "1"]
    predicted = np.array([[float(line["0"]), float(line["1"])] for line in lines])
    with np.load(tmp_path / "d.npz") as stored:
        x, y = stored["x"], stored["y"]
    assert np.abs(predicted - run.model(0).predict(x).numpy()).max() < 1e-3
    assert f"r2 {r2_score(y, predicted):.4f} of 24 rows" in done.stderr
    found = json.loads(cli("evaluate", folder, tmp_path / "d.npz", "--json").stdout)
    assert found["clients"][0]["r2"] == pytest.approx(r2_score(y, predicted), abs=1e-4)
    with pytest.raises(ValueError, match="predicts numbers and no probabilities"):
        run.model(0).probabilities(x)


def test_labels_are_named_with_their_probabilities(tmp_path: Path) -> None:
    folder, run = trained(tmp_path, "multilabel")
    lines = lines_of(cli("predict", folder, tmp_path / "d.npz", "--client", 1))
    assert list(lines[0]) == ["row", "labels", "p_0", "p_1"]
    with np.load(tmp_path / "d.npz") as stored:
        x = stored["x"]
    chances = run.model(1).probabilities(x)
    for line, p, named in zip(lines, chances.tolist(), run.model(1).predict(x), strict=True):
        assert [float(line["p_0"]), float(line["p_1"])] == pytest.approx(p, rel=1e-4)
        assert line["labels"].split() == [str(i) for i in range(2) if p[i] > 0.5] == named


def test_pixels_are_written_to_a_file(tmp_path: Path) -> None:
    folder, run = trained(tmp_path, "segmentation")
    refused = RUNNER.invoke(app, ["predict", str(folder), str(tmp_path / "d.npz"), "--client", "0"])
    assert "name a file, -o masks.npz" in str(refused.exception)
    done = cli("predict", folder, tmp_path / "d.npz", "--client", 0, "-o", tmp_path / "m.npz")
    assert "dice" in done.stderr
    with np.load(tmp_path / "m.npz") as masks, np.load(tmp_path / "d.npz") as stored:
        assert masks["y"].shape == (24, 8, 8)
        x = torch.from_numpy(stored["x"]).unsqueeze(1)
        assert (masks["y"] == run.model(0).predict(x).numpy()).all()
        assert masks["classes"].tolist() == ["0", "1"]


@pytest.mark.parametrize("objective", ["text_classes", "multilabel"])
def test_texts_with_labels_are_read_predicted_and_scored(tmp_path: Path, objective: str) -> None:
    file = tmp_path / "posts.jsonl"
    words = {"cat": "it has soft fur and whiskers", "car": "it has four wheels and doors"}
    several = objective == "multilabel"
    lines = [
        {"text": f"{text} number {i}", "kind": [kind, "thing"] if several else kind}
        for i in range(10)
        for kind, text in words.items()
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    data = {"name": "text_file", "file": str(file), "label": "kind", "words": {"length": 9}}
    folder = tmp_path / "run"
    found = recipe_of(objective, method={"name": "fedavg"}, partition={"name": "iid"})
    model = {"name": "text_mean", "embedding": 4, "hidden": 6}
    found |= {"model": model, "data": data, "clients": {"num_clients": 2}}
    found["engine"] = {"workers": 1, "plans": {"text_mean": {"cohort_size": 2}}}
    run = fedgist.run(found, out=folder)
    done = cli("predict", folder, file, "--client", 0)
    predicted = lines_of(done)
    assert len(predicted) == 20
    assert set(predicted[0]) >= {"row", "p_cat", "p_car"}
    assert "of 20 rows" in done.stderr
    assert cli("evaluate", folder, file).exit_code == 0
    assert len(run.model(0).predict(["soft fur", "wheels"])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["regression", "multilabel", "segmentation"])
def test_exports_say_what_their_outputs_are(tmp_path: Path, objective: str) -> None:
    folder, run = trained(tmp_path, objective)
    path = tmp_path / "model.pt2"
    cli("export", folder, "-o", path, "--client", 0)
    program = torch.export.load(path).module()
    x = run.world.data.x[:5].float()
    outputs = program(x)
    model, raw = run.model(0), run.world.data.x[:5]
    expected = model.answers(raw) if objective == "regression" else model(raw)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    cli("export", folder, "-o", tmp_path / "m.safetensors", "--client", 0)
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as opened:
        about = opened.metadata()
    kinds = {"regression": "numbers", "multilabel": "labels", "segmentation": "pixels"}
    assert about["target"] == kinds[objective]
    assert about["outputs"] == ("numbers" if objective == "regression" else "logits")


@pytest.mark.parametrize("absent", [None, "", []])
def test_texts_without_a_label_are_refused_or_left_out(tmp_path: Path, absent: object) -> None:
    file = tmp_path / "posts.jsonl"
    lines: list[dict[str, object]] = [{"text": f"word{i}", "kind": "ab"[i % 2]} for i in range(8)]
    lines.insert(3, {"text": "lost", "kind": absent})
    file.write_text("\n".join(map(json.dumps, lines)))
    options: dict[str, Any] = {"file": str(file), "label": "kind", "test_fraction": 0.0}
    with pytest.raises(DataError, match=r"line 4: the text has no label in 'kind'; .*mask"):
        load_data("text_file", target="class", **options)
    data = load_data("text_file", target="class", missing_labels="mask", **options)
    assert len(data.y) == 8
    assert data.classes == ("a", "b")
    assert data.notes == ("rows that are left out because they have no label: 1",)


def test_rows_of_files_without_a_label_are_left_out_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,u,v\n" + "".join(f"{i},{i},\n" for i in range(9)) + "7,,\n")
    x, y = np.arange(20, dtype=np.float32).reshape(10, 2), np.ones((10, 2), dtype=np.float32)
    y[3], y[5, 0] = np.nan, np.nan
    np.savez(tmp_path / "d.npz", x=x, y=y)
    options: dict[str, Any] = {"target": "numbers", "missing_labels": "mask", "test_fraction": 0.0}
    table = load_data("table", path=str(tmp_path / "t.csv"), label=["u", "v"], **options)
    stored = load_data("npz", path=str(tmp_path / "d.npz"), **options)
    for data in (table, stored):
        assert len(data.y) == 9
        assert data.notes == ("rows that are left out because they have no label: 1",)
    assert torch.isnan(table.y[:, 1]).all()
    assert int(torch.isnan(stored.y).sum()) == 1
