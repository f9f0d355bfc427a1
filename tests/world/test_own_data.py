"""Data of a user's own in a federation: clients keep their names, sites number labels alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedgist import run
from fedgist.cli.main import app
from fedgist.data.dataset import Dataset
from fedgist.errors import DataError, RecipeError
from fedgist.recipe.overrides import Overrides
from fedgist.recipe.reading import make
from fedgist.runs.evaluation import check_evaluation
from fedgist.runs.files.columns import of_all
from fedgist.testing.small_worlds import world_of
from fedgist.world.data import client_number

RNG = np.random.default_rng(0)
HOSPITALS = ["north", "south", "[/red]"]


def recipe(path: Path, **changed: Any) -> dict[str, Any]:
    return {
        "data": {"name": "npz", "path": str(path), **changed.pop("data", {})},
        "partition": {"name": "natural"},
        "model": {"name": "mlp", "hidden": [4]},
        "train": {"num_rounds": 1},
        "engine": {"workers": 1, "cohort_size": 2},
        **changed,
    }


def hospitals(folder: Path, names: list[str], **more: Any) -> Path:
    """Thirty rows of two classes, ten of each client."""
    file = folder / "hospitals.npz"
    x = RNG.normal(size=(10 * len(names), 3))
    np.savez(file, x=x, y=np.arange(len(x)) % 2, client=np.repeat(names, 10), **more)
    return file


def test_a_client_that_train_rows_leaves_without_rows_is_named(tmp_path: Path) -> None:
    # seen: the first rows are those of the first hospitals; the others were gone without a word
    text = "site,a,y\n" + "".join(f"{s},{k},{k % 2}\n" for s in "ABC" for k in range(20))
    (tmp_path / "sites.csv").write_text(text)
    data = {"name": "table", "path": str(tmp_path / "sites.csv"), "label": "y", "client": "site"}
    raw = {"partition": {"name": "natural"}, "data": data | {"train_rows": 20}}
    says = "data.train_rows = 20 leaves client 'C' without training rows: raise it or set data.draw"
    with pytest.raises(RecipeError, match=says):
        world_of(make(raw))
    drawn = raw | {"data": data | {"train_rows": 20, "draw": "random"}}
    assert len(world_of(make(drawn)).partition.train) == 3
    one = {"data": data | {"train_rows": 1, "draw": "random"}, "partition": {"name": "natural"}}
    with pytest.raises(RecipeError, match=r"leaves client '.' without training rows: raise it$"):
        world_of(make(one))
    split = {"partition": {"name": "iid"}, "clients": {"num_clients": 2}}
    assert len(world_of(make(raw | split)).partition.train) == 2


@pytest.mark.filterwarnings("ignore:1 client is in no mean:UserWarning")
def test_clients_keep_their_names(tmp_path: Path) -> None:
    result = run(recipe(hospitals(tmp_path, HOSPITALS)), out=tmp_path / "run")
    split = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert split["clients"] == ["[/red]", "north", "south"]  # in sorted order
    x = result.world.data.x[:2]
    assert result.model("north")(x).tolist() == result.model(1)(x).tolist()
    assert result.model("2")(x).tolist() == result.model("south")(x).tolist()
    with pytest.raises(
        RecipeError,
        match=r"there is no client nort; this run has clients 0\.\.2, called \[/red\], north, "
        r"south; did you mean 'north'\?",
    ):
        result.model("nort")


def contents(file: Path) -> object:
    """Compares with ==; the order of metadata in a safetensors file is not fixed."""
    if file.suffix == ".csv":
        return file.read_text()
    return {name: array.tolist() for name, array in load_file(file).items()}


@pytest.mark.filterwarnings("ignore:1 client is in no mean:UserWarning")
@pytest.mark.parametrize("command", ["predict", "export"])
def test_commands_take_names(tmp_path: Path, command: str) -> None:
    file = hospitals(tmp_path, HOSPITALS)
    run(recipe(file), out=tmp_path / "run")
    out = tmp_path / ("out.csv" if command == "predict" else "out.safetensors")
    words = [command, str(tmp_path / "run"), *([str(file)] if command == "predict" else [])]
    done = CliRunner().invoke(app, [*words, "--client", "north", "-o", str(out)])
    assert (done.exit_code, out.exists()) == (0, True), done.output
    by_name = contents(out)
    CliRunner().invoke(app, [*words, "--client", "1", "-o", str(out)])
    assert contents(out) == by_name
    wrong = CliRunner().invoke(app, [*words, "--client", "west", "-o", str(out)])
    assert isinstance(wrong.exception, RecipeError)


def test_a_name_goes_before_a_number(tmp_path: Path) -> None:
    world = world_of(make(recipe(hospitals(tmp_path, ["1", "2", "10"]))))
    found = {who: client_number(world.partition, who) for who in ("1", "10", "0", 1)}
    assert found == {"1": 0, "10": 2, "0": 0, 1: 1}
    for who in ("3", -1, "-1", "", "9" * 5000, "٢"):
        with pytest.raises(RecipeError, match="there is no client"):
            client_number(world.partition, who)


def test_clients_of_other_partitions_have_numbers(tmp_path: Path) -> None:
    file = hospitals(tmp_path, HOSPITALS)
    world = world_of(make(recipe(file, partition={"name": "iid"}, clients={"num_clients": 2})))
    assert world.partition.names == ()
    with pytest.raises(
        RecipeError, match=r"there is no client north; this run has clients 0\.\.1$"
    ):
        client_number(world.partition, "north")


def test_the_partition_is_printed_with_names(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        f"[data]\nname = 'npz'\npath = '{hospitals(tmp_path, HOSPITALS)}'\n"
        "[partition]\nname = 'natural'\n[model]\nname = 'mlp'\n"
    )
    done = CliRunner().invoke(app, ["partition", str(file)])
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in HOSPITALS)


def seen_by_hand(arrays: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The same arrays, each row normalized beforehand by its client's own training rows."""
    x = arrays["x"].copy()
    for name in names:
        own = arrays["client"] == name
        train = arrays["x"][own & ~arrays["test"]].astype(np.float32).astype(np.float64)
        x[own] = (x[own] - train.mean(0)) / train.std(0)
    return arrays | {"x": x}


