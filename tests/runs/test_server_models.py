"""Models of the server by name: predicted with, scored, probed and exported as clients' are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedgist
from fedgist.cli.main import app
from fedgist.errors import RecipeError
from fedgist.runs.finished.model_files import description, export
from fedgist.testing.small_worlds import SIZES, blobs

ENGINE = {"workers": 1, "server_threads": 1, "cohort_size": 2}
POOLED: dict[str, Any] = {
    "clients": {
        "num_clients": 4,
        "pools": {"small": {"model": "logistic"}, "large": {"model": "mlp", "clients": [0]}},
    },
    "data": {"name": "digits", "train_rows": 200},
    "method": {"name": "fedavg"},
    "train": {"num_rounds": 2, "optimizer": "sgd", "lr": 0.1},
    "evaluate": {"on": "global"},
    "engine": ENGINE,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fedgist.Result]:
    folder = tmp_path_factory.mktemp("pools") / "run"
    return folder, fedgist.run(POOLED, out=folder)


def test_a_model_of_the_server_predicts_as_it_was_scored(
    run: tuple[Path, fedgist.Result], tmp_path: Path
) -> None:
    folder, result = run
    data = result.world.data
    x, y = data.x_test.numpy(), data.y_test
    for name in ("small", "large"):
        predicted = result.model(f"server/{name}").predict(x)
        right = np.mean(
            [data.names[int(label)] == p for label, p in zip(y, predicted, strict=True)]
        )
        assert right == pytest.approx(result.rounds[-1][f"eval/global/{name}/all/accuracy"])
    held = result.model(0)  # a client of both, which is tested with the model of the smaller pool
    raw = torch.from_numpy(x)
    assert torch.equal(result.model("server/large")(raw), held(raw))
    np.savez(tmp_path / "more.npz", x=x, y=y.numpy())
    words = ["evaluate", str(folder), str(tmp_path / "more.npz"), "--client", "server/small"]
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    accuracy = result.rounds[-1]["eval/global/small/all/accuracy"]
    assert told["clients"][0]["accuracy"] == pytest.approx(accuracy)


@pytest.mark.slow
def test_it_is_probed_alone_and_exported(run: tuple[Path, fedgist.Result], tmp_path: Path) -> None:
    folder, result = run
    words = ["probe", str(folder), "--client", "server/large", "--by", "knn", "--json"]
    (alone,) = json.loads(CliRunner().invoke(app, words).stdout)["probes"]
    assert alone["model"] == "server/large"
    with_starts = json.loads(CliRunner().invoke(app, [*words, "--starts"]).stdout)["probes"]
    assert [p["model"] for p in with_starts] == ["server/large", "start/small", "start/large"]
    assert with_starts[0] == alone
    out = tmp_path / "large.pt2"
    done = CliRunner().invoke(
        app, ["export", str(folder), "--client", "server/large", "-o", str(out)]
    )
    assert "server/large of" in done.output
    x = result.world.data.x_test
    program = torch.export.load(out).module()
    torch.testing.assert_close(program(x), result.model("server/large")(x))


@pytest.mark.slow
def test_a_model_that_the_server_has_not_is_named_with_those_that_it_has(
    run: tuple[Path, fedgist.Result],
) -> None:
    with pytest.raises(RecipeError, match=r"no model server/larg; .* has server/large, server/sm"):
        run[1].model("server/larg")
    told = CliRunner().invoke(app, ["probe", str(run[0]), "--client", "server/larg"])
    assert "no model server/larg" in str(told.exception)
    on_clients = {"evaluate": {"on": "client"}}
    local = {"clients": {"num_clients": 4}, "method": {"name": "local"}}
    alone = fedgist.run(POOLED | local | on_clients)
    with pytest.raises(RecipeError, match="the server of this run has none of its own"):
        alone.model("server/mlp")
    own = POOLED | {"data": {"name": "digits", "train_rows": 200, "normalize": "client"}}
    result = fedgist.run(own | on_clients)
    with pytest.raises(RecipeError, match=r"server/small: with data\.normalize = 'client'"):
        result.model("server/small")


@pytest.mark.slow
def test_a_student_that_no_client_has_is_exported_as_an_encoder(tmp_path: Path) -> None:
    mlp = {"model": "mlp", "hidden": [6]}
    recipe: dict[str, Any] = {
        "clients": {
            "num_clients": len(SIZES),
            "architectures": {
                "mine": mlp | {"share": 1.0},
                "own": mlp | {"hidden": [9], "share": 0.0},
            },
        },
        "objective": {"name": "simclr", "projection": 4},
        "partition": {"name": "iid"},
        "method": {
            "name": "flesd",
            "student": "own",
            "distillation": {"epochs": 1, "batch_size": 8, "queue": 20},
        },
        "train": {"num_rounds": 1, "batch_size": 8},
        "evaluate": {"probe": "knn"},
        "engine": ENGINE,
    }
    data = blobs()
    result = fedgist.run(recipe, data=data, public=data.x.numpy())
    model = result.model("server/own")
    assert model(data.x_test).shape == (len(data.x_test), 9)
    told = description(model)
    assert (told["outputs"], told["classes"]) == ("features", [])
    assert description(fedgist.run(POOLED).model(1))["outputs"] == "logits"
    export(model, tmp_path / "own.pt2")
    program = torch.export.load(tmp_path / "own.pt2").module()
    torch.testing.assert_close(program(data.x_test), model(data.x_test))
