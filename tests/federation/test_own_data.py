"""Data of a user's own in a federation: clients keep their names, sites number labels alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedgist import run
from fedgist.cli.main import app
from fedgist.errors import RecipeError
from fedgist.federation.recipe import make
from fedgist.federation.recipe_data import client_number
from fedgist.federation.world import make_world

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
    np.savez(file, x=x, y=np.arange(len(x)) % 2, clients=np.repeat(names, 10), **more)
    return file


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
    world = make_world(make(recipe(hospitals(tmp_path, ["1", "2", "10"]))))
    found = {who: client_number(world.partition, who) for who in ("1", "10", "0", 1)}
    assert found == {"1": 0, "10": 2, "0": 0, 1: 1}
    for who in ("3", -1, "-1", "", "9" * 5000, "٢"):
        with pytest.raises(RecipeError, match="there is no client"):
            client_number(world.partition, who)


def test_clients_of_other_partitions_have_numbers(tmp_path: Path) -> None:
    file = hospitals(tmp_path, HOSPITALS)
    world = make_world(make(recipe(file, partition={"name": "iid"}, clients={"num_clients": 2})))
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