def drifted(names: list[str]) -> dict[str, Any]:
    """Clients whose inputs have other units, so that whose moments are used makes a difference."""
    client = np.repeat(names, 12)
    units = np.repeat([[1.0, 0.0], [30.0, 100.0], [0.1, -7.0]], 12, axis=0)
    x = RNG.normal(size=(36, 3))
    y = (x[:, 0] > 0).astype(int)
    return {
        "x": x * units[:, :1] + units[:, 1:],
        "y": y,
        "client": client,
        "test": np.arange(36) % 3 == 0,
    }


@pytest.mark.parametrize(
    ("method", "engine"), [("fedavg", "local"), ("centralized", "local"), ("local", "loopback")]
)
def test_each_clients_own_moments(tmp_path: Path, method: str, engine: str) -> None:
    arrays = drifted(HOSPITALS)
    raw, ready = tmp_path / "raw.npz", tmp_path / "ready.npz"
    np.savez(raw, **arrays)
    np.savez(ready, **seen_by_hand(arrays, HOSPITALS))
    found, wanted = (
        run(
            recipe(
                file,
                data={"normalize": normalize},
                method={"name": method},
                engine={"name": engine, "workers": 1, "cohort_size": 2},
                train={"num_rounds": 2, "lr": 0.05},
                evaluate={"train": True},
            )
        )
        for file, normalize in ((raw, "client"), (ready, "none"))
    )
    assert len(found.rounds) == len(wanted.rounds)
    for one, other in zip(found.rounds, wanted.rounds, strict=True):
        scores = {key: value for key, value in other.items() if isinstance(value, float)}
        scores = {key: value for key, value in scores.items() if not key.startswith("time")}
        assert {key: one[key] for key in scores} == pytest.approx(scores, rel=1e-4, nan_ok=True)
        assert any(key.startswith("eval") for key in scores)
    for number, name in enumerate(sorted(HOSPITALS)):
        rows = arrays["client"] == name
        raw_x, ready_x = (
            torch.from_numpy(f["x"][rows]).float() for f in map(np.load, (raw, ready))
        )
        assert found.model(name)(raw_x).detach().numpy() == pytest.approx(
            wanted.model(number)(ready_x).detach().numpy(), abs=1e-4
        )


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        ({"on": "global"}, "evaluate.on = 'global' scores rows that belong to no client, and"),
        ({"on": "test"}, "evaluate.on = 'test' scores rows that belong to no client"),
        (
            {"sets": {"ones": {"classes": [1]}}},
            "evaluate.sets scores rows .* state data.mean and data.std for the others",
        ),
    ],
)
def test_the_server_needs_moments_of_its_own(
    tmp_path: Path, evaluate: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "raw.npz", **drifted(HOSPITALS))
    asked = recipe(tmp_path / "raw.npz", evaluate=evaluate, method={"name": "fedavg"})
    asked["data"]["normalize"] = "client"
    with pytest.raises(RecipeError, match=message):
        check_evaluation(world_of(make(asked)).server)
    asked["data"] |= {"mean": [5.0], "std": [2.0, 3.0, 4.0]}
    world = world_of(make(asked))
    whole = world.server.task.test_sets["all"].batch(torch.arange(12).unsqueeze(0)).x[0]
    by_hand = (world.data.x_test.double() - 5) / torch.tensor([2.0, 3.0, 4.0])
    assert whole.numpy() == pytest.approx(by_hand.numpy(), rel=1e-5)
    rows = world.population.table("test", [0])
    assert torch.equal(world.population.examples_of("test").batch(rows).x[0], whole)


