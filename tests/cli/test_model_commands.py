"""The commands that use trained models: what they print of a user's further examples."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, f1_score, log_loss, roc_auc_score
from typer.testing import CliRunner, Result

import fedgist
from fedgist.cli.main import app
from fedgist.errors import InputError
from fedgist.runs.runner import load_run

ENGINE = {"workers": 1, "cohort_size": 5}


def cli(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def of(*args: object) -> Result:
    done = cli(*args)
    assert done.exit_code == 0, done.exception
    return done


def refused(says: str, *args: object) -> None:
    error = cli(*args).exception
    assert isinstance(error, InputError)
    with pytest.raises(InputError, match=says):
        raise error


def table_of(rows: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    ill = np.arange(rows) % 3 == 0
    age = 40 + 15 * ill + rng.normal(size=rows) * 9
    names = np.where(ill, "ill", "well")
    return pd.DataFrame({"age": age.round(1), "town": rng.choice(["a", "b"], rows), "state": names})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    table_of(120, 0).to_csv(folder / "train.csv", index=False)
    recipe = {
        "data": {"name": "table", "path": str(folder / "train.csv"), "label": "state"},
        "partition": {"name": "iid"},
        "clients": {"num_clients": 3},
        "train": {"num_rounds": 8, "lr": 0.05},
        "engine": ENGINE,
    }
    fedgist.run(recipe, out=folder / "run")
    table_of(60, 1).to_csv(folder / "more.csv", index=False)
    table_of(60, 1).drop(columns="state").to_csv(folder / "bare.csv", index=False)
    table_of(60, 1).replace("ill", "dead").to_csv(folder / "odd.csv", index=False)
    return folder


def predicted(run: Path, client: int) -> tuple[list[str], np.ndarray]:
    done = of("predict", run / "run", run / "more.csv", "--client", client)
    table = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["row"] for row in table] == [str(i) for i in range(60)]
    probabilities = np.array([[float(row["p_ill"]), float(row["p_well"])] for row in table])
    return [row["label"] for row in table], probabilities / probabilities.sum(1, keepdims=True)


def test_predictions_have_the_ids_of_rows(tmp_path: Path) -> None:
    """Ignored columns with another value in each row are ids; others say less than they fill."""
    rng = np.random.default_rng(5)
    frame = table_of(40, 2)
    frame["patient"] = [f"P{i:03}" for i in rng.permutation(40)]
    frame["label"] = [f"{i:.1f}" for i in rng.permutation(40)]  # a name that predictions use, too
    frame["ward"] = "ICU"
    frame.to_csv(tmp_path / "train.csv", index=False)
    frame[::-1].to_csv(tmp_path / "new.csv", index=False)
    ignored = ["patient", "label", "ward"]
    recipe = {
        "data": {
            "name": "table",
            "path": str(tmp_path / "train.csv"),
            "label": "state",
            "ignore": ignored,
        },
        "partition": {"name": "iid"},
        "clients": {"num_clients": 2},
        "train": {"num_rounds": 1},
        "engine": ENGINE,
    }
    fedgist.run(recipe, out=tmp_path / "run")
    done = of("predict", tmp_path / "run", tmp_path / "new.csv", "--client", 0)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [*rows[0]][:4] == ["row", "patient", "table: label", "label"]
    assert [row["patient"] for row in rows] == frame["patient"][::-1].tolist()
    assert [row["table: label"] for row in rows] == frame["label"][::-1].tolist()
    frame.drop(columns=ignored).to_csv(tmp_path / "bare.csv", index=False)
    bare = of("predict", tmp_path / "run", tmp_path / "bare.csv", "--client", 0).stdout
    assert bare.startswith("row,label,")


def test_rows_of_other_clients_are_counted(tmp_path: Path) -> None:
    frame = table_of(60, 3).assign(site=["Bonn", "Kiel", "Ulm"] * 20)
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = {"name": "table", "path": str(tmp_path / "t.csv"), "label": "state", "client": "site"}
    recipe = {
        "data": data,
        "partition": {"name": "natural"},
        "train": {"num_rounds": 1},
        "engine": ENGINE,
    }
    fedgist.run(recipe, out=tmp_path / "run")
    said = of("predict", tmp_path / "run", tmp_path / "t.csv", "--client", 1).stderr
    assert "! rows of other clients (Bonn, Ulm): 40; all rows are predicted by the" in said
    frame[frame.site == "Kiel"].to_csv(tmp_path / "own.csv", index=False)
    own = of("predict", tmp_path / "run", tmp_path / "own.csv", "--client", "Kiel")
    assert "other clients" not in own.stderr
    assert own.stdout.startswith("row,label,")


@pytest.mark.slow
def test_accuracy_is_said_where_there_are_labels(run: Path) -> None:
    labels, _ = predicted(run, 1)
    right = np.mean(np.array(labels) == table_of(60, 1)["state"])
    done = of("predict", run / "run", run / "more.csv", "--client", 1)
    assert done.stderr.splitlines()[-1] + "\n" == f"accuracy {100 * right:.2f} % of 60 rows\n"
    assert "accuracy" not in done.stdout
    assert "accuracy" not in of("predict", run / "run", run / "bare.csv", "--client", 1).stderr
    said = of("predict", run / "run", run / "odd.csv", "--client", 1).stderr.splitlines()[-1]
    assert said.startswith("accuracy not known: odd.csv: the labels 'state': unknown label 'dead'")


def test_evaluate_gives_the_metrics_of_scikit_learn(run: Path) -> None:
    y = (table_of(60, 1)["state"] == "well").to_numpy().astype(int)
    done = json.loads(of("evaluate", run / "run", run / "more.csv", "--json").stdout)
    assert done["rows"] == 60
    assert [line["client"] for line in done["clients"]] == ["0", "1", "2"]
    for client, line in enumerate(done["clients"]):
        labels, probabilities = predicted(run, client)
        guess = (np.array(labels) == "well").astype(int)
        assert line["accuracy"] == pytest.approx(np.mean(guess == y))
        assert line["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, guess))
        assert line["macro_f1"] == pytest.approx(f1_score(y, guess, average="macro"))
        assert line["auroc"] == pytest.approx(roc_auc_score(y, probabilities[:, 1]), abs=1e-4)
        assert line["loss"] == pytest.approx(log_loss(y, probabilities), abs=1e-4)
    means = [np.mean([line["accuracy"] for line in done["clients"]])]
    assert done["mean"]["accuracy"] == pytest.approx(means[0])


def test_evaluate_prints_a_table_of_one_client_or_all(run: Path) -> None:
    whole = of("evaluate", run / "run", run / "more.csv").stdout
    assert "Final models on 60 rows" in whole
    assert [word for word in ("accuracy", "log loss", "mean") if word not in whole] == []
    alone = of("evaluate", run / "run", run / "more.csv", "--client", 2).stdout
    assert "mean" not in alone
    refused("there is no client 7", "evaluate", run / "run", run / "more.csv", "--client", 7)


def test_evaluate_warns_of_rows_that_the_run_was_trained_on(run: Path) -> None:
    _, world = load_run(run / "run")
    taught = len(world.partition.train.rows)  # of 120 rows, the others are test rows
    done = of("evaluate", run / "run", run / "train.csv", "--json")
    assert done.stderr.startswith("! ")
    number = int(done.stderr.split()[1])
    assert taught <= number <= 120
    assert f"{number} of the 120 examples equal training rows of this run" in done.stderr
    assert json.loads(done.stdout)["rows"] == 120
    assert of("evaluate", run / "run", run / "more.csv").stderr == ""


def test_evaluate_needs_labels(run: Path) -> None:
    refused("bare.csv has no labels: evaluate needs", "evaluate", run / "run", run / "bare.csv")
    refused("unknown label 'dead'", "evaluate", run / "run", run / "odd.csv")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    recipe: dict[str, Any] = {"data": {"train_rows": 300}, "train": {"num_rounds": 1}}
    data = fedgist.run(recipe | {"engine": ENGINE}, out=folder / "run").world.data
    for i in range(12):
        place = folder / "images" / str(int(data.y_test[i]))
        place.mkdir(parents=True, exist_ok=True)
        pixels = (data.x_test[i, 0].double() * 255 / 16).round().to(torch.uint8).numpy()
        Image.fromarray(pixels).save(place / f"n{i}.png")
    np.savez(folder / "few.npz", x=data.x_test[:12].numpy(), y=data.y_test[:12].numpy())
    np.savez(folder / "short.npz", x=data.x_test[:12].numpy(), y=data.y_test[:11].numpy())
    return folder


def test_images_are_predicted_by_their_names(digits: Path) -> None:
    done = of("predict", digits / "run", digits / "images", "--client", 0)
    files = [row["file"] for row in csv.DictReader(io.StringIO(done.stdout))]
    images = sorted((digits / "images").rglob("*.png"))
    assert files == [str(image.relative_to(digits / "images")) for image in images]
    assert done.stderr.endswith("of 12 rows\n")
    one = of("predict", digits / "run", images[0], "--client", 0)
    assert one.stdout.splitlines()[1].startswith(f"{images[0].name},")


def test_an_array_and_its_images_have_the_same_scores(digits: Path) -> None:
    scores = [
        json.loads(of("evaluate", digits / "run", digits / name, "--client", "0", "--json").stdout)
        for name in ("images", "few.npz")
    ]
    for metric, value in scores[0]["mean"].items():
        assert value == pytest.approx(scores[1]["mean"][metric], abs=1e-6)
    refused("12 examples, but 11 labels", "evaluate", digits / "run", digits / "short.npz")


def test_export_looks_at_the_name_before_the_run(tmp_path: Path) -> None:
    refused("unknown suffix", "export", "nowhere", "--client", 0, "-o", tmp_path / "m.bin")
