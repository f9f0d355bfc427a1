"""A site's model folder predicts as the run trained, whatever the site holds back or lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedgist.core.privacy import of_records
from fedgist.federation.site.agent import MODELS
from fedgist.runs.evaluation import score_rows
from fedgist.runs.files.record import read_lines
from fedgist.runs.finished.trained_models import ClientModel, trained_model
from fedgist.runs.runner import load_run
from sites_in_threads import Kits
from three_sites import CLASSES, NAMES, recipe, rows_of_sites, write_rows

SOURCE = 'name = "npz"\npath = "{name}.npz"\n'
LEAST = 25


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    return Kits.make(tmp_path_factory.mktemp("kits"))


def model_of(folder: Path, name: str) -> ClientModel:
    (place,) = (folder / name / MODELS).iterdir()
    federation, world = load_run(place)
    return trained_model(federation, world, 0)


def check_scores(folder: Path, least: int = 0) -> None:
    """Compare all sites' models with the record, on rows of classes with ``least`` rows."""
    data, parts = rows_of_sites()
    lines = read_lines(folder / "run/clients.jsonl")
    last = {line["client"]: line for line in lines if line["split"] == "client"}
    for number, name in enumerate(NAMES):
        model, rows = model_of(folder, name), parts.test[number]
        enough = torch.bincount(data.y[parts.train[number]], minlength=len(CLASSES)) >= least
        used = rows[enough[data.y_test[rows]]]
        scores = score_rows(model, data.x_test[used], data.y_test[used], model.ctx.task.objective)
        assert scores["loss"] == pytest.approx(last[number]["loss"], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("held_back", [False, True])
def test_a_model_normalizes_by_the_rows_that_it_was_trained_on(
    *, held_back: bool, kits: Kits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen: by all rows of the site, also those held out, and those that its policy holds back
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    data = {"classes": CLASSES, "normalize": "client"} | ({} if held_back else {"validation": 0.3})
    policy = f"[policy]\nleast_rows = {LEAST}\n" if held_back else ""
    kits.serve(recipe("fedavg", rounds=2, data=data), tmp_path, source=SOURCE + policy)
    check_scores(tmp_path, LEAST if held_back else 0)


@pytest.mark.slow
def test_a_site_that_was_never_drawn_gets_the_last_model_and_rounds_can_be_raised(
    kits: Kits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    few = {"train": {"fraction_train": 0.3, "round_seconds": 60.0}}
    kits.serve(recipe("fedavg", rounds=1, **few), tmp_path)
    assert [line["clients/asked"] for line in read_lines(tmp_path / "run/rounds.jsonl")] == [1]
    check_scores(tmp_path)
    before = {name: model_of(tmp_path, name) for name in NAMES}
    kits.serve(recipe("fedavg", rounds=3, **few), tmp_path)  # seen: the error named an option
    lines = read_lines(tmp_path / "run/rounds.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert "train.num_rounds was raised from 1 to 3" in lines[1]["events"]
    check_scores(tmp_path)
    x = rows_of_sites()[0].x_test[:5]
    assert not torch.equal(before["ulm"](x), model_of(tmp_path, "ulm")(x))


@pytest.mark.slow
def test_a_private_model_is_written_despite_a_row_that_cannot_be_used(
    kits: Kits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen: the budget was spent, and the site ended with an error in place of its model
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    arrays = dict(np.load(tmp_path / "lyon.npz"))
    arrays["x"][3, 5] = np.nan
    np.savez(tmp_path / "lyon.npz", **arrays)
    privacy = {"unit": "record", "epsilon": 5.0, "delta": 1e-5, "clip": 1.0, "where": "local"}
    private: dict[str, Any] = {"privacy": privacy | {"noise": "system"}}
    raw = recipe(
        "analytic",
        rounds=1,
        method={"wire": "float64"},
        model={"name": "logistic"},
        clients={"max_rows": 900},
        **private,
    )
    kits.serve(raw, tmp_path, source=SOURCE + "[policy]\nmax_rows = 900\n")
    for name in NAMES:
        model = model_of(tmp_path, name)
        # the head was solved for rows of unit length, and is asked about such rows
        assert of_records(model.ctx.task.privacy), name