def test_rows_of_nobody_are_not_scored_together(tmp_path: Path) -> None:
    """With moments of clients only, there is no score of the whole test set."""
    np.savez(tmp_path / "raw.npz", **drifted(HOSPITALS))
    for partition, complete in (
        ({"name": "natural"}, True),
        ({"name": "pathological", "classes_per_client": 1}, False),
    ):
        few = {"num_clients": 1} if not complete else {"num_clients": 3}
        result = run(
            recipe(
                tmp_path / "raw.npz",
                data={"normalize": "client"},
                method={"name": "fedavg"},
                partition=partition,
                clients=few,
            )
        )
        assert (of_all("accuracy") in result.rounds[-1]) == complete


@pytest.mark.filterwarnings("ignore:1.* client:UserWarning")
def test_test_rows_of_clients_without_training_rows_are_counted(tmp_path: Path) -> None:
    # seen: fifteen of twenty test rows were dropped from the clients' scores in silence
    rows = [f"{i},{'ab'[i % 2]},{'north' if i % 3 else 'south'}" for i in range(30)]
    tests = [f"{i},{'ab'[i % 2]},{'west' if i % 4 else 'north'}" for i in range(20)]
    for name, lines in (("train", rows), ("test", tests)):
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y,place", *lines]) + "\n")
    data = {"name": "table", "label": "y", "client": "place", "test": str(tmp_path / "test.csv")}
    raw = recipe(tmp_path / "train.csv", data=data)
    assert (
        "15 test rows are of clients without training rows: no client is scored on them"
        in run(raw).summary["notes"]
    )


@pytest.mark.parametrize(
    ("counts", "share", "said"),
    [
        ([9, 40, 30, 9], 0.1, "holds out no row of 2 of 4 clients"),
        ([4, 4], 0.2, "holds out no row of 2 of 2 clients"),
        ([10, 5], 0.2, ""),
        ([3, 2], 0.0, ""),
    ],
)
def test_clients_without_validation_rows_are_counted(
    counts: list[int], share: float, said: str
) -> None:
    ends = np.cumsum(counts)
    clients = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    y, y_test = torch.arange(int(ends[-1])) % 2, torch.arange(4) % 2
    data = Dataset("few", y.float()[:, None], y, y_test.float()[:, None], y_test, 2)
    raw = {"data": {"validation": share}, "model": {"name": "mlp", "hidden": [3]}}
    notes = world_of(make(raw), Overrides(data=data, clients=clients)).data.notes
    assert [note for note in notes if "data.validation" in note and said in note] == [
        f"data.validation = {share:g} {said}: they are in no score on validation rows"
    ] * bool(said)


def test_moments_of_the_recipe_are_checked(tmp_path: Path) -> None:
    np.savez(tmp_path / "raw.npz", **drifted(HOSPITALS))
    for data, message in (
        ({"mean": [1.0]}, "data.std has 0 numbers; raw.npz needs 3, or 1 for all"),
        ({"normalize": "none", "mean": [1.0], "std": [1.0]}, "leave out data.mean and std"),
        ({"normalize": "pool"}, "data.normalize = 'pool': must be"),
        ({"mean": [1.0], "std": [0.0]}, r"data.std.*= 0.0: must be greater"),
        ({"mean": [float("nan")], "std": [1.0]}, r"data.mean.*must be a finite"),
    ):
        with pytest.raises((RecipeError, DataError), match=message):
            world_of(make(recipe(tmp_path / "raw.npz", data=data)))


def test_a_file_of_who_is_online_is_an_ordinary_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").write_bytes(bytes(100))
    for name in ("pipe", "zeros", "absent"):
        asked = recipe(
            hospitals(tmp_path, HOSPITALS), clients={"availability": str(tmp_path / name)}
        )
        with pytest.raises(
            RecipeError, match=r"clients.availability: .* is not a file of"
        ) as error:
            world_of(make(asked))
        assert "\n" not in str(error.value)
